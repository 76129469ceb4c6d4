# SPDX-License-Identifier: Apache-2.0
"""Geometry, config and layout: one definition, checked by name, without torch."""

import pickle
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from mixer import SMALL, SUPER

from trtllm_replayssm import MambaGeometry, ReplayConfig, SlotLayout
from trtllm_replayssm.window import step_cost


@pytest.mark.parametrize(
    "change, error, match",
    [
        (dict(num_heads=0), ValueError, "num_heads: expected 1..65536, got 0"),
        (dict(num_heads=2**40), ValueError, "num_heads: expected a 32-bit integer, got 1099511627776"),
        (dict(num_heads=4.0), TypeError, r"num_heads: expected an int, got 4.0 \(float\)"),
        (dict(num_heads=True), TypeError, r"num_heads: expected an int, got True \(bool\)"),
        (dict(head_dim=12), ValueError, "head_dim: expected a multiple of 8 in 8..128, got 12"),
        (dict(head_dim=136), ValueError, "head_dim: expected a multiple of 8 in 8..128, got 136"),
        (dict(num_groups=3), ValueError, "num_groups: expected a divisor of num_heads=4, got 3"),
        (dict(num_groups=0), ValueError, "num_groups: expected .* got 0"),
        (dict(state_dim=96), ValueError, "state_dim: expected 64 or 128, got 96"),
        (dict(conv_kernel=1), ValueError, "conv_kernel: expected 2..8, got 1"),
        (dict(conv_kernel=9), ValueError, "conv_kernel: expected 2..8, got 9"),
    ],
)
def test_geometry_refuses_by_name(change, error, match):
    sizes = dict(num_heads=4, head_dim=16, num_groups=2, state_dim=64, conv_kernel=4)
    assert MambaGeometry(**sizes).conv_channels == 4 * 16 + 2 * 2 * 64
    with pytest.raises(error, match=match):
        MambaGeometry(**sizes | change)


@pytest.mark.parametrize(
    "change, error, match",
    [
        (dict(window=0), ValueError, "window: expected 1..64, got 0"),
        (dict(window=65), ValueError, "window: expected 1..64, got 65"),
        (dict(window="long"), ValueError, "window: expected an int or \"auto\", got 'long'"),
        (dict(window=None), TypeError, "window: expected an int, got None"),
        (dict(max_step_tokens=0), ValueError, "max_step_tokens: expected 1..16 .* got 0"),
        (dict(max_step_tokens=17, window=64), ValueError, "max_step_tokens: expected 1..16 .* got 17"),
        (dict(max_step_tokens=5, window=4), ValueError, "max_step_tokens: expected 1..4 .* got 5"),
        (dict(checkpoint="fp64"), ValueError, "checkpoint: expected one of fp32, bf16, fp16, .* got 'fp64'"),
        (dict(checkpoint=None), TypeError, "checkpoint: expected a string, got None"),
        (
            dict(read_copy="int8"),
            ValueError,
            "read_copy: expected one of none, fp8, nvfp4, nvfp4_amax, e2m2, got 'int8'",
        ),
        (
            dict(checkpoint="nvfp4", read_copy="fp8"),
            ValueError,
            "read_copy: expected 'none' with checkpoint='nvfp4', got 'fp8': no copy is smaller than that checkpoint",
        ),
        (
            dict(checkpoint="nvfp4", read_copy="e2m2"),
            ValueError,
            "read_copy: expected 'none' with checkpoint='nvfp4', got 'e2m2'",
        ),
        (
            dict(checkpoint="fp8_sr", read_copy="fp8"),
            ValueError,
            "read_copy: expected 'none', 'nvfp4', 'nvfp4_amax' or 'e2m2' with checkpoint='fp8_sr', got 'fp8'",
        ),
        (dict(activation="fp8"), ValueError, "activation: expected one of fp32, bf16, fp16, got 'fp8'"),
        (dict(seed=-1), ValueError, "seed: expected 0..2.*64-1, got -1"),
        (dict(seed=2**64), ValueError, "seed: expected 0..2.*64-1, got 18446744073709551616"),
        (dict(seed=1.5), TypeError, "seed: expected an int, got 1.5"),
    ],
)
def test_config_refuses_by_name(change, error, match):
    values = dict(window=16, max_step_tokens=4, checkpoint="fp32", read_copy="none", activation="bf16", seed=2**64 - 1)
    assert ReplayConfig(**values).seed == 2**64 - 1
    with pytest.raises(error, match=match):
        ReplayConfig(**values | change)


