# SPDX-License-Identifier: Apache-2.0
"""Everything that sequences remember: Mamba slots and KV rows under one slot number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ReplayConfig, SlotLayout, StatePool
from .kv_cache import KVCache
from .model_config import MAMBA, ModelConfig


class StateLost(RuntimeError):
    """A pass failed when it had begun to change the state: its sequences must be prefilled anew.

    slot: whose fault it is; None: nobody's in particular.
    """

    def __init__(self, why: str, slot: int | None = None):
        super().__init__(why)
        self.slot = slot


@dataclass
class SavedSlot:
    """A sequence's memory outside the pool, from which it continues bit for bit in any slot."""

    mamba: torch.Tensor  # StatePool.save
    kv: tuple[torch.Tensor, torch.Tensor]  # KVCache.save


def state_bytes(layout: SlotLayout, mode: str, snapshots: int) -> int:
    """Bytes of Mamba state that a request needs in one layer. Replay: a slot, that is state, records and convolution
    inputs. Conventional: state, convolution inputs and `snapshots` more states.
    """
    if mode == "replay":
        return layout.slot_stride
    return (1 + snapshots) * layout.sections["checkpoint"].bytes + layout.sections["conv_ring"].bytes


class Memory:
    """`snapshots`: for the conventional verification of drafts, the state after each token of a step, fp32 [layers,
    slots, max_step_tokens, heads, head_dim, state_dim]; else None.
    """

    def __init__(
        self,
        config: ModelConfig,
        replay: ReplayConfig,
        *,
        slots: int,
        attention_layers: int,
        capacity: int,
        snapshots: bool,
        dtype: torch.dtype,
        device: torch.device,
        first_head: int = 0,
    ):
        layers = config.layers.count(MAMBA)
        extent = {"num_slots": slots, "num_layers": layers, "first_head": first_head}
        self.pool = StatePool(config.geometry, replay, **extent, device=device)
        self.snapshots = self.pool.allocate_snapshots() if snapshots else None
        self.kv = KVCache(attention_layers, slots, config.kv_heads or 1, capacity, config.head_dim or 1, dtype, device)

    def step_arguments(self, layer: int) -> dict[str, torch.Tensor]:
        """What a decode step of a Mamba layer needs besides the pool."""
        return {} if self.snapshots is None else {"snapshots": self.snapshots[layer]}

    def reset(self, slot: int, stream: int) -> None:
        self.pool.reset([slot], streams=[stream])
        self.kv.clear(slot)

    def save(self, slot: int, length: int) -> SavedSlot:
        return SavedSlot(self.pool.save([slot]), self.kv.save(slot, length))

    def load(self, slot: int, saved: SavedSlot) -> None:
        self.pool.load([slot], saved.mamba)
        self.kv.load(slot, saved.kv)
