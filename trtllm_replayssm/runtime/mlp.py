# SPDX-License-Identifier: Apache-2.0
"""The dense feed-forward layer: up, relu², down. No gate."""

from __future__ import annotations

import torch

from ..ops import relu2
from .dense import Linear
from .row_tiles import RowTiles


class MLP:
    def __init__(self, up: Linear, down: Linear, tiles: RowTiles):
        self.up, self.down, self.tiles = up, down, tiles

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]."""
        return self.down(relu2(self.up(x)))

    def __call__(self, x: torch.Tensor, batch, memory, total: torch.Tensor) -> torch.Tensor | None:
        """x [n, hidden] -> what is left to add to `total`, fp32 [n, hidden] (Linear.add_to)."""
        return self.tiles(lambda x: self.down.add_to(total, relu2(self.up(x))), x)
