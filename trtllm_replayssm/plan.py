# SPDX-License-Identifier: Apache-2.0
"""What one step does: which slots, how many tokens each, which rows flush."""

import torch

from . import _core

STEPPED, FOLDED, SNAPSHOTTED = "stepped", "folded", "snapshotted"
USE_CODES = {STEPPED: _core.STEPPED, FOLDED: _core.FOLDED, SNAPSHOTTED: _core.SNAPSHOTTED}


class Plan:
    """The plan of one step, made by `StatePool.plan` and ended by `commit` or `abandon`.

    Args:
        pool, rows: the attributes.
        memory: uint8 on the pool's device for its buffer, at least `_core.plan_bytes(rows)`. Plans of which no two are
            outstanding at once may share it. None: its own.

    Attributes:
        pool: the pool that made it.
        rows: number of rows, padded ones included.
        buffer: uint8 on the pool's device: what the layer ops read. Its address lasts as long as the plan object, so
            that a CUDA graph can hold it; `pool.plan(..., out=plan)` plans the next step into it.
        counts: tokens of each row where the host knows them, else None.
        num_tokens: their sum, rows of the packed token tensors; None where `counts` is.
        max_count: the largest of them, or where only the device knows them the bound that `StatePool.plan` was given;
            None without one.
        use: what consumes the plan: "stepped" (ops.step), "folded" (ops.prefill, ops.conventional_step), "snapshotted"
            (ops.conventional_verify), or None before the first of these. It stays when the plan is reused through
            `out=`: a captured graph repeats the same ops.
        done: layers in which that op has run since the plan was made. Running it twice would fold or append twice.
        recorded: layers whose convolution has stored x and B as records since then.
        open: planned and neither committed nor abandoned.
    """

    __slots__ = ("pool", "rows", "buffer", "counts", "num_tokens", "max_count", "use", "done", "recorded", "open")

    def __init__(self, pool, rows: int, memory: torch.Tensor | None = None):
        self.pool = pool
        self.rows = rows
        bytes_needed = _core.plan_bytes(rows)
        if memory is None:
            memory = torch.empty(bytes_needed, dtype=torch.uint8, device=pool.device)
        self.buffer = memory[:bytes_needed]
        self.counts: list[int] | None = None
        self.num_tokens: int | None = None
        self.max_count: int | None = None
        self.use: str | None = None
        self.done: set[int] = set()
        self.recorded: set[int] = set()
        self.open = False

    def begin(self, counts: list[int] | None, most: int | None = None):
        """A new step was planned, of these token counts: one int a row, or None if only the device knows them, `most`
        at most.
        """
        self.open = True
        self.done.clear()
        self.recorded.clear()
        self.counts = counts
        self.num_tokens = None if counts is None else sum(counts)
        self.max_count = most if counts is None else max(counts, default=0)

    def require_open(self, pool):
        """ValueError unless this is an outstanding plan of `pool`."""
        if self.pool is not pool:
            raise ValueError("plan: expected a plan of this pool, got one of another pool")
        if not self.open:
            raise ValueError("plan: expected an outstanding plan, got one that was committed, abandoned or never made")

    def note_use(self, use: str, layer: int):
        """An op of this kind has run in a layer."""
        self.use = use
        self.done.add(layer)

    def require_use(self, use: str):
        """ValueError if something else already consumes the plan."""
        if self.use not in (None, use):
            raise ValueError(f"plan: expected one that is not {self.use} yet, got one for an op of {use} plans")
