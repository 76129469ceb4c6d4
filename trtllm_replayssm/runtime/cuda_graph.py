# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: a step's launches are recorded once and then cost two launches, around sampling."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager

import torch

from .frontier import HEADER


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
        self._asked = torch.zeros((rows, HEADER + width), dtype=torch.int64, device=device)
        self._asked[:, 0] = -1
        self._chosen = torch.zeros(rows * width, dtype=torch.int64, device=device)

        def begin():
            batch = make_batch(self._asked, context)
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
                self.batch, self._hidden, self._logits = begin()  # in memory that another capture must not reuse
            with torch.cuda.graph(self._settle, pool=pool):
                self._outcomes = settle(self.batch, self._hidden, self._chosen, drafts)

    def verify(self, asked: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [rows * width, vocab]. asked: frontier.asked for `rows` and `width`."""
        self._asked.copy_(asked)
        self._verify.replay()
        return self._logits

    def settle(self, chosen: torch.Tensor) -> torch.Tensor:
        """int64 [rows, 2 + width + drafts], see Runner.settle. chosen int64 [rows * width]: the choices after them."""
        self._chosen.copy_(chosen)
        self._settle.replay()
        return self._outcomes
