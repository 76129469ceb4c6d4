# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: a step's launches are recorded once and then cost one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch


def padded(n: int, limit: int) -> int:
    """The least power of two >= n, at most `limit`: few shapes, each at most twice too large."""
    return min(1 << (n - 1).bit_length(), limit)


class DecodeGraphs:
    """One graph per padded number of rows and padded context, captured at first use.

    The graph reads its inputs from one buffer and everything else (ring positions, flush decisions) from the pool on
    the device: captured once, it is valid for every later step. Padded rows have slot -1 and touch nothing.

    decode(inputs, context): the step to record; inputs int64 [3, rows] (token, slot, position) -> logits [rows, vocab].
    """

    def __init__(
        self, decode: Callable[[torch.Tensor, int], torch.Tensor], max_rows: int, max_context: int, device: torch.device
    ):
        self._decode, self._max_rows, self._max_context, self._device = decode, max_rows, max_context, device
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, inputs: torch.Tensor, context: int) -> torch.Tensor:
        """inputs: pinned host tensor. Returns logits that are valid until the next call."""
        rows = inputs.shape[1]
        key = padded(rows, self._max_rows), padded(context, self._max_context)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, buffer, logits = self._graphs[key]
        buffer[1, rows:].fill_(-1)
        buffer[:, :rows].copy_(inputs, non_blocking=True)
        graph.replay()
        return logits[:rows]

    def _capture(self, rows: int, context: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        buffer = torch.zeros((3, rows), dtype=torch.int64, device=self._device)
        buffer[1] = -1
        # Libraries set themselves up at their first call, which a capture forbids. All rows are padded: nothing is
        # touched.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._decode(buffer, context)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._decode(buffer, context)
        return graph, buffer, logits
