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


def product_in_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """[parts, n, out] in fp32, whose sum is x Wᵀ: each of so many equal parts of the columns by itself. x [n, in] and
    W [out, in] in one dtype."""
    x, weight = x.unflatten(1, (parts, -1)).transpose(0, 1), weight.unflatten(1, (parts, -1)).permute(1, 2, 0)
    if x.is_cuda:
        return torch.bmm(x, weight, out_dtype=torch.float32)
    return torch.bmm(x.float(), weight.float())


def useful_parts(rows: int, width: int, depth: int, processors: int) -> int:
    """Into how many parts a product of [rows, depth] and [width, depth] is best cut, 1, 2 or 4, so that more of a GPU's
    `processors` have a tile of it: libraries cut it too, but then add up in a launch of its own. As measured on an
    H200 for the widths of Nemotron-3-Nano-4B."""
    tiles = -(-rows // 128) * -(-width // 144)
    most = min(processors // max(tiles, 1), 4 if rows <= 64 else 2)
    return next((parts for parts in (4, 2) if parts <= most and depth % (parts * 64) == 0), 1)


class Linear:
    """`linear` with a W and b in the model's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Begins to add x Wᵀ + b to total, fp32 [n, out]. Returns what is left to add for the norm behind it: None,
        [n, out] in x's dtype, or fp32 [parts, n, out]."""
        if not x.is_cuda or self.bias is not None or x.dtype == torch.float32 or x.dtype != self.weight.dtype:
            return self(x)
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        parts = useful_parts(len(x), *self.weight.shape, processors)
        if parts > 1:
            return product_in_parts(x, self.weight, parts)
        torch.addmm(total, x, self.weight.T, out_dtype=torch.float32, out=total)
        return None


class RowParallel:
    """A Linear with a part of W's columns: its product is summed over the ranks in fp32, then b is added."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, all_reduce: Callable):
        self.weight, self.bias, self.all_reduce = weight, bias, all_reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.all_reduce(fp32_product(x, self.weight))
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As Linear.add_to."""
        return self(x)


class RMSNorm:
    """x / rms(x) · weight over the last dimension in groups of equal size, computed in fp32, returned in `dtype`."""

    def __init__(self, weight: torch.Tensor, eps: float, groups: int, dtype: torch.dtype):
        self.weight, self.eps, self.groups, self.dtype = weight, eps, groups, dtype

    def __call__(self, x: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, width] -> [n, width]. The norm of x + addend, which then is in x. addend: as `Linear.add_to` gives
        it."""
        return ops.rms_norm(x, self.weight, self.eps, self.groups, addend=addend, dtype=self.dtype)

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The norm of x · silu(gate): Mamba-2 gates before it norms."""
        return ops.rms_norm(x, self.weight, self.eps, self.groups, gate=gate, dtype=self.dtype)
