# SPDX-License-Identifier: Apache-2.0
"""Summaries of a quantity measured at every position of several rows. Rows are independent texts, positions of a row
are not: every interval resamples whole rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


def buckets(length: int, first: int = 16) -> list[tuple[int, int]]:
    """[0, first), [first, 2 first), … doubling up to `length`: (begin, end) of log-spaced ranges of positions."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(max(first, 2 * edges[-1]), length))
    return list(zip(edges[:-1], edges[1:], strict=True))


def interval(
    by_row: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = lambda sample: sample.mean(-1)
) -> list[float] | None:
    """[low, high]: percentile bootstrap interval of `statistic` at 95 %, resampling rows. One row has none: None.

    by_row: [rows], or [rows, k] where a row has k figures that belong together. statistic: [..., rows(, k)] -> [...].
    """
    if len(by_row) < 2:
        return None
    picked = np.random.default_rng(0).integers(len(by_row), size=(RESAMPLES, len(by_row)))
    tail = 50 * (1 - CONFIDENCE)
    return np.percentile(statistic(by_row[picked]), [tail, 100 - tail]).tolist()


def written(interval: list[float] | None, format: str) -> str:
    """For people, the numbers as `format` says."""
    return "-" if interval is None else " … ".join(f"{end:{format}}" for end in interval)


def slope(values: np.ndarray) -> np.ndarray:
    """Least-squares slope of values [rows, n] over the position, times n: the change along the range, [rows]."""
    n = values.shape[1]
    centred = np.arange(n) - (n - 1) / 2
    return values @ centred / (centred @ centred) * n
