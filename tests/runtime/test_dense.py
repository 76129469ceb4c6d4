# SPDX-License-Identifier: Apache-2.0
"""Products whose result is not rounded to 16 bits."""

import pytest
import torch

from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.dense import fp32_product, linear

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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_not_rounded(dtype, deterministic, recorded, device):
    engine = Engine(TINY, device=device, dtype=dtype, deterministic=deterministic, max_batch=1)
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=8, stop_tokens=()))
    logits = torch.cat(recorded)
    assert logits.dtype == torch.float32
    assert (logits != logits.to(engine.dtype)).float().mean() > 0.9
