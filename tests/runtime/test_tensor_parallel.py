# SPDX-License-Identifier: Apache-2.0
"""One model on two processes: the logits and texts of one process, and the same bits on both."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

from trtllm_replayssm import _core
from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.model_config import CheckpointError, ModelConfig
from trtllm_replayssm.runtime.tensor_parallel import TensorParallel

from .conftest import SMALL, TINY, write_checkpoint

TEXTS = ["In the beginning God created", "And the LORD said unto", "Blessed"]
PARAMS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=24, temperature=0.8, seed=5),
    SamplingParams(max_tokens=33),
]
TOKENS = list(range(5, 85))
BIASED = SMALL | {"use_bias": True, "mlp_bias": True}


def outcome(checkpoint, device, group=None, **options):
    options = {"cuda_graphs": False} | options
    engine = Engine(checkpoint, device=device, dtype="float32", window=9, tensor_parallel=group, **options)
    tokens = [sequence.tokens for sequence in engine.generate(TEXTS, PARAMS)]
    return {"logits": engine.logits(TOKENS).cpu(), "tokens": tokens, "memory": engine.memory_per_request("replay")}


def on_rank(rank, folder, device, runs):
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    results = [outcome(checkpoint, device, dist.group.WORLD, **options) for checkpoint, options in runs]
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


TWO_GPUS = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            torch.cuda.device_count() < 2 or not _core.has_cuda(), reason="needs two GPUs and the CUDA ops"
        ),
    ],
)


@pytest.mark.parametrize("device", ["cpu", TWO_GPUS])
def test_two_ranks_give_what_one_gives(tmp_path, device):
    """The shipped checkpoint, token by token and with its MTP head's drafts; one with biases, whose texts are noise.
    Over gloo on CPUs, over NCCL on GPUs."""
    biased = write_checkpoint(tmp_path / "biased", BIASED)
    runs = [(TINY, {}), (TINY, {"speculation": "mtp", "draft_tokens": 3}), (biased, {"mode": "conventional"})]
    spawn(on_rank, (str(tmp_path), device, runs), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for (checkpoint, options), mine, other in zip(runs, first, second, strict=True):
        assert torch.equal(mine["logits"], other["logits"]) and mine["tokens"] == other["tokens"]
        alone = outcome(checkpoint, device, **options)
        assert (mine["logits"] - alone["logits"]).abs().max() <= 1e-3
        assert mine["memory"] < 0.6 * alone["memory"]
        if checkpoint == TINY:
            assert mine["tokens"] == alone["tokens"]


@pytest.mark.parametrize(
    "change, tp, message",
    [
        ({}, 3, "mamba_heads 4 cannot be divided among 3"),
        ({"mamba_num_heads": 8}, 4, "mamba_groups 2 cannot be divided among 4"),
        ({"mamba_num_heads": 8, "n_groups": 4}, 4, "attention_heads 6 cannot"),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3, "mamba_num_heads": 6, "n_groups": 6},
            2,
            "attention_heads",
        ),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "kv_heads 3 can be neither divided among 2"),
        ({"moe_shared_expert_intermediate_size": 41}, 2, "shared_expert_size 41 cannot"),
    ],
)
def test_what_cannot_be_divided_is_refused(monkeypatch, tmp_path, change, tp, message):
    config = ModelConfig.read(write_checkpoint(tmp_path, SMALL | change))
    monkeypatch.setattr(dist, "get_world_size", lambda group: tp)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    with pytest.raises(CheckpointError, match=message):
        TensorParallel(config, object())
