# SPDX-License-Identifier: Apache-2.0
"""Repeating a step along a text, on CUDA as graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..runtime.cuda_graph import no_collection

CONTEXTS = 16  # sizes of the attention context that graphs are captured for


def walk(
    step: Callable[[torch.Tensor, int], None],
    start: int,
    end: int,
    stride: int,
    device: torch.device,
    advance: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Calls step(first, context) for first = start, start + stride … below `end`.

    first: int64 [] on the device. context >= first + stride; it takes at most CONTEXTS values on CUDA, where the step
    is captured once for each. The step must launch the same work whatever the values, and read nothing on the host.
    advance(tokens): called as the device gets on.
    """
    first = torch.full((), start, dtype=torch.int64, device=device)
    if device.type != "cuda":
        for position in range(start, end, stride):
            step(first, position + stride)
            first += stride
            advance(stride)
        return
    grain = -(-end // (CONTEXTS * stride)) * stride
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        position = start
        while position < end:
            context = min(-(-(position + stride) // grain) * grain, -(-end // stride) * stride)
            # The first step of a size runs as it is: libraries set themselves up, which a capture forbids.
            step(first, context)
            first += stride
            position += stride
            left = (min(context, end) - position + stride - 1) // stride
            advance(stride)
            if left <= 0:
                continue
            graph = torch.cuda.CUDAGraph()
            with no_collection(), torch.cuda.graph(graph, stream=stream):
                step(first, context)
                first += stride
            for index in range(left):
                graph.replay()
                if index % 64 == 63 or index == left - 1:
                    stream.synchronize()
                    advance(stride * (index % 64 + 1))
            position += left * stride
    torch.cuda.current_stream(device).wait_stream(stream)
