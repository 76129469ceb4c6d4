# SPDX-License-Identifier: Apache-2.0
"""Bytes of Mamba state that decoding moves, as a pool's commits count them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .. import ReplayConfig, StatePool
from ..plan import FOLDED, SNAPSHOTTED, STEPPED


@dataclass(frozen=True)
class Traffic:
    """Bytes over all Mamba layers. `records` are the inputs that ReplaySSM keeps instead of writing the state."""

    tokens: int = 0
    flushes: int = 0
    state_bytes_read: int = 0
    state_bytes_written: int = 0
    record_bytes_read: int = 0
    record_bytes_written: int = 0

    @classmethod
    def of(cls, stats: dict[str, int]) -> Traffic:
        """The part of `StatePool.stats()` that is meant here."""
        return cls(**{field.name: stats[field.name] for field in fields(cls)})

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def read_per_token(self) -> float:
        return (self.state_bytes_read + self.record_bytes_read) / max(self.tokens, 1)

    @property
    def written_per_token(self) -> float:
        return (self.state_bytes_written + self.record_bytes_written) / max(self.tokens, 1)

    @property
    def per_token(self) -> float:
        return self.read_per_token + self.written_per_token


def rehearse(pool: StatePool, config: ReplayConfig, mode: str, sequences: list[list[tuple[int, int]]]) -> Traffic:
    """What `sequences` would have moved in `mode` with ReplayConfig `config`, each given by its decode steps: tokens
    that a step brought and kept.

    The counting is the library's own: a pool of no layers goes through the same plans and commits, and its counts of
    states and records are priced at the sizes of `pool`'s layers.
    """
    cursors = StatePool(pool.geometry, config, num_slots=1, num_layers=0, device="cpu")
    conventional = FOLDED if config.max_step_tokens == 1 else SNAPSHOTTED
    use = STEPPED if mode == "replay" else conventional
    prompts = Traffic()
    for steps in sequences:
        cursors.reset([0])
        before = _priced(cursors, pool.num_layers)
        cursors.commit(cursors.plan([0], 1))  # a folded token: the prompt
        prompts += _priced(cursors, pool.num_layers) - before
        plan = None
        for brought, kept in steps:
            plan = cursors.plan([0], brought, out=plan)
            plan.use = use  # there are no layers whose ops would tell
            cursors.commit(plan, accepted=[kept])
    return _priced(cursors, pool.num_layers) - prompts


def _priced(cursors: StatePool, layers: int) -> Traffic:
    stats = cursors.stats()
    moved = cursors.layout.traffic_bytes(stats)
    return Traffic(stats["tokens"], stats["flushes"], **{name: size * layers for name, size in moved.items()})
