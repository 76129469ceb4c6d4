# SPDX-License-Identifier: Apache-2.0
"""Passes on their way: launched, their outcomes not on the host yet."""

from __future__ import annotations

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
    """

    def __init__(self, scheduler: Scheduler, runner):
        self.scheduler, self.runner = scheduler, runner

    def next(self, before: Pass | None) -> tuple[list[Sequence], list[tuple[Sequence, int]] | None]:
        """Who takes part in the next pass, and their chunks if it is one of prompts.

        before: the pass whose outcomes are not handed out yet. Texts that surely end with it are left out.
        """
        chunks = self.scheduler.next_prompts()
        if chunks:
            return [sequence for sequence, _ in chunks], chunks
        waited_for = frozenset(before.sequences if before else ())
        return [s for s in self.scheduler.decoding() if s not in waited_for or s.tokens_left > 1], None

    def launch(self, sequences: list[Sequence], chunks: list[tuple[Sequence, int]] | None, before: Pass | None) -> Pass:
        """What `next` gave."""
        return self._prompts(chunks) if chunks else self._decode(sequences, before)

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

    def _decode(self, sequences: list[Sequence], before: Pass | None) -> Pass:
        waited_for = frozenset(before.sequences if before else ())
        turns = [s.turn_ahead() if s in waited_for else s.turn() for s in sequences]
        drafts = max(sequence.draft_length for sequence in sequences)
        return Pass("decode", sequences, self.runner.decode(turns, [s.params for s in sequences], drafts))
