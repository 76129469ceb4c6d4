# SPDX-License-Identifier: Apache-2.0
"""window="auto": the window whose steps cost least, by the bytes of state and records that they move.

A longer window writes the state less often and reads more records. Per layer and row a step reads its h records and
what steps read (the read copy, or the checkpoint), and writes its T = max_step_tokens records; a step that flushes
(h > 0 and h + T > L) instead reads the checkpoint and writes checkpoint and copy; where there is a copy, its bytes
count twice, for rounding and casting take longer than they do. h is a Markov chain: a step adds the accepted tokens,
taken as 1..T with equal chances, and a flush starts it anew. The model averages over the chain's stationary
distribution. It does not know the arithmetic that grows with L: windows beyond 32, which it would prefer for long
steps, are left to the caller.
"""

import numpy as np

from . import _core
from .config import LONGEST_AUTO, ReplayConfig
from .geometry import MambaGeometry

CANDIDATES = range(8, LONGEST_AUTO + 1, 8)
CAST = 2  # as often a flush that casts counts: times of an H200 by window fit one to three (docs/performance-log.md)


def resolve(geometry: MambaGeometry, config: ReplayConfig) -> ReplayConfig:
    """`config` with a number for its window."""
    if config.window != "auto":
        return config
    fitting = [config.with_window(window) for window in CANDIDATES if window >= 2 * config.max_step_tokens]
    return min(fitting, key=lambda candidate: step_cost(geometry, candidate))


def step_cost(geometry: MambaGeometry, config: ReplayConfig) -> float:
    """Bytes of state and records that a step moves on average, per layer and row, those of a flush that casts times
    CAST."""
    layout = _core.Layout(geometry.core, config.core)
    (_, checkpoint), (_, copy) = layout.checkpoint, layout.read_copy
    record = sum(size for _, size in (layout.x_ring, layout.b_ring, layout.delta_ring)) / layout.ring_rows
    longest, step = config.window, config.max_step_tokens
    moved = np.empty(longest + 1)
    chain = np.zeros((longest + 1, longest + 1))
    fold = (2 * checkpoint + copy) * (CAST if copy else 1)
    for history in range(longest + 1):
        flush = history > 0 and history + step > longest
        moved[history] = (history + step) * record + (fold if flush else copy or checkpoint)
        kept = 0 if flush else history
        chain[history, kept + 1 : kept + step + 1] = 1 / step
    # The stationary distribution p: p = p chain, sum p = 1.
    equations = np.vstack([chain.T - np.eye(longest + 1), np.ones(longest + 1)])
    frequency = np.linalg.lstsq(equations, np.eye(longest + 2)[-1], rcond=None)[0]
    return float(frequency @ moved)
