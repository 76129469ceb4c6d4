# SPDX-License-Identifier: Apache-2.0
"""mode="auto": what is chosen for a pool, and that it is what runs."""

import json
import math

import pytest
import torch

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops
from trtllm_replayssm.bench.kernel import GEOMETRIES
from trtllm_replayssm.cli import main
from trtllm_replayssm.runtime import Engine, SamplingParams, engine
from trtllm_replayssm.runtime.decode_mode import resolve

from .conftest import TINY
from .prompts import PROMPTS

CUDA = torch.device("cuda")
SUPER = GEOMETRIES["super"]
SHARD = MambaGeometry(num_heads=16, head_dim=64, num_groups=1, state_dim=128, conv_kernel=4)  # of Super, one of eight


@pytest.mark.parametrize(
    ("geometry", "slots", "chosen"),
    [
        (SUPER, 1, "conventional"),
        (SUPER, 2, "replay"),
        (SUPER, 512, "replay"),
        (GEOMETRIES["nano4b"], 1, "conventional"),
        (GEOMETRIES["nano4b"], 2, "replay"),
        (GEOMETRIES["ultra"], 1, "replay"),
        (SHARD, 8, "conventional"),
        (SHARD, 9, "replay"),
    ],
)
def test_small_pools_decode_conventionally(geometry, slots, chosen):
    assert resolve("auto", CUDA, geometry, slots) == chosen
    assert resolve("auto", torch.device("cpu"), geometry, slots) == "replay"
    for mode in ("replay", "conventional"):
        assert resolve(mode, CUDA, geometry, slots) == mode


@pytest.mark.parametrize(
    "asked",
    [
        {"window": 16},
        {"checkpoint_format": "fp16"},
        {"checkpoint_format": "fp16_sr"},
        {"read_copy": "nvfp4"},
        {"drafts": 1},
        {"deterministic": True},
    ],
)
def test_auto_overrides_nothing_that_was_asked_for(asked):
    assert resolve("auto", CUDA, SUPER, 1, **asked) == "replay"
    assert resolve("conventional", CUDA, SUPER, 1, **asked) == "conventional"


def test_why_auto_keeps_formats_of_16_bits_with_replay():
    """Outputs after 1024 tokens, from an FP16 state that is rounded at each of them, or once a window of 16: sixteen
    times as many independent errors are four times as large."""
    tokens, step, memory = 1024, 0.01, torch.tensor([64.0, 512.0])
    geometry = MambaGeometry(num_heads=2, head_dim=8, num_groups=1, state_dim=64, conv_kernel=4)
    random = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(tokens, *shape, generator=random) for shape in ((2, 8), (1, 64), (1, 64)))
    weights = -torch.log(memory * step), torch.zeros(2), torch.full((2,), math.log(math.expm1(step)))

    def outputs(op, checkpoint):
        pool, made = StatePool(geometry, ReplayConfig(16, 1, checkpoint, "none", "fp32"), 1, 1), []
        for t in range(tokens):
            plan, now = pool.plan([0], 1), slice(t, t + 1)
            made.append(op(pool, 0, plan, x[now], B[now], C[now], torch.zeros(1, 2), *weights))
            pool.commit(plan)
        return torch.cat(made[-256:])

    exact = outputs(ops.conventional_step, "fp32")
    errors = [(outputs(op, "fp16") - exact).norm(dim=(0, 2)) for op in (ops.conventional_step, ops.step)]
    assert torch.all(errors[0] > 3 * errors[1])


@pytest.mark.parametrize(("slots", "on_gpu"), [(1, "conventional"), (20, "replay")])
def test_a_text_is_that_of_the_mode_that_was_chosen(slots, on_gpu, recorded, device):
    """Bit for bit, whichever mode that is."""
    chosen = on_gpu if device == "cuda" else "replay"
    params = SamplingParams(max_tokens=40, stop_tokens=())
    bits = {}
    for mode, options in (("auto", {}), ("replay", {"mode": "replay"}), ("conventional", {"mode": "conventional"})):
        one = Engine(TINY, device=device, dtype="float32", max_batch=slots, **options)
        assert one.mode == one.statistics()["mode"] == (chosen if mode == "auto" else mode)
        one.generate([PROMPTS[0]], params)
        bits[mode], recorded[:] = torch.cat(recorded), []
    assert torch.equal(bits["auto"], bits[chosen])
    assert not torch.equal(bits["replay"], bits["conventional"])


def test_generate_says_what_was_chosen(capsys, monkeypatch):
    """Here for a pool that a GPU would have."""
    monkeypatch.setattr(engine, "resolve", lambda mode, device, *given, **more: resolve(mode, CUDA, *given, **more))
    arguments = ["generate", "--checkpoint", str(TINY), "--prompt", "And", "--max-tokens", "20", "--device", "cpu"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "tokens/s  (conventional, cpu, float32)\n  (--mode auto took conventional" in printed
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mode"] == "conventional" and report["counted"]["conventional"] == "while decoding"
    assert report["traffic"]["conventional"]["flushes"] == 0 < report["traffic"]["replay"]["flushes"]
    for more, mode in ((["--mode", "replay"], "replay"), (["--mode", "conventional"], "conventional")):
        assert main([*arguments, *more]) == 0
        printed = capsys.readouterr().out
        assert f"tokens/s  ({mode}, cpu, float32)" in printed and "--mode auto" not in printed
