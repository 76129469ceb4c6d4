# SPDX-License-Identifier: Apache-2.0
"""Where texts stand, as the device knows it: a step can be launched before the last one's tokens are on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Turn(NamedTuple):
    """One sequence's share of a decode step, as the host asks for it.

    tokens: its newest token and the drafts that may follow, behind `start` cached ones. Empty while the pass that makes
    them is on its way: they are taken from the Frontier then, at most `drafts` drafts, and none that would stand
    behind position `last`.
    """

    slot: int
    start: int = -1
    tokens: tuple[int, ...] | list[int] = ()
    drafts: int = 0
    last: int = 0

    @property
    def most_tokens(self) -> int:
        return len(self.tokens) or 1 + self.drafts


HEADER = 4  # of a row that `asked` makes, before its tokens


def asked(turns: list[Turn], rows: int, width: int) -> list[list[int]]:
    """[rows, HEADER + width]: slot, start, drafts, last, tokens. Padded rows have slot -1 and a token."""
    packed = [
        [slot, start, max(len(tokens) - 1, drafts), last, *tokens, *[0] * (width - len(tokens))]
        for slot, start, tokens, drafts, last in turns
    ]
    return packed + [[-1] + [0] * (HEADER - 1 + width)] * (rows - len(turns))


class Frontier:
    """By slot: how many tokens are in memory, the newest one, which is not, and the drafts behind it."""

    def __init__(self, slots: int, step_tokens: int, device: torch.device):
        # length, number of drafts, newest token, drafts. The last row is of no slot: padded rows write there.
        self._table = torch.zeros((slots + 1, 2 + step_tokens), dtype=torch.int64, device=device)

    def advance(
        self, slots: torch.Tensor, lengths: torch.Tensor, newest: torch.Tensor, drafts: torch.Tensor | None
    ) -> None:
        """After a pass. slots (that behind the last one: of none), lengths, newest int64 [rows]; drafts int64 [rows,
        count] or None."""
        counts = torch.full_like(lengths, 0 if drafts is None else drafts.shape[1])
        columns = torch.stack([lengths, counts, newest], 1)
        if drafts is not None:
            columns = torch.cat([columns, drafts], 1)
        self._table[slots, : columns.shape[1]] = columns

    def turns(self, asked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """What the rows that `asked` describes bring: slots, starts, counts [rows] and tokens [rows, width], of which
        the first `counts` of a row are meant; counts None where width is 1."""
        slots, starts, drafts, last = asked[:, :HEADER].unbind(1)
        width = asked.shape[1] - HEADER
        here = self._table[torch.where(slots < 0, len(self._table) - 1, slots)]
        known = starts >= 0
        tokens = torch.where(known[:, None], asked[:, HEADER:], here[:, 2 : 2 + width])
        counts = None
        if width > 1:
            left = torch.minimum(torch.minimum(here[:, 1], last - here[:, 0]), drafts).clamp(min=0)
            counts = 1 + torch.where(known, drafts, left)
        return slots, torch.where(known, starts, here[:, 0]), counts, tokens
