# SPDX-License-Identifier: Apache-2.0
"""What sequences remember while the graphs of an engine folder run: the memory that these work on in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import StatePool, _core
from ..builder.bundle import Bundle


@dataclass
class SavedRow:
    """A sequence's memory outside of it, from which it continues bit for bit in any row."""

    length: int
    mamba: torch.Tensor  # StatePool.save
    caches: list[torch.Tensor]


class GraphMemory:
    """A sequence has one number: its slot in the pool and its row in the KV caches.

    pool: its table and layers are the graphs' `table` and `state.N`. caches: of the graphs "model" and "mtp", by the
    names of their inputs, [max_batch, kv_heads, capacity, head_dim].
    lengths: tokens that each row of the caches holds. accepted: by slot, tokens that its last step keeps, which the
    next run is told; 0 where no step is outstanding.
    """

    snapshots = None  # of the embedded runtime's conventional mode

    def __init__(self, bundle: Bundle, dtype: torch.dtype, device: torch.device):
        engine, model, pool = bundle.engine, bundle.model, bundle.pool
        self.pool = StatePool(pool.geometry, pool.replay, pool.num_slots, pool.num_layers, device=device)
        shape = (engine.max_batch, model.kv_heads, engine.kv_capacity, model.head_dim)
        self.caches = {
            graph: {
                f"{part}_cache.{layer}": torch.zeros(shape, dtype=dtype, device=device)
                for layer in range(layers.count("attention"))
                for part in ("key", "value")
            }
            for graph, layers in (("model", model.layers), ("mtp", model.mtp_layers))
        }
        self.lengths = [0] * engine.max_batch
        self.accepted = [0] * engine.max_batch
        self._outstanding: set[int] = set()  # slots with a step whose accepted tokens no run was told yet

    def stepped(self, slot: int, length: int, accepted: int) -> None:
        """A step of this slot kept so many tokens, and its row has `length` now."""
        self.lengths[slot], self.accepted[slot] = length, accepted
        self._outstanding.add(slot)

    def folded(self, slot: int, length: int) -> None:
        """A prompt chunk is in the state."""
        self.lengths[slot], self.accepted[slot] = length, 0
        self._outstanding.discard(slot)

    def lost(self, slots: list[int]) -> None:
        """Nothing is known of these slots any more: they wait for a reset. Nor is there an error left of them."""
        self._outstanding.difference_update(slots)
        self.pool.take_error()

    def settle(self, slots: list[int] | None = None) -> None:
        """Commits what is outstanding (None: everywhere), so that slots can be counted, saved and reset."""
        slots = sorted(self._outstanding if slots is None else self._outstanding & set(slots))
        if not slots:
            return
        rows, counts, accepted = (
            torch.tensor(values, dtype=torch.int32, device=self.pool.device)
            for values in (slots, [0] * len(slots), [self.accepted[slot] for slot in slots])
        )
        plan = torch.empty(_core.plan_bytes(len(slots)), dtype=torch.uint8, device=self.pool.device)
        torch.ops.trtllm_replayssm.plan_next(self.pool.table, self.pool.spec, rows, counts, accepted, 1, plan)
        for slot in slots:
            self.folded(slot, self.lengths[slot])

    def reset(self, slot: int, stream: int) -> None:
        """Empties a slot and its row."""
        self.settle([slot])  # what its last step moved counts
        self.pool.reset([slot], streams=[stream])
        self.folded(slot, 0)
        # A masked value still meets a weight of 0, and 0 · NaN would be NaN.
        for cache in self._caches():
            cache[slot] = 0

    def save(self, slot: int, length: int) -> SavedRow:
        self.settle([slot])
        rows = [cache[slot, :, :length].to("cpu", copy=True) for cache in self._caches()]
        return SavedRow(length, self.pool.save([slot]), rows)

    def load(self, slot: int, saved: SavedRow) -> None:
        """Into a slot that was reset."""
        self.pool.load([slot], saved.mamba)
        for cache, rows in zip(self._caches(), saved.caches, strict=True):
            cache[slot, :, : saved.length] = rows.to(cache.device)
        self.folded(slot, saved.length)

    def _caches(self) -> list[torch.Tensor]:
        return [cache for caches in self.caches.values() for cache in caches.values()]
