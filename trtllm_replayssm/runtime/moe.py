# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: sigmoid router, non-gated relu² experts (optionally in a latent width), one shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..ops import relu2
from .dense import Linear, linear
from .mlp import MLP
from .row_tiles import RowTiles


class Router:
    """Chooses experts by sigmoid score plus a learned correction, and weighs them by the score alone. All in fp32."""

    def __init__(
        self,
        weight: torch.Tensor,
        correction: torch.Tensor,
        *,
        chosen: int,
        groups: int,
        groups_chosen: int,
        normalize: bool,
        scale: float,
    ):
        self.weight, self.correction = weight, correction  # fp32 [experts, hidden], fp32 [experts]
        self.chosen, self.groups, self.groups_chosen = chosen, groups, groups_chosen
        self.normalize, self.scale = normalize, scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> fp32 [n, experts]: a row's weight for each expert, 0 for those not chosen."""
        scores = F.linear(x.float(), self.weight).sigmoid()
        preference = scores + self.correction
        if self.groups_chosen < self.groups:
            grouped = preference.unflatten(-1, (self.groups, -1))  # a group counts by its two best experts
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.groups_chosen, dim=-1).indices
            barred = torch.ones_like(grouped, dtype=torch.bool).scatter_(
                1, best[..., None].expand(-1, -1, grouped.shape[-1]), False
            )
            preference = preference.masked_fill(barred.flatten(-2), float("-inf"))
        experts = preference.topk(self.chosen, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter_(-1, experts, weights * self.scale)


class MoE:
    """up [experts, size, width] and down [experts, size, width] (transposed: both hold a hidden unit's weights in a
    row). all_reduce: sums what parts of experts give over the ranks, fp32; None: they are whole.
    """

    def __init__(
        self,
        router: Router,
        up: torch.Tensor,
        down: torch.Tensor,
        shared: MLP,
        to_latent: Linear | None,
        from_latent: Linear | None,
        all_reduce: Callable | None,
        tiles: RowTiles,
    ):
        self.router, self.up, self.down, self.shared = router, up, down, shared
        self.to_latent, self.from_latent, self.all_reduce, self.tiles = to_latent, from_latent, all_reduce, tiles

    def __call__(self, x: torch.Tensor, batch, memory, total: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden], left to add to `total`."""
        weights = self.tiles(self.router, x)
        inner = self.tiles(self.to_latent, x) if self.to_latent else x
        if batch.on_host is None:
            routed = self.every_expert(inner, weights)
        else:
            routed = self.hit_experts(inner, weights)
        if self.all_reduce:
            routed = self.all_reduce(routed.float()).to(x.dtype)
        if self.from_latent:
            routed = self.tiles(self.from_latent, routed)
        return routed + self.tiles(self.shared.rows, x)

    def hit_experts(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Expert by expert over the rows it got. Least arithmetic, but which experts are hit must come to the host."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in weights.any(0).nonzero().flatten().tolist():
            rows = weights[:, expert].nonzero().flatten()
            result = self.tiles(lambda part, e=expert: linear(relu2(linear(part, self.up[e])), self.down[e].T), x[rows])
            # A row adds its experts in ascending order, whatever the other rows chose.
            out[rows] += result.float() * weights[rows, expert, None]
        return out.to(x.dtype)

    def every_expert(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """All experts over all rows as two matrix products, weighted by 0 where not chosen. Its shapes depend on no
        value, so that it can be captured in a CUDA graph; decode batches read most experts' weights anyway."""
        hidden = relu2(F.linear(x, self.up.flatten(0, 1))).unflatten(-1, self.up.shape[:2])
        return (hidden * weights[..., None].to(x.dtype)).flatten(1) @ self.down.flatten(0, 1)
