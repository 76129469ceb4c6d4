# SPDX-License-Identifier: Apache-2.0
"""What the runtime's tests share: the shipped checkpoint, small random ones, and how texts are compared."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trtllm_replayssm import _core
from trtllm_replayssm.runtime import Engine, ModelConfig, runner
from trtllm_replayssm.runtime.weights import expected_tensors, mtp_tensors

TINY = Path(__file__).parents[2] / "examples" / "tiny-nemotron-h"

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not (torch.cuda.is_available() and _core.has_cuda()),
            reason="needs a GPU and the CUDA ops: run scripts/gpu/test.sh on a machine that has them",
        ),
    ],
)
MARGIN = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}

# A model with every kind of layer, small enough to build in no time, and awkward: odd sizes, several groups.
SMALL = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "dtype": "float32",
    "vocab_size": 1024,
    "hidden_size": 72,
    "hybrid_override_pattern": "M-ME*M",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 512,
    "mamba_num_heads": 4,
    "mamba_head_dim": 40,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 136,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The models are tiny and the machine may be busy: threads would wait for each other most of the time."""
    torch.set_num_threads(1)


@pytest.fixture(params=["cpu", GPU])
def device(request):
    return request.param


def random_tensors(config, seed=0):
    """Plausible random weights for every tensor that the config asks for, its MTP head included."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in (expected_tensors(config) | mtp_tensors(config)).items():
        noise = torch.randn(shape, generator=random)
        if name.endswith("A_log"):
            tensor = torch.rand(shape, generator=random) * math.log(16)
        elif name.endswith("dt_bias"):
            tensor = noise - 3
        elif name.endswith("e_score_correction_bias"):
            tensor = noise * 0.1
        elif name.endswith("embeddings.weight"):
            tensor = noise
        elif len(shape) == 1:
            tensor = 1 + 0.1 * noise
        else:
            tensor = noise * shape[-1] ** -0.5
        tensors[name] = tensor
    return tensors


def write_checkpoint(folder, raw, seed=0):
    """A random checkpoint for the config.json content `raw`, with the shipped tokenizer. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copy(TINY / "tokenizer.json", folder)
    tensors = random_tensors(ModelConfig.read(folder), seed)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A random checkpoint of SMALL."""
    return write_checkpoint(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture
def recorded(monkeypatch):
    """The logits that engines sample from, in order: a list of fp32 [rows, vocab]. `recorded.rows` has them by (seed,
    position) of the row."""

    class Recorded(list):
        rows = {}

    seen, sample = Recorded(), runner.sample

    def record(logits, params, positions, tiles, rows=None):
        chosen = sample(logits, params, positions, tiles, rows)
        if rows is None:
            rows = torch.arange(len(logits), device=logits.device)
        live = positions > 1  # the first token of a text cannot be chosen: tokens of no row have position 0
        seen.append(logits[live].clone())
        names = [params[index].seed for index in rows[live].tolist()]
        seen.rows.update(zip(zip(names, positions[live].tolist(), strict=True), seen[-1], strict=True))
        return chosen

    monkeypatch.setattr(runner, "sample", record)
    return seen


@pytest.fixture
def in_step(monkeypatch):
    """Engines launch a pass when the last one's outcomes are handed out: between two steps nothing is on its way."""
    monkeypatch.setattr(runner.Runner, "runs_ahead", False)


def same_text(reference: Engine, one, other, neighbours=False, margin=None):
    """Two greedy texts of one prompt are equal, or part where rounding may swap the two best logits.

    neighbours: also if these are no further apart than adjacent numbers of the dtype. That is what rounding all inputs
    of dense layers to 16 bits, as without `deterministic`, may do to logits. margin: what else rounding may do.
    """
    assert one.prompt == other.prompt
    for index, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            best = reference.logits(one.prompt + one.tokens[:index])[-1].topk(2)
            apart = float(best.values[0] - best.values[1])
            limit = margin or MARGIN[reference.dtype]
            if neighbours:
                limit = max(limit, torch.finfo(reference.dtype).eps * float(best.values[0].abs()))
            assert apart <= limit, f"texts part at token {index} with a margin of {apart}"
            assert {a, b} == set(best.indices.tolist())
            return
    assert len(one.tokens) == len(other.tokens)


def relative_error(given, expected):
    """Largest relative L2 error of a row."""
    return float(((given - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
