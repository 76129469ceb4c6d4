# SPDX-License-Identifier: Apache-2.0
"""The small row-wise pieces that layers share."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """y = x Wᵀ + b; W [out, in], b [out] or None, in the model's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm:
    """x / rms(x) · weight over the last dimension in groups of equal size, computed in fp32, returned in the weight's
    dtype.
    """

    def __init__(self, weight: torch.Tensor, eps: float, groups: int = 1):
        self.weight, self.eps, self.groups = weight, eps, groups

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.float().unflatten(-1, (self.groups, -1))
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (grouped.flatten(-2) * self.weight).to(self.weight.dtype)

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The norm of x · silu(gate): Mamba-2 gates before it norms."""
        return self(x.float() * F.silu(gate.float()))


def relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()