WINDOWS = {  # window="auto" of the Super geometry with bf16 activations, for max_step_tokens 1, 2, 4, 8, 16
    ("fp32", "none"): [24, 24, 32, 32, 32],
    ("fp32", "fp8"): [32, 32, 32, 32, 32],
    ("fp32", "nvfp4"): [32, 32, 32, 32, 32],
    ("fp32", "e2m2"): [32, 32, 32, 32, 32],
    ("fp16", "none"): [16, 16, 24, 32, 32],
    ("fp16_sr", "nvfp4"): [32, 32, 32, 32, 32],
    ("fp8_sr", "none"): [8, 16, 16, 24, 32],
    ("fp8_sr", "nvfp4"): [24, 32, 32, 32, 32],
    ("nvfp4", "none"): [8, 8, 16, 24, 32],
}


@pytest.mark.parametrize("checkpoint, read_copy", WINDOWS)
def test_auto_window_costs_least(checkpoint, read_copy):
    chosen = []
    for tokens in (1, 2, 4, 8, 16):
        config = ReplayConfig(max_step_tokens=tokens, checkpoint=checkpoint, read_copy=read_copy)
        assert config.window == "auto"
        chosen.append(SlotLayout(SUPER, config).config.window)
    assert chosen == WINDOWS[checkpoint, read_copy]


