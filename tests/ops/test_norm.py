# SPDX-License-Identifier: Apache-2.0
"""ops.rms_norm against float64: sums, gates, groups, formats, and bits that depend on the row alone."""

import pytest
import torch
from mixer import same_bits

from trtllm_replayssm import ops

FORMATS = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def matrix(rows, width, device, dtype=torch.float32, seed=0):
    values = torch.randn((rows, width), generator=torch.Generator().manual_seed(seed)) * 2
    return values.to(dtype).to(device)


def expected(x, weight, eps, groups=1, addend=None, gate=None):
    x = x.double()
    if addend is not None:
        x = x + addend.double()
    if gate is not None:
        x = x * torch.nn.functional.silu(gate.double())
    parts = x.unflatten(1, (groups, -1))
    return (parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(1) * weight.double()


@pytest.mark.parametrize("x_dtype", FORMATS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("width", "groups"), [(8, 1), (72, 3), (3136, 1), (7680, 8), (8200, 1), (16384, 1)])
def test_sums_gates_and_groups(device, dtype, x_dtype, width, groups):
    """What is normed is the sum in FP32, whatever is stored of it."""
    x, other = matrix(3, width, device, x_dtype), matrix(3, width, device, dtype, seed=1)
    weight = 1 + matrix(1, width, device, seed=2)[0].to(dtype) / 8
    for name in ("addend", "gate", None):
        more = {} if name is None else {name: other}
        residual = x.clone()
        out = ops.rms_norm(residual, weight, 1e-5, groups, **more, dtype=dtype)
        assert out.dtype == dtype
        torch.testing.assert_close(
            out.double(), expected(x, weight, 1e-5, groups, **more), rtol=FORMATS[dtype], atol=2e-6
        )
        assert same_bits(residual, (x.float() + other.float()).to(x_dtype) if name == "addend" else x)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("addends", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [72, 3136, 8200])
def test_several_addends_are_added_in_order(device, addends, x_dtype, width):
    x, weight = matrix(5, width, device, x_dtype), 1 + matrix(1, width, device, seed=2)[0].to(torch.bfloat16) / 8
    for dtype in (torch.float32, torch.bfloat16):
        addend = torch.stack([matrix(5, width, device, dtype, seed=seed) for seed in range(3, 3 + addends)])
        spread = torch.full((2 * addends, 5, width + 8), float("nan"), dtype=dtype, device=device)
        spread[::2, :, 8:] = addend
        total = x.float()
        for part in addend:
            total = total + part.float()
        for given in (addend, spread[::2, :, 8:]):
            residual = x.clone()
            out = ops.rms_norm(residual, weight, 1e-5, addend=given, dtype=torch.bfloat16)
            torch.testing.assert_close(out.double(), expected(total, weight, 1e-5), rtol=2.0**-8, atol=2e-6)
            assert same_bits(residual, total.to(x_dtype))


def test_a_row_depends_on_nothing_else(device):
    """Any rows, strides and alignments give the same bits."""
    width = 3136
    x, gate = matrix(40, width, device, torch.bfloat16), matrix(40, width, device, torch.bfloat16, seed=1)
    weight = matrix(1, width, device, torch.bfloat16, seed=2)[0]
    whole = ops.rms_norm(x, weight, 1e-5, 2, gate=gate)
    assert same_bits(ops.rms_norm(x[7:8], weight, 1e-5, 2, gate=gate[7:8]), whole[7:8])
    wide = torch.full((40, 2 * width + 3), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 3 : 3 + width], wide[:, 3 + width :] = x, gate
    assert same_bits(ops.rms_norm(wide[:, 3 : 3 + width], weight, 1e-5, 2, gate=wide[:, 3 + width :]), whole)


def test_eps_zero_rows_and_large_gates(device):
    weight = torch.ones(64, device=device)
    assert ops.rms_norm(torch.zeros(2, 64, device=device), weight, 1e-5).eq(0).all()
    assert ops.rms_norm(torch.zeros(0, 64, device=device), weight, 1e-5).shape == (0, 64)
    x = torch.full((1, 64), 1e-3, device=device)
    assert ops.rms_norm(x, weight, 3e-6)[0, 0].item() == pytest.approx(0.5, rel=1e-6)
    gate = torch.tensor([-1e4, -200.0, -100.0, 1e4] * 16, device=device)[None]
    out = ops.rms_norm(torch.ones(1, 64, device=device), weight, 0.0, gate=gate)
    assert out[0, :4].tolist() == pytest.approx([0, 0, 0, 2], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(x=[1.0]), TypeError, "x: expected a torch.Tensor, got list"),
        (dict(x=torch.zeros(64)), ValueError, r"x: expected shape \(rows, width\), got \(64,\)"),
        (dict(x=torch.zeros(3, 64).double()), TypeError, "dtype: expected torch.float32, .* got torch.float64"),
        (dict(weight=torch.zeros(32)), ValueError, r"weight: expected shape \(64,\), got \(32,\)"),
        (dict(addend=torch.zeros(2, 64)), ValueError, r"addend: expected shape \(3, 64\), got \(2, 64\)"),
        (dict(addend=torch.zeros(2, 3, 8)), ValueError, r"addend: expected shape \(2, 3, 64\), got \(2, 3, 8\)"),
        (dict(addend=torch.zeros(0, 3, 64)), ValueError, "addend: expected .* at least one addend, got none"),
        (dict(gate=torch.zeros(64, 3).T), ValueError, "gate: expected a contiguous last dimension"),
        (dict(gate=torch.zeros(3, 64), addend=torch.zeros(3, 64)), ValueError, "gate: expected NULL with an addend"),
        (dict(groups=3), ValueError, "width: expected a multiple of 8 for each of 3 groups, got 64"),
        (dict(groups=0), ValueError, "groups: expected >= 1, got 0"),
        (dict(eps=-1.0), ValueError, "eps: expected >= 0, got -1"),
        (dict(dtype=torch.int32), TypeError, "dtype: expected torch.float32, .* got torch.int32"),
        (
            dict(x=torch.zeros(1, 16392), weight=torch.zeros(16392)),
            NotImplementedError,
            "width: expected at most 16384 a group, got 16392",
        ),
    ],
)
def test_bad_arguments(change, error, text):
    arguments = dict(x=torch.zeros(3, 64), weight=torch.zeros(64), eps=1e-5) | change
    with pytest.raises(error, match=text):
        ops.rms_norm(**arguments)
