# SPDX-License-Identifier: Apache-2.0
"""Passes on their way: launched, their outcomes not on the host yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .batch import Row
from .runner import Outcomes
from .scheduler import Scheduler
from .sequence import Sequence


@dataclass(frozen=True)
class Pass:
    """kind: "prefill" or "decode". sequences: that get tokens, in the order of `outcomes`. prompt_tokens: it folds."""

    kind: str
    sequences: list[Sequence]
    outcomes: Outcomes
    prompt_tokens: int = 0


class Pipeline:
    """Launches what a scheduler decides. Where the runner can, a pass is launched before the outcomes of the one before
    it are known: what the host does then costs no time. A text whose end is not known yet takes part once more; what
    that gives is thrown away.

    ahead: launched passes whose outcomes are not handed out yet, in order.
    """

    def __init__(self, scheduler: Scheduler, runner):
        self.scheduler, self.runner = scheduler, runner
        self.ahead: deque[Pass] = deque()

    @property
    def has_room(self) -> bool:
        """Whether another pass may be launched before outcomes are handed out. One may be on its way behind the first.
        A pass of prompts is short, it may end before the host has handed out a decode step's tokens: a second one may
        follow it, for no text waits for both."""
        if not self.ahead or not self.runner.runs_ahead:
            return not self.ahead
        return len(self.ahead) == 1 or [done.kind for done in self.ahead] == ["decode", "prefill"]

    def next(self) -> tuple[list[Sequence], list[tuple[Sequence, int]] | None]:
        """Who takes part in the next pass, and their chunks if it is one of prompts. Texts that surely end with a pass
        on its way are left out."""
        chunks = self.scheduler.next_prompts()
        if chunks:
            return [sequence for sequence, _ in chunks], chunks
        waited_for = self._waited_for()
        return [s for s in self.scheduler.decoding() if s not in waited_for or s.tokens_left > 1], None

    def launch(self, sequences: list[Sequence], chunks: list[tuple[Sequence, int]] | None) -> Pass:
        """What `next` gave: the last pass of `ahead` then."""
        self.ahead.append(self._prompts(chunks) if chunks else self._decode(sequences))
        return self.ahead[-1]

    def _waited_for(self) -> frozenset[Sequence]:
        """Texts that get tokens from a pass on its way."""
        return frozenset(sequence for done in self.ahead for sequence in done.sequences)

    def _prompts(self, chunks: list[tuple[Sequence, int]]) -> Pass:
        rows, tokens = [], []
        after: list[int | None] = []
        for sequence, count in chunks:
            start = sequence.prefilled
            prompt = [*sequence.prefix, None]
            rows.append(Row(sequence.slot, start, count))
            tokens += prompt[start : start + count]
            after += prompt[start + 1 : start + count + 1]
        complete = [s for s, count in chunks if s.prefilled + count == len(s.prefix)]
        drafts = max(sequence.draft_length for sequence, _ in chunks)
        outcomes = self.runner.prompts(rows, tokens, after, [s.params for s in complete], drafts)
        for sequence, count in chunks:
            sequence.prefilled += count
        return Pass("prefill", complete, outcomes, len(tokens))

    def _decode(self, sequences: list[Sequence]) -> Pass:
        waited_for = self._waited_for()
        turns = [s.turn_ahead() if s in waited_for else s.turn() for s in sequences]
        drafts = max(sequence.draft_length for sequence in sequences)
        return Pass("decode", sequences, self.runner.decode(turns, [s.params for s in sequences], drafts))
