# SPDX-License-Identifier: Apache-2.0
"""How often rows flush, if a step accepts 1..T tokens, equally likely.

A flush leaves no history, so flushes are renewals, and their rate is 1 over the mean number of steps between two: m(0),
where m(h) = 1 + E[m(h + accepted)] up to h = window - T and 0 beyond. By Wald's identity m(0) is E[history at a flush]
over E[accepted], the form of docs/algorithm.md, section 6.
"""

from __future__ import annotations

import math

TOLERANCE = 0.02  # of a run's count of flushes


def moments(window: int, tokens: int) -> tuple[float, float]:
    """Mean and variance of the number of steps between two flushes of a row."""
    mean, square = [0.0] * (window + 1), [0.0] * (window + 1)
    for history in range(window - tokens, -1, -1):
        after = [history + accepted for accepted in range(1, tokens + 1)]
        onward = sum(mean[h] for h in after) / tokens
        mean[history] = 1 + onward
        square[history] = 1 + 2 * onward + sum(square[h] for h in after) / tokens
    return mean[0], square[0] - mean[0] ** 2


def flushes_per_row_and_step(window: int, tokens: int) -> float:
    return 1 / moments(window, tokens)[0]


def records_per_row_and_step(window: int, tokens: int) -> float:
    """Mean number of records that a step finds, those that it folds included."""
    reached = [1.0] + [0.0] * window
    for history in range(window - tokens + 1):
        for accepted in range(1, tokens + 1):
            reached[history + accepted] += reached[history] / tokens
    return sum(history * chance for history, chance in enumerate(reached)) / moments(window, tokens)[0]


def steps_to_count(window: int, tokens: int, batch: int) -> int:
    """Steps whose count of flushes is by chance off by the tolerance in one run of 700 (three standard deviations)."""
    mean, variance = moments(window, tokens)
    renewals = 9 * variance / (mean * TOLERANCE) ** 2
    return math.ceil(renewals * mean / batch)
