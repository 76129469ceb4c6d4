# SPDX-License-Identifier: Apache-2.0
"""Everything that sequences remember: Mamba slots and KV rows under one slot number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import MambaGeometry, ReplayConfig, StatePool
from .kv_cache import KVCache
from .model_config import ATTENTION, MAMBA, ModelConfig


@dataclass
class SavedSlot:
    """A sequence's memory outside the pool, from which it continues bit for bit in any slot."""

    mamba: torch.Tensor  # StatePool.save
    kv: tuple[torch.Tensor, torch.Tensor]  # KVCache.save


class Memory:
    def __init__(
        self, config: ModelConfig, *, slots: int, context: int, window: int, dtype: torch.dtype, device: torch.device
    ):
        geometry = MambaGeometry(
            num_heads=config.mamba_heads,
            head_dim=config.mamba_head_dim,
            num_groups=config.mamba_groups,
            state_dim=config.state_dim,
            conv_kernel=config.conv_kernel,
        )
        activation = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        self.pool = StatePool(
            geometry,
            ReplayConfig(window=window, max_step_tokens=1, activation=activation),
            num_slots=slots,
            num_layers=config.layers.count(MAMBA),
            device=device,
        )
        self.kv = KVCache(
            config.layers.count(ATTENTION), slots, config.kv_heads or 1, context, config.head_dim or 1, dtype, device
        )

    def reset(self, slot: int, stream: int) -> None:
        self.pool.reset([slot], streams=[stream])
        self.kv.clear(slot)

    def save(self, slot: int, length: int) -> SavedSlot:
        return SavedSlot(self.pool.save([slot]), self.kv.save(slot, length))

    def load(self, slot: int, saved: SavedSlot) -> None:
        self.pool.load([slot], saved.mamba)
        self.kv.load(slot, saved.kv)
