# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 layer: torch for the projections, our ops for convolution and state."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import ops
from .dense import Linear, RMSNorm
from .row_tiles import RowTiles

# How a decode step treats the state: "replay" appends records and reads the checkpoint, "conventional" reads, updates
# and writes the whole state each token. To verify drafts, the latter keeps a snapshot of the state after each.
STEPS = {"replay": ops.step, "conventional": ops.conventional_step, "snapshots": ops.conventional_verify}


class MambaMixer:
    """A_log, D, dt_bias fp32 [heads]; conv_weight [channels, K] and conv_bias [channels] in the model's dtype."""

    def __init__(
        self,
        layer: int,
        step: Callable,
        *,
        in_proj: Linear,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        A_log: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_limit: tuple[float, float],
        norm: RMSNorm,
        out_proj: Linear,
        tiles: RowTiles,
    ):
        self.layer = layer  # index among the Mamba layers
        self.step = step
        self.in_proj, self.norm, self.out_proj, self.tiles = in_proj, norm, out_proj, tiles
        self.conv_weight, self.conv_bias = conv_weight, conv_bias
        self.A_log, self.D, self.dt_bias, self.dt_limit = A_log, D, dt_bias, dt_limit

    def __call__(self, x: torch.Tensor, batch, memory, total: torch.Tensor) -> torch.Tensor | None:
        """x [n, hidden] -> what is left to add to `total`, fp32 [n, hidden] (Linear.add_to)."""
        geometry, pool = memory.pool.geometry, memory.pool
        heads, head_dim = geometry.num_heads, geometry.head_dim
        d_inner, group_width = heads * head_dim, geometry.num_groups * geometry.state_dim
        z, raw, dt = self.tiles(self.in_proj, x).split([d_inner, d_inner + 2 * group_width, heads], dim=-1)
        raw = raw.to(pool.activation)
        scan, more = (ops.prefill, {}) if batch.is_prompt else (self.step, memory.step_arguments(self.layer))
        # A step of ReplaySSM finds x and B in the rings. Others, and what evaluations put in its place, are given them.
        records = scan is STEPS["replay"]
        # Rows of no sequence stay undefined in it and in y: no other row meets them, and zeros cost launches.
        conv = raw.new_empty((len(raw), geometry.num_groups, geometry.state_dim) if records else raw.shape)
        call = (pool, self.layer, batch.plan, raw, self.conv_weight, self.conv_bias, conv)
        ops.conv_step(*call, records=records)
        if records:
            x, B, C = None, None, conv
        else:
            x, B, C = conv.split([d_inner, group_width, group_width], dim=-1)
            x = x.unflatten(-1, (heads, head_dim))
            B, C = (part.unflatten(-1, (geometry.num_groups, -1)) for part in (B, C))
        y = scan(
            pool,
            self.layer,
            batch.plan,
            x,
            B,
            C,
            dt,
            self.A_log,
            self.D,
            self.dt_bias,
            dt_limit=self.dt_limit,
            out=conv.new_empty((len(raw), heads, head_dim)),
            **more,
        )
        return self.tiles(lambda y, z: self.out_proj.add_to(total, self.norm.gated(y, z)), y.flatten(1), z)
