# SPDX-License-Identifier: Apache-2.0
"""ops.relu2 is torch's relu and square, bit for bit."""

import pytest
import torch
from mixer import same_bits

from trtllm_replayssm import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 4096, 4103, 70001])
def test_squares_of_what_is_positive(device, dtype, count):
    values = torch.randn(count + 1, generator=torch.Generator().manual_seed(count)) * 3
    values[1::97], values[2::89], values[3::83] = float("inf"), float("-inf"), float("nan")
    values = values.to(dtype).to(device)
    for x in (values[:count].clone(), values.clone()[1:]):  # aligned, and not
        expected = x.clone().relu_().square_()
        assert ops.relu2(x) is x
        nan = expected.isnan()
        assert x[nan].isnan().all() and same_bits(x[~nan], expected[~nan])


def test_memory_around_it_stays(device):
    x = torch.full((3, 1000), -1.0, device=device)
    ops.relu2(x[1])
    assert x[1].eq(0).all() and x[[0, 2]].eq(-1).all()


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        ([1.0], TypeError, "x: expected a torch.Tensor, got list"),
        (torch.zeros(4).double(), TypeError, "x: expected .*torch.float32.*, got torch.float64"),
        (torch.zeros(4, 4).T[1:], ValueError, "x: expected a contiguous tensor"),
    ],
)
def test_bad_arguments(x, error, text):
    with pytest.raises(error, match=text):
        ops.relu2(x)
