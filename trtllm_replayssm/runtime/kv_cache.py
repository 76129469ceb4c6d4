# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the attention layers, a fixed number of rows a slot."""

from __future__ import annotations

import torch


class KVCache:
    """keys, values [layers, slots + 1, kv_heads, capacity, head_dim].

    The last slot is scratch: padded rows of a CUDA graph write there.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._both = torch.zeros((layers, slots + 1, 2, kv_heads, capacity, head_dim), dtype=dtype, device=device)
        self.keys, self.values = self._both.unbind(2)
        self.scratch_slot, self.capacity = slots, capacity

    def clear(self, slot: int) -> None:
        """Before a slot serves another sequence: a masked value still meets a weight of 0, and 0 · NaN would be NaN."""
        self._both[:, slot] = 0

    def write(self, layer: int, slots: torch.Tensor, positions: torch.Tensor, both: torch.Tensor) -> None:
        """slots, positions int64 [n]; both [n, 2 * kv_heads, head_dim]: keys, then values, rounded to the cache's
        dtype."""
        cache, both = self._both[layer], both.to(self._both.dtype).unflatten(1, (2, -1))
        if both.shape[-1] * both.itemsize % 16 == 0:  # torch copies element by element: let these be large
            cache, both = cache.view(torch.complex128), both.view(torch.complex128)
        cache[slots, :, :, positions] = both

    def save(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Host copies of a slot's first `length` positions, all layers."""
        return tuple(cache[:, slot, :, :length].to("cpu", copy=True) for cache in (self.keys, self.values))

    def load(self, slot: int, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.clear(slot)
        for cache, rows in zip((self.keys, self.values), saved, strict=True):
            cache[:, slot, :, : rows.shape[2]] = rows.to(cache.device)
