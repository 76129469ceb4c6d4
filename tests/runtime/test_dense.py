# SPDX-License-Identifier: Apache-2.0
"""Products whose result is not rounded to 16 bits."""

import pytest
import torch

from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.dense import Linear, fp32_product, linear, product_in_parts, useful_parts

from .conftest import TINY, relative_error
from .prompts import PROMPTS


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def operands(request, device):
    """fp32 x [16, 200]; W [72, 200] and b [72] in a 16-bit dtype."""
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=random).to(device) for shape in ((16, 200), (72, 200), 72))
    return x, weight.to(request.param), bias.to(request.param)


def test_fp32_over_16_bit_weights(operands):
    x, weight, bias = operands
    y, expected = linear(x, weight, bias), x.double() @ weight.double().T + bias.double()
    assert y.dtype == torch.float32
    assert relative_error(y, expected) <= 1e-5
    assert relative_error(linear(x.to(weight.dtype), weight, bias), expected) > 1e-4


def test_16_bit_inputs_are_taken_as_they_are(operands):
    x, weight, _ = operands
    x = x.to(weight.dtype)
    y = fp32_product(x, weight)
    assert y.dtype == torch.float32
    assert relative_error(y, x.double() @ weight.double().T) <= 1e-6


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_a_product_add_up_to_it(operands, parts):
    x, weight, _ = operands
    x = x.to(weight.dtype)
    y = product_in_parts(x, weight, parts)
    assert y.dtype == torch.float32 and y.shape == (parts, 16, 72)
    first = slice(0, 200 // parts)
    assert relative_error(y[0], x[:, first].double() @ weight[:, first].double().T) <= 1e-6
    assert relative_error(y.sum(0), x.double() @ weight.double().T) <= 1e-6


def test_a_product_is_cut_as_far_as_its_tiles_leave_processors_idle():
    """Tiles of 128 rows by 144 columns; parts of whole 64 columns, four for few rows only."""
    assert [useful_parts(rows, 3136, 7680, 132) for rows in (1, 64, 65, 384, 385, 2048)] == [4, 4, 2, 2, 1, 1]
    assert [useful_parts(1, 3136, depth, 132) for depth in (192, 384, 200)] == [1, 2, 1]
    assert useful_parts(1, 12544, 3136, 132) == 1 and useful_parts(1, 3136, 7680, 43) == 1


@pytest.mark.parametrize("rows", [16, 32000])
def test_what_a_product_adds_and_what_it_leaves_to_add(operands, rows):
    """On the CPU, with a bias or in fp32 the norm adds what the product gives; on CUDA the parts of a product of few
    rows, while one of many adds itself."""
    x, weight, bias = operands
    x, weight = x.repeat(rows // 16 + 1, 2)[:rows, :384].contiguous(), weight.repeat(1, 2)[:, :384].contiguous()
    narrow, zeros = x.to(weight.dtype), torch.zeros(rows, 72, device=x.device)
    for layer, given in ((Linear(weight, bias), narrow), (Linear(weight, None), x)):
        assert torch.equal(layer.add_to(zeros, given), layer(given)) and zeros.eq(0).all()
    total = torch.ones_like(zeros)
    left = Linear(weight, None).add_to(total, narrow)
    assert (None if left is None else left.dim()) == (2 if not x.is_cuda else 3 if rows == 16 else None)
    whole = total if left is None else total + left.float().reshape(-1, rows, 72).sum(0)
    assert relative_error(whole - 1, narrow.double() @ weight.double().T) <= (1e-5 if x.is_cuda else 2.0**-7)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_not_rounded(dtype, deterministic, recorded, device):
    engine = Engine(TINY, device=device, dtype=dtype, deterministic=deterministic, max_batch=1)
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=8, stop_tokens=()))
    logits = torch.cat(recorded)
    assert logits.dtype == torch.float32
    assert (logits != logits.to(engine.dtype)).float().mean() > 0.9
