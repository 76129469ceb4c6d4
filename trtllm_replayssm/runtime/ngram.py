# SPDX-License-Identifier: Apache-2.0
"""Drafts by prompt lookup: what followed the newest tokens the last time they occurred."""

from __future__ import annotations

from array import array

from .drafter import Drafter
from .sequence import Sequence


class NGram(Drafter):
    """Looks for the latest earlier occurrence of the last `longest` tokens, then of fewer, down to `shortest`."""

    def __init__(self, longest: int = 4, shortest: int = 2):
        self.longest, self.shortest = longest, shortest

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        known = sequence.prompt + sequence.tokens
        for size in range(min(self.longest, len(known) - 1), self.shortest - 1, -1):
            if (found := _latest(known[-size:], known[:-1])) is not None:
                # The copy may run into the tokens that it writes: a repetition goes on.
                for source in range(found + size, found + size + count):
                    known.append(known[source])
                return known[-count:]
        return []


def _latest(part: list[int], whole: list[int]) -> int | None:
    """Where `part` last occurs in `whole`."""
    part_bytes, whole_bytes = array("q", part).tobytes(), array("q", whole).tobytes()
    end = len(whole_bytes)
    while (at := whole_bytes.rfind(part_bytes, 0, end)) >= 0:
        if at % 8 == 0:
            return at // 8
        end = at + len(part_bytes) - 1  # no token's start
    return None
