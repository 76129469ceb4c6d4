# SPDX-License-Identifier: Apache-2.0
"""Forward passes by the graphs of an engine folder: prompt chunks, and decode steps that verify drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..pool import described
from .batch import Grid, Row
from .executor import Executor, Outputs
from .frontier import Turn
from .graph_memory import GraphMemory
from .memory import StateLost
from .row_tiles import RowTiles
from .runner import Outcome, Outcomes
from .sampler import SamplingParams, sample
from .verification import accept


class GraphRunner:
    """As Runner, with graphs in place of a Model. A row of a step is the slot of its number: all rows run, idle ones
    without tokens. A pass waits for the device once, for its outcomes and the error word.

    step_tokens: T_max. drafting: drafts come from the graph "mtp".
    """

    runs_ahead = False  # a run's error word must be seen before the next one

    def __init__(self, executor: Executor, memory: GraphMemory, *, step_tokens: int, drafting: bool):
        self.executor, self.memory = executor, memory
        self.step_tokens, self.drafting = step_tokens, drafting
        self.rows = len(memory.lengths)
        self.tiles = RowTiles(fixed=False)

    # ---- passes ----

    def score(self, row: Row, tokens: list[int]) -> torch.Tensor:
        """Logits fp32 [count, vocab] after each token of a prompt chunk."""
        with self._whole([row]):
            outputs, word = self._fold(row, tokens)
            logits = outputs.logits[0, : row.count].clone()
            self._check([word.tolist()], [row.slot])
        return logits

    def prompts(
        self,
        rows: list[Row],
        tokens: list[int],
        after: list[int | None],
        params: list[SamplingParams],
        drafts: int,
    ) -> Outcomes:
        """Runner.prompts, waited for. A prompt chunk is a run of its own."""
        with self._whole(rows):
            first, params, words = 0, iter(params), []
            ends: list[tuple[Row, torch.Tensor, torch.Tensor, torch.Tensor]] = []  # row, newest token, draft, hidden
            for row in rows:
                part = slice(first, first + row.count)
                first += row.count
                outputs, word = self._fold(row, tokens[part])
                words.append(word)
                following = torch.tensor([token or 0 for token in after[part]], dtype=torch.int32)
                following = following.to(self._device)
                if ended := after[part][-1] is None:
                    logits = outputs.logits[0, row.count - 1 : row.count]
                    newest = sample(logits, [next(params)], self._to_device([row.start + row.count]), self.tiles)
                    following[-1:] = newest
                if self.drafting and drafts:
                    outputs = self._chunk("mtp", row, following, hidden=outputs.hidden)
                if ended:
                    last = row.count - 1
                    ends.append(
                        (row, newest, outputs.logits[0, last].argmax(-1, True), outputs.hidden[0, last].clone())
                    )
            columns = []
            if ends:
                columns.append(torch.stack([newest for _, newest, _, _ in ends]))
            if ends and self.drafting and drafts:
                slots = [row.slot for row, _, _, _ in ends]
                positions = torch.tensor([row.start + row.count - 1 for row, _, _, _ in ends], device=self._device)
                draft, hidden = (torch.stack(part) for part in zip(*((d, h) for _, _, d, h in ends), strict=True))
                columns += self._drafts(slots, positions, draft.squeeze(1), hidden, drafts)
            words = torch.stack(words)
            outcomes = torch.cat(columns, 1).tolist() if ends else []
            self._check(words.tolist(), [row.slot for row in rows])
        return lambda: [Outcome(outcome[:1], outcome[1:]) for outcome in outcomes]

    def decode(self, turns: list[Turn], params: list[SamplingParams], drafts: int) -> Outcomes:
        """Runner.decode, waited for. Steps have 1 or T_max tokens a row, padded: two shapes are enough."""
        memory = self.memory
        rows = [Row(turn.slot, turn.start, len(turn.tokens)) for turn in turns]
        tokens = [token for turn in turns for token in turn.tokens]
        width = 1 if all(row.count == 1 for row in rows) else self.step_tokens
        ids, counts = torch.zeros(self.rows, width, dtype=torch.int32), torch.zeros(self.rows, dtype=torch.int32)
        slots, accepted = torch.full_like(counts, -1), torch.zeros_like(counts)
        positions = torch.tensor(memory.lengths, dtype=torch.int32)
        first, at, sampled = 0, [], []
        for row in rows:
            ids[row.slot, : row.count] = torch.tensor(tokens[first : first + row.count], dtype=torch.int32)
            first += row.count
            counts[row.slot], slots[row.slot] = row.count, row.slot
            positions[row.slot], accepted[row.slot] = row.start, memory.accepted[row.slot]
            at += [row.slot * width + step for step in range(row.count)]
            sampled += [row.start + step + 1 for step in range(row.count)]
        params = [p for p, row in zip(params, rows, strict=True) for _ in range(row.count)]
        with self._whole(rows):
            outputs = self.executor.run(
                "model",
                None,
                dict(token_ids=ids, tokens=counts, positions=positions, slots=slots, accepted=accepted),
            )
            word = memory.pool.take_error()
            at = self._to_device(at)
            chosen = sample(outputs.logits.flatten(0, 1)[at], params, self._to_device(sampled), self.tiles)
            grid = Grid.of(self._to_device([row.count for row in rows]), width, at)
            kept, choices = accept(self._to_device(tokens), chosen, grid)
            columns = [kept[:, None], choices]
            if self.drafting and drafts:
                following = torch.zeros(self.rows * width, dtype=torch.int32, device=self._device)
                following[at] = chosen.int()
                inputs = dict(token_ids=following.view(self.rows, width), tokens=counts, positions=positions)
                outputs = self.executor.run("mtp", None, {**inputs, "hidden": outputs.hidden})
                live = self._to_device([row.slot for row in rows])
                draft, hidden = outputs.logits[live, kept - 1].argmax(-1), outputs.hidden[live, kept - 1]
                starts = self._to_device([row.start for row in rows])
                columns += self._drafts([row.slot for row in rows], starts + kept - 1, draft, hidden, drafts)
            outcomes = torch.cat(columns, 1).tolist()
            self._check([word.tolist()])
        for row, outcome in zip(rows, outcomes, strict=True):
            memory.stepped(row.slot, row.start + outcome[0], outcome[0])
        given = [
            Outcome(outcome[1 : 1 + outcome[0]], outcome[1 + width :], row.count)
            for row, outcome in zip(rows, outcomes, strict=True)
        ]
        return lambda: given

    # ---- what a pass is made of ----

    def _fold(self, row: Row, tokens: list[int]) -> tuple[Outputs, torch.Tensor]:
        """A prompt chunk into memory. Returns the error word of its run, too."""
        values = row.slot, self.memory.accepted[row.slot]
        slots, accepted = (torch.tensor([value], dtype=torch.int32) for value in values)
        ids = torch.tensor(tokens, dtype=torch.int32)
        outputs = self._chunk("model", row, ids, slots=slots, accepted=accepted)
        self.memory.folded(row.slot, row.start + row.count)
        return outputs, self.memory.pool.take_error()

    def _chunk(self, graph: str, row: Row, tokens: torch.Tensor, **more: torch.Tensor) -> Outputs:
        """A run of one row, of more tokens than steps have."""
        ids = tokens.new_zeros((1, max(row.count, self.step_tokens + 1)))
        ids[0, : row.count] = tokens
        counts, positions = (torch.tensor([value], dtype=torch.int32) for value in (row.count, row.start))
        return self.executor.run(graph, row.slot, dict(token_ids=ids, tokens=counts, positions=positions, **more))

    def _drafts(
        self, slots: list[int], positions: torch.Tensor, draft: torch.Tensor, hidden: torch.Tensor, count: int
    ) -> list[torch.Tensor]:
        """[int64 [n, count]], drafts of these slots. positions [n]: of the token whose hidden state [n, hidden] gave
        the first draft [n]."""
        drafts = [draft]
        live = self._to_device(slots)
        counts = torch.zeros(self.rows, dtype=torch.int32, device=self._device)
        counts[live] = 1
        held = self._to_device(self.memory.lengths).int()
        while len(drafts) < count:
            positions = positions + 1
            ids, states = counts.new_zeros((self.rows, 1)), hidden.new_zeros((self.rows, 1, hidden.shape[-1]))
            ids[live, 0], states[live, 0] = drafts[-1].int(), hidden
            inputs = dict(token_ids=ids, tokens=counts, positions=held.index_copy(0, live, positions.int()))
            outputs = self.executor.run("mtp", None, {**inputs, "hidden": states})
            hidden = outputs.hidden[live, 0]
            drafts.append(outputs.logits[live, 0].argmax(-1))
        return [torch.stack(drafts, 1)]

    # ---- what may go wrong ----

    @contextmanager
    def _whole(self, rows: list[Row]) -> Iterator[None]:
        """Whatever fails within may have changed the state of `rows`."""
        try:
            yield
        except BaseException as error:
            self.memory.lost([row.slot for row in rows])
            if not isinstance(error, Exception) or isinstance(error, StateLost):
                raise
            raise StateLost(f"an execution failed: {type(error).__name__}: {error}") from error

    def _check(self, words: list[list[int]], slots: list[int] | None = None) -> None:
        """Raises StateLost if a run's error word tells of a row. slots: of runs of one row; None: row i has slot i.

        Plan treats a row in error as an idle one. The word names the first only: all rows of the pass are lost.
        """
        for run, word in enumerate(words):
            if error := described(word):
                raise StateLost(error.text, slots[run] if slots else error.row)

    # ---- devices ----

    @property
    def _device(self) -> torch.device:
        return self.memory.pool.device

    def _to_device(self, values: list[int]) -> torch.Tensor:
        """int64, without waiting for the device."""
        values = torch.tensor(values, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return values.to(self._device, non_blocking=True)
