# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention without positional encoding: in these models the Mamba layers carry the order of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import ops
from .dense import Linear
from .row_tiles import RowTiles


def has_kernel(keys: torch.Tensor) -> bool:
    """Whether ops.attend takes such keys, with queries of their dtype. On the CPU torch is faster."""
    return keys.is_cuda and keys.dtype != torch.float32 and keys.shape[-1] in (64, 128)


class Attention:
    """qkv: the three projections as one, one behind the other."""

    def __init__(self, layer: int, qkv: Linear, o: Linear, head_dim: int, tiles: RowTiles):
        self.layer = layer  # index among the attention layers
        self.qkv, self.o, self.head_dim, self.tiles = qkv, o, head_dim, tiles

    def __call__(self, x: torch.Tensor, batch, memory, total: torch.Tensor) -> torch.Tensor | None:
        """x [n, hidden] -> what is left to add to `total`, fp32 [n, hidden] (Linear.add_to). Appends the keys and
        values of the n tokens to the cache first."""
        keys, values = memory.kv.keys[self.layer], memory.kv.values[self.layer]
        heads, kv_heads = self.tiles(self.qkv, x).unflatten(-1, (-1, self.head_dim)), keys.shape[1]
        q, both = heads.split([heads.shape[1] - 2 * kv_heads, 2 * kv_heads], 1)
        memory.kv.write(self.layer, batch.kv_slots, batch.positions, both)
        if q.dtype == keys.dtype and has_kernel(keys):
            out = ops.attend(q, keys, values, batch.kv_slots, batch.positions, batch.grid.cells)
        elif batch.on_host is None:
            out = self.together(q, keys, values, batch)
        else:
            parts, first = [], 0
            for row in batch.on_host:
                end = row.start + row.count
                parts.append(
                    self.sequence(q[first : first + row.count], keys[row.slot, :, :end], values[row.slot, :, :end])
                )
                first += row.count
            out = torch.cat(parts)
        return self.tiles(lambda out: self.o.add_to(total, out), out.flatten(1))

    def sequence(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """One sequence's newest tokens over its own keys. q [n, heads, d]; keys, values [kv_heads, end, d] -> as q."""
        n, kv_heads, end = q.shape[0], keys.shape[0], keys.shape[1]
        keys, values = keys.to(q.dtype), values.to(q.dtype)
        q = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, heads per kv head, n, d]
        mask = None
        if n > 1:
            index = torch.arange(end, device=q.device)
            mask = index <= index[end - n :, None]
        out = F.scaled_dot_product_attention(q, _for_each_query_head(keys, q), _for_each_query_head(values, q), mask)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def together(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch) -> torch.Tensor:
        """The new tokens of each row over the first `batch.context` positions of its slot, later ones masked. Shapes
        depend on no value, so that it can be captured in a CUDA graph. q [n, heads, d] -> as q."""
        cells, kv_heads = batch.grid.cells, keys.shape[1]
        slots, positions, q = batch.kv_slots[cells[:, 0]], batch.positions[cells], q[cells]
        keys, values = keys[:, :, : batch.context], values[:, :, : batch.context]
        # Taking the keys to the queries reads, writes and reads them again. Unless that many slots are idle, it is less
        # to take the queries to the keys.
        in_place = len(keys) <= 3 * len(slots)
        if in_place:
            positions = positions.new_zeros((len(keys), *positions.shape[1:])).index_put_((slots,), positions)
            q = q.new_zeros((len(keys), *q.shape[1:])).index_put_((slots,), q)
        else:
            keys, values = keys[slots], values[slots]
        mask = torch.arange(batch.context, device=q.device) <= positions[..., None]  # [rows or slots, width, context]
        # The query heads of a key head stand in for query tokens: no key is copied per head.
        q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [rows or slots, kv_heads, sharing, width, d]
        sharing = q.shape[2]
        mask = mask[:, None].expand(-1, sharing, -1, -1).flatten(1, 2)[:, None]
        out = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, mask)
        out = out.unflatten(2, (sharing, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [rows, width, heads, d]
        if in_place:
            out = out[slots]
        return out.flatten(0, 1)[batch.grid.place]


def _for_each_query_head(cached: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return cached[:, None].expand(-1, q.shape[1], -1, -1)
