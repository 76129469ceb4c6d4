# SPDX-License-Identifier: Apache-2.0
"""Forward passes: prompt chunks, and decode steps that verify drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from .. import Plan
from ..transfers import later
from .attention import has_kernel
from .batch import Batch, Grid, Row
from .cuda_graph import StepGraphs
from .drafter import Drafter
from .frontier import Frontier, Turn, asked
from .memory import Memory
from .model import Model
from .sampler import SamplingParams, sample
from .verification import accept


class Outcome(NamedTuple):
    """What a row gets: new tokens, and drafts for its next step if the drafter gives them on the device. brought: how
    many tokens its decode step verified."""

    tokens: list[int]
    drafts: list[int]
    brought: int = 0


# Waits for the device, for what a pass gives.
Outcomes = Callable[[], list[Outcome]]
_GREEDY = SamplingParams()


class Runner:
    """Runs the model, and the drafter behind it, over packed rows of tokens. A pass waits for the device once, when its
    outcomes are asked for (and, row by row, once more for each further draft of an MTP head).

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
        self.frontier = Frontier(memory.pool.num_slots, memory.pool.config.max_step_tokens, memory.pool.device)

    @property
    def runs_ahead(self) -> bool:
        """Whether `decode` takes turns whose tokens are still on their way."""
        return self.together and (self.drafter is None or self.drafter.on_device)

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
    ) -> Outcomes:
        """A pass of prompt chunks. Gives the outcomes of those that complete their prompt, in order.

        after: the prompt's token after each of `tokens`, None at a prompt's end. params: of the prompts that end.
        drafts: how many to propose; 0: no row of this pass ever wants any.
        """
        batch = self._batch_by_row(rows, tokens, is_prompt=True)
        hidden = self._fold(batch)
        ends = [index for index, token in enumerate(after) if token is None]
        last = self._to_device(ends)
        following = self._to_device([token or 0 for token in after])
        if ends:
            lengths = batch.positions[last] + 1
            newest = sample(self.model.logits(hidden[last]), params, lengths, self.tiles)
            following[last] = newest
        drafted = self._follow(batch, hidden, following, last, drafts)
        if not ends:
            return list
        self.frontier.advance(batch.kv_slots[last], lengths, newest, drafted)
        given = later(_columns(newest[:, None], drafted))
        return lambda: [Outcome(row[:1], row[1:]) for row in given()]

    def decode(self, turns: list[Turn], params: list[SamplingParams], drafts: int) -> Outcomes:
        """A decode step. drafts: as for `prompts`."""
        width = max(turn.most_tokens for turn in turns)
        if not self.together:
            rows = [Row(turn.slot, turn.start, len(turn.tokens)) for turn in turns]
            batch = self._batch_by_row(rows, [token for turn in turns for token in turn.tokens], is_prompt=False)
            outcomes = self._step(batch, params, drafts)
        elif self.graphs is None:
            rows = self._to_device(asked(turns, len(turns), width))
            outcomes = self._step(self.batch_together(rows, self._context(turns)), params, drafts)
        else:
            graph = self.graphs(len(turns), width, drafts, self._context(turns))
            width = graph.width
            logits = graph.verify(self._to_device(asked(turns, graph.rows, width)))
            outcomes = graph.settle(self._choose(graph.batch, logits, params))[: len(turns)]
        given = later(outcomes)
        return lambda: [Outcome(row[2 : 2 + row[0]], row[2 + width :], row[1]) for row in given()]

    # ---- what a pass is made of ----

    def verify(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [n, hidden] and logits fp32 [n, vocab] of a decode step, whose plan stays open."""
        hidden = self.model(batch, self.memory)
        return hidden, self.model.logits(hidden)

    def settle(self, batch: Batch, hidden: torch.Tensor, chosen: torch.Tensor, drafts: int) -> torch.Tensor:
        """Accepts, commits and drafts. chosen int64 [n]: the model's token after each of the n tokens.

        Returns int64 [rows, 2 + width + drafts]: how many new tokens; how many were brought; the new ones, then
        padding; the next drafts, if `follow` gives any.
        """
        cells = batch.grid.cells
        if cells.shape[1] == 1:  # nothing to reject: each row's token is its last one
            accepted, choices, last = batch.grid.counts, chosen[:, None], cells[:, 0]
            slots, positions, newest = batch.kv_slots, batch.positions, chosen
            self.memory.pool.commit(batch.plan)
        else:
            accepted, choices = accept(batch.tokens, chosen, batch.grid)
            last = cells.gather(1, accepted[:, None] - 1).squeeze(1)
            slots, positions, newest = batch.kv_slots[last], batch.positions[last], chosen[last]
            self.memory.pool.commit(batch.plan, accepted.to(torch.int32))
        drafted = self._follow(batch, hidden, chosen, last, drafts)
        self.frontier.advance(slots, positions + 1, newest, drafted)
        return _columns(torch.stack([accepted, batch.grid.counts], 1), choices, drafted)

    def _step(self, batch: Batch, params: list[SamplingParams], drafts: int) -> torch.Tensor:
        """What `settle` returns, by single launches."""
        with self._abandoning(batch.plan):
            hidden, logits = self.verify(batch)
            return self.settle(batch, hidden, self._choose(batch, logits, params), drafts)

    def _choose(self, batch: Batch, logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        """The model's token after each of a step's. params: of its rows, but for padded ones."""
        rows, width = batch.grid.cells.shape
        params = params + [_GREEDY] * (rows - len(params))
        return sample(logits, params, batch.positions + 1, self.tiles, batch.grid.place // width)

    def _follow(
        self, batch: Batch, hidden: torch.Tensor, following: torch.Tensor, last: torch.Tensor, drafts: int
    ) -> torch.Tensor | None:
        """What Drafter.follow gives, if anything."""
        if self.drafter is None or not drafts:
            return None
        return self.drafter.follow(batch, hidden, following, last, drafts, self.memory)

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
        slots, starts, counts = np.array(rows, np.int64).T
        row = np.repeat(np.arange(len(rows)), counts)
        step = np.arange(len(tokens)) - np.repeat(counts.cumsum() - counts, counts)
        width = int(counts.max())
        packed = np.stack([tokens, starts[row] + step, slots[row], row * width + step])
        tokens, positions, slots_there, place = self._to_device(packed)
        return Batch(
            self.memory.pool.plan(slots.tolist(), counts.tolist()),
            tokens,
            positions,
            slots_there,
            int((starts + counts).max()),
            Grid.of(self._to_device(counts), width, place),
            is_prompt,
            on_host=rows,
        )

    def batch_together(self, asked: torch.Tensor, context: int) -> Batch:
        """A decode step of what `frontier.asked` gives. Tokens behind the last row's belong to no row."""
        kv = self.memory.kv
        slots, starts, counts, tokens = self.frontier.turns(asked)
        rows, width = tokens.shape
        plan = self.memory.pool.plan(slots.to(torch.int32), 1 if counts is None else counts.to(torch.int32), most=width)
        slots = torch.where(slots < 0, kv.scratch_slot, slots)
        if width == 1:
            return Batch(plan, tokens[:, 0], starts, slots, context, Grid.of_single_tokens(rows, asked.device))
        first = counts.cumsum(0) - counts
        steps = torch.minimum(torch.arange(width, device=asked.device), counts[:, None] - 1)
        cells = first[:, None] + steps
        # Shorter rows repeat their last token: its cell is written more than once, to the same.
        place = torch.arange(rows, device=asked.device)[:, None] * width + steps
        parts = tokens.gather(1, steps), starts[:, None] + steps, slots[:, None].expand(-1, width), place
        # On the CPU the ops know the counts, and take no more tokens than these.
        total = rows * width if asked.is_cuda else int(counts.sum())
        packed = tokens.new_zeros((4, total))
        packed[2] = kv.scratch_slot
        packed[:, cells] = torch.stack(parts)
        tokens, positions, slots, place = packed
        return Batch(plan, tokens, positions, slots, context, Grid(counts, cells, place))

    def _context(self, turns: list[Turn]) -> int:
        """A bound of the tokens that a row has in memory after a step of `turns`, where that matters."""
        if has_kernel(self.memory.kv.keys):
            return self.memory.kv.capacity
        return max(turn.start + len(turn.tokens) if turn.tokens else turn.last + 2 for turn in turns)

    def _to_device(self, values) -> torch.Tensor:
        """int64, without waiting for the device."""
        device, values = self.memory.pool.device, torch.as_tensor(values, dtype=torch.int64)
        return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def _columns(*parts: torch.Tensor | None) -> torch.Tensor:
    """Those there are, side by side."""
    return torch.cat([part for part in parts if part is not None], 1)
