# SPDX-License-Identifier: Apache-2.0
"""Running row-wise functions so that a row's bits do not depend on its batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

# A library GEMM picks its kernel, and with it the order of a row's sum, by the number of rows. At one fixed number
# every row takes the same path wherever it stands. 16 rows keep each tile's start aligned for any even row length,
# since some libraries also choose by alignment.
TILE = 16


class RowTiles:
    """Calls row-wise functions on whole batches or, if `fixed`, on zero-padded tiles of 16 rows each."""

    def __init__(self, fixed: bool):
        self.fixed = fixed

    def __call__(self, function: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
        """function(*rows); every tensor of `rows` and the result is [n, ...] and row i depends on rows i only.

        That is not so of products that add themselves to a sum or come in parts, but in fp32, in which a model with
        fixed tiles computes, `Linear.add_to` does neither.
        """
        n = rows[0].shape[0]
        if not self.fixed or n == 0:
            return function(*rows)
        pad = -n % TILE
        padded = [F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, pad)).contiguous() for tensor in rows]
        return torch.cat(
            [function(*(tensor[start : start + TILE] for tensor in padded)) for start in range(0, n, TILE)]
        )[:n]
