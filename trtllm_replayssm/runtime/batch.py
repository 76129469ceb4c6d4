# SPDX-License-Identifier: Apache-2.0
"""What one forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import Plan


class Row(NamedTuple):
    """One sequence's share of a batch, known to the host: `count` new tokens after `start` cached ones, in `slot`."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True)
class Grid:
    """Packed tokens as a rectangle of rows × the most tokens of a row, and back, by indices on the device.

    counts: int64 [rows], tokens of each row, at least 1.
    cells: int64 [rows, width]: where each row's tokens are packed; shorter rows repeat their last one.
    place: int64 [n]: where each packed token stands in the flattened rectangle.
    """

    counts: torch.Tensor
    cells: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, width: int, place: torch.Tensor) -> Grid:
        first = counts.cumsum(0) - counts
        steps = torch.arange(width, device=counts.device)
        return cls(counts, first[:, None] + torch.minimum(steps, counts[:, None] - 1), place)

    @classmethod
    def of_single_tokens(cls, rows: int, device: torch.device) -> Grid:
        index = torch.arange(rows, device=device)
        return cls(torch.ones_like(index), index[:, None], index)


@dataclass
class Batch:
    """The new tokens of some sequences, packed row after row in the order of `plan`.

    tokens, positions, kv_slots: int64 [n] on the device: id, position in its sequence, and KV slot of each token.
    context: no row has more tokens in memory after the pass.
    is_prompt: prompt chunks (any number of tokens a row) rather than a decode step (one token and its drafts a row).
    on_host: the rows, where layers may depend on them. None: the batch is a decode step whose layers launch the same
        work whatever the values, reading `context` KV positions of every row (so that a CUDA graph can hold it).
    grid: the rows on the device.
    plan: None where no Mamba layer takes part.
    """

    plan: Plan | None
    tokens: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    context: int
    grid: Grid
    is_prompt: bool = False
    on_host: list[Row] | None = None
