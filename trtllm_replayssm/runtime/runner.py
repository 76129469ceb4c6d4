# SPDX-License-Identifier: Apache-2.0
"""Forward passes: prompt chunks, and decode steps that verify drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from .. import Plan
from .batch import Batch, Grid, Row
from .cuda_graph import StepGraphs
from .drafter import Drafter
from .memory import Memory
from .model import Model
from .sampler import SamplingParams, sample
from .verification import accept

# What a row gets: new tokens, and drafts for its next step if the drafter gives them on the device.
Outcome = tuple[list[int], list[int]]


class Runner:
    """Runs the model, and the drafter behind it, over packed rows of tokens. A pass waits for the device once, for its
    outcomes (and, row by row, once more for each further draft of an MTP head).

    drafter: None: decode steps bring one token a row.
    together: decode steps launch the same work whatever the values, rather than row by row.
    graphs: they do so as CUDA graphs, for up to `max_rows` rows.
    """

    def __init__(
        self, model: Model, memory: Memory, drafter: Drafter | None, *, together: bool, graphs: bool, max_rows: int
    ):
        self.model, self.memory, self.drafter, self.tiles = model, memory, drafter, model.tiles
        self.together = together
        self.graphs: StepGraphs | None = None
        if graphs:
            limits = max_rows, memory.pool.config.max_step_tokens, memory.kv.capacity
            self.graphs = StepGraphs(self.batch_together, self.verify, self.settle, limits, memory.pool.device)

    # ---- passes ----

    def score(self, row: Row, tokens: list[int]) -> torch.Tensor:
        """Logits fp32 [count, vocab] after each token of a prompt chunk."""
        return self.model.logits(self._fold(self._batch_by_row([row], tokens, is_prompt=True)))

    def prompts(
        self,
        rows: list[Row],
        tokens: list[int],
        after: list[int | None],
        params: list[SamplingParams],
        drafts: int,
    ) -> list[Outcome]:
        """A pass of prompt chunks. Returns the outcomes of those that complete their prompt, in order.

        after: the prompt's token after each of `tokens`, None at a prompt's end. params: of the prompts that end.
        drafts: how many to propose; 0: no row of this pass ever wants any.
        """
        batch = self._batch_by_row(rows, tokens, is_prompt=True)
        hidden = self._fold(batch)
        ends = [index for index, token in enumerate(after) if token is None]
        last = self._to_device(ends)
        following = self._to_device([token or 0 for token in after])
        columns = []
        if ends:
            positions = [row.start + index + 1 for row in rows for index in range(row.count)]
            logits = self.model.logits(hidden[last])
            following[last] = sample(logits, params, [positions[end] for end in ends], self.tiles)
            columns.append(following[last][:, None])
        columns += self._follow(batch, hidden, following, last, drafts)
        return [(row[:1], row[1:]) for row in torch.cat(columns, 1).tolist()] if ends else []

    def decode(self, rows: list[Row], tokens: list[int], params: list[SamplingParams], drafts: int) -> list[Outcome]:
        """A decode step: each row brings its newest token and the drafts that may follow. drafts: as for `prompts`."""
        width, context = max(row.count for row in rows), max(row.start + row.count for row in rows)
        positions = [row.start + index + 1 for row in rows for index in range(row.count)]
        params = [p for p, row in zip(params, rows, strict=True) for _ in range(row.count)]
        if self.graphs is not None:
            graph = self.graphs(len(rows), width, drafts, context)
            width = graph.width
            packed = self._pack(rows, tokens, graph.rows, width, graph.rows * width)
            logits = graph.verify(*packed)[: len(tokens)]
            outcomes = graph.settle(sample(logits, params, positions, self.tiles))[: len(rows)]
        else:
            if self.together:
                packed = self._pack(rows, tokens, len(rows), width, len(tokens))
                batch = self.batch_together(*packed, width, context)
            else:
                batch = self._batch_by_row(rows, tokens, is_prompt=False)
            with self._abandoning(batch.plan):
                hidden, logits = self.verify(batch)
                outcomes = self.settle(batch, hidden, sample(logits, params, positions, self.tiles), drafts)
        return [(row[1 : 1 + row[0]], row[1 + width :]) for row in outcomes.tolist()]

    # ---- what a pass is made of ----

    def verify(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [n, hidden] and logits fp32 [n, vocab] of a decode step, whose plan stays open."""
        hidden = self.model(batch, self.memory)
        return hidden, self.model.logits(hidden)

    def settle(self, batch: Batch, hidden: torch.Tensor, chosen: torch.Tensor, drafts: int) -> torch.Tensor:
        """Accepts, commits and drafts. chosen int64 [n]: the model's token after each of the n tokens.

        Returns int64 [rows, 1 + width + drafts]: how many new tokens; those, then padding; the next drafts, if `follow`
        gives any.
        """
        accepted, choices = accept(batch.tokens, chosen, batch.grid)
        self.memory.pool.commit(batch.plan, accepted.to(torch.int32))
        last = batch.grid.cells.gather(1, accepted[:, None] - 1).squeeze(1)
        return torch.cat([accepted[:, None], choices, *self._follow(batch, hidden, chosen, last, drafts)], 1)

    def _follow(
        self, batch: Batch, hidden: torch.Tensor, following: torch.Tensor, last: torch.Tensor, drafts: int
    ) -> list[torch.Tensor]:
        """[what Drafter.follow gives], or [] if that is nothing."""
        if self.drafter is None or not drafts:
            return []
        drafted = self.drafter.follow(batch, hidden, following, last, drafts, self.memory)
        return [] if drafted is None else [drafted]

    def _fold(self, batch: Batch) -> torch.Tensor:
        """Hidden states [n, hidden] of prompt chunks, which are in memory then."""
        with self._abandoning(batch.plan):
            hidden = self.model(batch, self.memory)
        self.memory.pool.commit(batch.plan)
        return hidden

    @contextmanager
    def _abandoning(self, plan: Plan) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if plan.open:
                self.memory.pool.abandon(plan)
            raise

    # ---- batches ----

    def _batch_by_row(self, rows: list[Row], tokens: list[int], *, is_prompt: bool) -> Batch:
        counts = [row.count for row in rows]
        per_token, (_, counts_there) = self._pack(rows, tokens, len(rows), max(counts), len(tokens))
        tokens, positions, slots, place = per_token
        return Batch(
            self.memory.pool.plan([row.slot for row in rows], counts),
            tokens,
            positions,
            slots,
            max(row.start + row.count for row in rows),
            Grid.of(counts_there, max(counts), place),
            is_prompt,
            on_host=rows,
        )

    def batch_together(self, per_token: torch.Tensor, per_row: torch.Tensor, width: int, context: int) -> Batch:
        """A decode step from what `_pack` gives."""
        tokens, positions, slots, place = per_token
        row_slots, counts = per_row
        plan = self.memory.pool.plan(row_slots.to(torch.int32), 1 if width == 1 else counts.to(torch.int32), most=width)
        kv_slots = torch.where(slots < 0, self.memory.kv.scratch_slot, slots)
        return Batch(plan, tokens, positions, kv_slots, context, Grid.of(counts, width, place))

    def _pack(
        self, rows: list[Row], tokens: list[int], padded_rows: int, width: int, padded_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [4, padded_tokens]: token, position, slot, place in the grid; int64 [2, padded_rows]: slot, count.

        Padded rows have slot -1 and a token each; the tokens after theirs belong to no row.
        """
        slots, starts, counts = np.array(rows, np.int64).T
        total, live = len(tokens), len(rows)
        row = np.repeat(np.arange(live), counts)
        step = np.arange(total) - np.repeat(counts.cumsum() - counts, counts)
        per_token = np.zeros((4, padded_tokens), np.int64)
        per_token[:, :total] = tokens, starts[row] + step, slots[row], row * width + step
        per_token[2, total:] = -1
        per_token[3, total : total + padded_rows - live] = np.arange(live, padded_rows) * width
        per_row = np.array([[-1], [1]]).repeat(padded_rows, 1)
        per_row[:, :live] = slots, counts
        return self._to_device(per_token), self._to_device(per_row)

    def _to_device(self, values) -> torch.Tensor:
        """int64, without waiting for the device."""
        device, values = self.memory.pool.device, torch.as_tensor(values, dtype=torch.int64)
        return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
