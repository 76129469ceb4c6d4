# SPDX-License-Identifier: Apache-2.0
"""A29: an engine is not loaded where its ops give wrong numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mixer import PAIRS, config_of

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, _core, ops, self_test
from trtllm_replayssm.runtime import Engine

TINY = Path(__file__).parents[1] / "examples" / "tiny-nemotron-h"
SIZES = MambaGeometry(num_heads=4, head_dim=64, num_groups=2, state_dim=128)
MODES = {
    "step": {"mode": "replay"},
    "conv_step": {"speculation": "ngram"},
    "prefill": {},
    "conventional_step": {"mode": "conventional"},
    "conventional_verify": {"mode": "conventional", "speculation": "mtp"},
}


@pytest.fixture(autouse=True)
def anew():
    self_test.require.cache_clear()
    yield
    self_test.require.cache_clear()


@pytest.mark.parametrize("activation", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("geometry", [SIZES, MambaGeometry(2, 80, 1, 128)])
def test_right_ops_pass_in_all_formats(device, geometry, activation):
    for pair in PAIRS:
        self_test.require(device, geometry, config_of(*pair, max_step_tokens=4, activation=activation))
    for tokens in (1, 4):
        self_test.require(device, geometry, ReplayConfig(2 * tokens, tokens, activation=activation), conventional=True)


@pytest.mark.parametrize("op", MODES)
def test_engine_with_an_op_that_is_a_little_wrong(device, op, monkeypatch):
    """By 2e-5, a thousandth of what 16 bits would round."""
    right = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda *given, **named: right(*given, **named) * (1 + 2e-5))
    with pytest.raises(self_test.SelfTestError, match=f"self-test on .*: {op} has a relative error of 2.0e-05"):
        Engine(TINY, device=device.type, dtype="float32", max_batch=1, context=64, **MODES[op])


@pytest.mark.parametrize("checkpoint", ["fp32", "fp16_sr", "fp8_sr", "nvfp4"])
def test_a_token_that_is_lost_is_seen_in_every_format(device, checkpoint, monkeypatch):
    commit = StatePool.commit

    def lose(pool, plan, accepted=None):
        commit(pool, plan, accepted and [count - 1 for count in accepted])

    monkeypatch.setattr(StatePool, "commit", lose)
    with pytest.raises(self_test.SelfTestError, match="step has a relative error"):
        self_test.require(device, SIZES, ReplayConfig(8, 2, checkpoint, activation="bf16"))


def test_nan_is_seen(device, monkeypatch):
    right = ops.step
    monkeypatch.setattr(ops, "step", lambda *given: torch.full_like(right(*given), torch.nan))
    with pytest.raises(self_test.SelfTestError, match="step has a relative error of nan"):
        self_test.require(device, SIZES, ReplayConfig(8, checkpoint="nvfp4"))


def test_op_that_cannot_run(device, monkeypatch):
    """As where a build has no code for a GPU."""

    def fail(*_, **__):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(ops, "step", fail)
    with pytest.raises(self_test.SelfTestError, match="self-test on .*: no kernel image"):
        self_test.require(device, SIZES, ReplayConfig(8))


def test_once_a_process(device, monkeypatch):
    config = ReplayConfig(8)
    self_test.require(device, SIZES, config)
    monkeypatch.setattr(ops, "step", None)
    self_test.require(device, SIZES, ReplayConfig(8))
    with pytest.raises(TypeError):
        self_test.require(device, SIZES, ReplayConfig(16))


def test_library_on_a_wrong_libm(wrong_libm):
    """The exponential of single precision is off by 1e-4: the library is whole, its numbers are not."""
    code = f"from trtllm_replayssm.runtime import Engine; Engine({str(TINY)!r}, device='cpu', max_batch=1, context=64)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": str(wrong_libm)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("trtllm_replayssm.self_test.SelfTestError: self-test on the CPU: conv_step has a relative")
    assert "step has a relative error of" in error and "'trtllm-replayssm doctor' tests every op" in error


def test_the_library_takes_that_function_from_libm():
    """Or the test above would test nothing."""
    assert b"expf\0" in Path(_core.__file__).read_bytes()
