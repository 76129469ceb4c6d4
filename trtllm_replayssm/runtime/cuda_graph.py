# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: a step's launches are recorded once and then cost two launches, around sampling."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager

import torch


def padded(n: int, limit: int) -> int:
    """The least power of two >= n, at most `limit`: few shapes, each at most twice too large."""
    return min(1 << (n - 1).bit_length(), limit)


@contextmanager
def no_collection():
    """Keeps Python from freeing the graphs of another, forgotten engine during a capture: CUDA forbids it there."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepGraphs:
    """One StepGraph per padded number of rows, tokens a row, drafts to propose, and context, captured at first use.

    make_batch, verify, settle: see Runner. limits: most rows, tokens a row, and context.
    """

    def __init__(
        self,
        make_batch: Callable,
        verify: Callable,
        settle: Callable,
        limits: tuple[int, int, int],
        device: torch.device,
    ):
        self._parts = make_batch, verify, settle
        self._limits, self._device = limits, device
        self.captured: dict[tuple[int, int, int, int], StepGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, rows: int, width: int, drafts: int, context: int) -> StepGraph:
        max_rows, max_width, max_context = self._limits
        key = (
            padded(rows, max_rows),
            padded(width, max_width),
            padded(drafts + 1, max_width) - 1,
            padded(context, max_context),
        )
        if key not in self.captured:
            self.captured[key] = StepGraph(*self._parts, *key, self._device, self._pool)
        return self.captured[key]


class StepGraph:
    """A decode step of `rows` rows of up to `width` tokens.

    The graph reads its inputs from its own buffers and everything else (ring positions, flush decisions) from the pool
    on the device: captured once, it is valid for every later step. Padded rows have slot -1 and touch nothing. Results
    are valid until the next call of any graph.
    """

    def __init__(
        self,
        make_batch: Callable,
        verify: Callable,
        settle: Callable,
        rows: int,
        width: int,
        drafts: int,
        context: int,
        device: torch.device,
        pool: tuple,
    ):
        self.rows, self.width = rows, width
        self._per_token = torch.zeros((4, rows * width), dtype=torch.int64, device=device)
        self._per_row = torch.ones((2, rows), dtype=torch.int64, device=device)
        self._per_token[2], self._per_row[0] = -1, -1
        self._chosen = torch.zeros(rows * width, dtype=torch.int64, device=device)

        def begin():
            batch = make_batch(self._per_token, self._per_row, width, context)
            return batch, *verify(batch)

        # Libraries set themselves up at their first call, which a capture forbids. All rows are padded: nothing is
        # touched.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            batch, hidden, _ = begin()
            settle(batch, hidden, self._chosen, drafts)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._verify, self._settle = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with no_collection():
            with torch.cuda.graph(self._verify, pool=pool):
                batch, hidden, self._logits = begin()
            with torch.cuda.graph(self._settle, pool=pool):
                self._outcomes = settle(batch, hidden, self._chosen, drafts)
        self._between = batch, hidden  # in memory that another capture must not reuse

    def verify(self, per_token: torch.Tensor, per_row: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [rows * width, vocab]. per_token, per_row: what Runner packs for `rows` and `width`."""
        self._per_token.copy_(per_token)
        self._per_row.copy_(per_row)
        self._verify.replay()
        return self._logits

    def settle(self, chosen: torch.Tensor) -> torch.Tensor:
        """int64 [rows, 1 + width + drafts], see Runner.settle. chosen int64 [n]: the choices after the real tokens."""
        self._chosen[: len(chosen)].copy_(chosen)
        self._settle.replay()
        return self._outcomes
