# SPDX-License-Identifier: Apache-2.0
"""The small row-wise pieces that layers share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .. import ops


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b in x's dtype; x [n, in] in W's dtype or fp32, W [out, in], b [out] in W's dtype."""
    if x.dtype == weight.dtype:
        return F.linear(x, weight, bias)
    y = fp32_product(x, weight)
    return y if bias is None else y + bias


def fp32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x Wᵀ in fp32; x [n, in] in W's dtype or fp32, W [out, in].

    Tensor cores multiply 16-bit numbers. An fp32 x over a 16-bit W goes through them as two 16-bit halves, high + low,
    below each other so that W is read once. That keeps 16 bits of x instead of bf16's 8.
    """
    if weight.dtype == torch.float32 or not x.is_cuda:  # torch has no mixed product on the CPU
        return F.linear(x.float(), weight.float())
    if x.dtype == weight.dtype:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    high = x.to(weight.dtype)
    halves = torch.cat([high, (x - high).to(weight.dtype)])
    return torch.mm(halves, weight.T, out_dtype=torch.float32).unflatten(0, (2, -1)).sum(0)


class Linear:
    """`linear` with a W and b in the model's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class RowParallel:
    """A Linear with a part of W's columns: its product is summed over the ranks in fp32, then b is added."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, all_reduce: Callable):
        self.weight, self.bias, self.all_reduce = weight, bias, all_reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.all_reduce(fp32_product(x, self.weight))
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class RMSNorm:
    """x / rms(x) · weight over the last dimension in groups of equal size, computed in fp32, returned in `dtype`."""

    def __init__(self, weight: torch.Tensor, eps: float, groups: int, dtype: torch.dtype):
        self.weight, self.eps, self.groups, self.dtype = weight, eps, groups, dtype

    def __call__(self, x: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, width] -> [n, width]. The norm of x + addend, which then is in x."""
        return ops.rms_norm(x, self.weight, self.eps, self.groups, addend=addend, dtype=self.dtype)

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The norm of x · silu(gate): Mamba-2 gates before it norms."""
        return ops.rms_norm(x, self.weight, self.eps, self.groups, gate=gate, dtype=self.dtype)