def test_cost_of_a_step_by_hand():
    """One token a step: L - 1 reads of the copy and a flush every L steps, which casts and so counts twice; records
    read 1 + ... + L, one written."""
    record, checkpoint, copy = 18.5 * 1024, 2 << 20, 128 * (64 * 128 // 2 + 64 * 8 + 128 + 16)
    cycle = 23 * copy + 2 * (2 * checkpoint + copy) + record * (24 * 25 // 2 + 24)
    config = ReplayConfig(window=24, checkpoint="fp16", read_copy="nvfp4")
    assert step_cost(SUPER, config) == pytest.approx(cycle / 24, rel=1e-12)


def test_cost_of_a_verification_against_a_simulation():
    """Random acceptance, 1..T equally likely, of 4 tokens a step."""
    rng, history, moved, steps = np.random.default_rng(0), 0, 0, 200_000
    record, state = 18.5 * 1024, 4 << 20
    for accepted in rng.integers(1, 5, steps):
        flush = history > 0 and history + 4 > 16
        moved += (2 * state if flush else state) + (history + 4) * record
        history = accepted + (0 if flush else history)
    assert step_cost(SUPER, ReplayConfig(window=16, max_step_tokens=4)) == pytest.approx(moved / steps, rel=1e-3)


def test_auto_window_needs_a_geometry():
    with pytest.raises(ValueError, match='window: expected a number, got "auto"'):
        ReplayConfig().core  # noqa: B018
    with pytest.warns(UserWarning) as caught:
        given = ReplayConfig(checkpoint="bf16")
        config = SlotLayout(SUPER, given).config
        assert len(caught) == 1
        assert config == replace(given, window=16)


def test_config_warns_of_what_ruins_speed_or_accuracy():
    with pytest.warns(UserWarning, match=r"window 7 < 2 \* max_step_tokens \(8\)"):
        ReplayConfig(window=7, max_step_tokens=4)
    with pytest.warns(UserWarning, match='checkpoint "bf16" drops small updates .* measure the drift'):
        ReplayConfig(checkpoint="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ReplayConfig(window=8, max_step_tokens=4)


def test_frozen_values():
    config = ReplayConfig(window=8, max_step_tokens=2, seed=5)
    for value in (SMALL, config):
        again = pickle.loads(pickle.dumps(value))
        assert again == value and hash(again) == hash(value)
        with pytest.raises(AttributeError):
            value.num_heads = value.window = 1


@pytest.mark.parametrize("max_step_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [8, 16, 32])
@pytest.mark.parametrize("checkpoint, activation", [("fp32", "bf16"), ("fp16", "fp32")])
@pytest.mark.filterwarnings("ignore:window")
def test_layout_of_a_slot(window, max_step_tokens, checkpoint, activation):
    """A23: sizes from the design's formulas; sections aligned, in order, without overlap."""
    layout = SlotLayout(SUPER, ReplayConfig(window, max_step_tokens, checkpoint, activation=activation))
    rows, state, act = window + max_step_tokens, {"fp32": 4, "fp16": 2}[checkpoint], {"bf16": 2, "fp32": 4}[activation]
    expected = {
        "checkpoint": ((128, 64, 128), state),
        "x_ring": ((8, rows, 16, 64), act),
        "b_ring": ((8, rows, 128), act),
        "delta_ring": ((8, rows, 16), 4),
        "conv_ring": ((3 + max_step_tokens, 128 * 64 + 2 * 8 * 128), act),
    }
    assert (layout.ring_rows, layout.conv_rows) == (rows, 3 + max_step_tokens)
    assert layout.record_bytes == 128 * 64 * act + 8 * 128 * act + 128 * 4
    assert list(layout.sections) == list(expected)
    end = 0
    for name, (shape, size) in expected.items():
        section = layout.sections[name]
        assert section.shape == shape and section.bytes == np.prod(shape) * size
        assert section.offset % 256 == 0 and section.offset == -(-end // 256) * 256
        end = section.offset + section.bytes
    assert layout.slot_stride % 256 == 0 and 0 <= layout.slot_stride - end < 256


def test_bytes_of_a_record_in_the_design():
    """The Super geometry's 18.5 KiB a record and 4 MiB a state."""
    layout = SlotLayout(SUPER, ReplayConfig())
    assert layout.record_bytes == 18.5 * 1024
    assert layout.sections["checkpoint"].bytes == 4 << 20


def test_unpack_gives_views():
    layout = SlotLayout(SMALL, ReplayConfig(window=8, max_step_tokens=2, checkpoint="fp16"))
    blob = np.random.default_rng(0).integers(0, 256, (2, 3, layout.slot_stride), np.uint8)
    arrays = layout.unpack(blob)
    assert {name: (a.shape[2:], a.dtype) for name, a in arrays.items()} == {
        "checkpoint": ((4, 16, 64), np.float16),
        "x_ring": ((2, 10, 2, 16), np.uint16),
        "b_ring": ((2, 10, 64), np.uint16),
        "delta_ring": ((2, 10, 2), np.float32),
        "conv_ring": ((5, 320), np.uint16),
    }
    section = layout.sections["b_ring"]
    start = section.offset + ((1 * 10 + 3) * 64 + 5) * 2
    assert arrays["b_ring"][1, 2, 1, 3, 5].tobytes() == blob[1, 2, start : start + 2].tobytes()
    arrays["delta_ring"][0, 1, 1, 3, 0] = 1.0
    start = layout.sections["delta_ring"].offset + ((1 * 10 + 3) * 2 + 0) * 4
    assert blob[0, 1, start : start + 4].tobytes() == np.float32(1.0).tobytes()
    with pytest.raises(ValueError, match=r"blob: expected contiguous slots \[..., \d+\], got shape \(3,\)"):
        layout.unpack(np.zeros(3, np.uint8))
    with pytest.raises(TypeError, match="blob: expected uint8, got float64"):
        layout.unpack(np.zeros(layout.slot_stride))


NO_TORCH = """
import sys
sys.modules["torch"] = None
import trtllm_replayssm
from trtllm_replayssm import MambaGeometry, ReplayConfig, SlotLayout
print(SlotLayout(MambaGeometry(4, 16, 2, 64), ReplayConfig()).slot_stride)
for use in (lambda: trtllm_replayssm.StatePool, lambda: __import__("trtllm_replayssm", fromlist=["ops"]).ops):
    try:
        use()
    except ImportError as error:
        print(error)
try:
    trtllm_replayssm.nothing
except AttributeError as error:
    print(error)
"""


def test_sizes_need_no_torch_and_the_rest_says_what_to_install(tmp_path):
    run = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    stride, *errors = run.stdout.splitlines()
    assert int(stride) == SlotLayout(SMALL, ReplayConfig()).slot_stride
    assert errors == [
        "trtllm_replayssm.StatePool needs torch: pip install 'trtllm-replayssm[runtime]'",
        "trtllm_replayssm.ops needs torch: pip install 'trtllm-replayssm[runtime]'",
        "module 'trtllm_replayssm' has no attribute 'nothing'",
    ]
