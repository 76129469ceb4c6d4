# SPDX-License-Identifier: Apache-2.0
"""Drafts by prompt lookup: what followed the newest tokens the last time they occurred."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from .drafter import Drafter
from .sequence import Sequence


class NGram(Drafter):
    """Looks for the latest earlier occurrence of the last `longest` tokens, then of fewer, down to `shortest`."""

    def __init__(self, longest: int = 4, shortest: int = 2):
        self._sizes = range(longest, shortest - 1, -1)
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text(self._sizes)
            text.extend(sequence.prompt)
        text.extend(sequence.tokens[len(text.tokens) - len(sequence.prompt) :])
        return text.continued(count)


class _Text:
    """Tokens so far, and where each run of them was last followed by another token. Only what is new is looked at."""

    def __init__(self, sizes: range):
        self.tokens: list[int] = []
        self._sizes, self._next = sizes, {}

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            for size in self._sizes:
                self._next[tuple(self.tokens[-size:])] = len(self.tokens)
            self.tokens.append(token)

    def continued(self, count: int) -> list[int]:
        for size in self._sizes:
            source = self._next.get(tuple(self.tokens[-size:]))
            if source is not None:
                # The copy may run into the tokens that it writes: a repetition goes on.
                distance = len(self.tokens) - source
                return [self.tokens[source + step % distance] for step in range(count)]
        return []
