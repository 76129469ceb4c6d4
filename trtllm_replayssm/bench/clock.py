# SPDX-License-Identifier: Apache-2.0
"""Timing work on a device: replayed CUDA graphs between events, on the CPU plain calls."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from ..runtime.cuda_graph import no_collection

SETTLING = 1.5


def repeatable(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`work` as a captured CUDA graph, on the CPU as it is. On CUDA it runs once before, which sets libraries up."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Mean seconds of `times` calls in a row."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / times


def settle(work: Callable[[], object], times: int, device: torch.device) -> None:
    """`times` calls, on CUDA as often as it takes for the GPU to do nothing else for SETTLING seconds: whole steps draw
    more than its power limit, after a pause for a second before it lowers its clock."""
    took = seconds(work, times, device) * times
    if device.type == "cuda":
        seconds(work, times * math.ceil(SETTLING / took), device)


def spread(us: list[float]) -> dict[str, float]:
    """A record's figures of several timings in microseconds: median, least, greatest."""
    return {
        "us": round(statistics.median(us), 2),
        "us_min": round(min(us), 2),
        "us_max": round(max(us), 2),
    }


def bandwidths(device: torch.device) -> dict[str, int]:
    """Bytes a second, the best of ten: reads of a float32 sum over 4 GiB, reads and writes of a copy of 2 GiB. The CPU
    takes a 32nd of the sizes.
    """
    words = 1 << (30 if device.type == "cuda" else 25)
    data = torch.ones(words, device=device)
    source, target = data.chunk(2)
    read = min(seconds(data.sum, 1, device) for _ in range(10))
    copy = min(seconds(lambda: target.copy_(source), 1, device) for _ in range(10))
    return {"read_bandwidth": round(data.nbytes / read), "copy_bandwidth": round(2 * source.nbytes / copy)}
