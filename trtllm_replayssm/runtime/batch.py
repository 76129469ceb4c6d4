# SPDX-License-Identifier: Apache-2.0
"""What one forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import Plan


@dataclass(frozen=True)
class Row:
    """One sequence's share of a batch, known to the host: `count` new tokens after `start` cached ones, in `slot`."""

    slot: int
    start: int
    count: int


@dataclass
class Batch:
    """The new tokens of some sequences, packed row after row in the order of `plan`.

    tokens, positions, kv_slots: int64 [n] on the device: id, position in its sequence, and KV slot of each token.
    is_prompt: prompt chunks (any number of tokens a row) rather than decode steps (one token a row).
    on_host: the rows, where layers may depend on them. None: the batch is one decode step whose layers launch the same
        work whatever the values, reading the first `context` KV positions of every row (so that a CUDA graph can hold
        it).
    wanted: int64 [k] on the device: which of the n tokens need logits. None: all.
    """

    plan: Plan
    tokens: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    is_prompt: bool
    on_host: list[Row] | None = None
    context: int | None = None
    wanted: torch.Tensor | None = None
