# SPDX-License-Identifier: Apache-2.0
"""Who runs the graphs of an engine folder."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class ExecutorError(ValueError):
    """An engine folder cannot be run here: what it needs, and what was found."""


class Outputs(NamedTuple):
    """Of a run of B rows of S tokens, undefined behind a row's tokens, valid until the executor's next run of the
    graph. logits: fp32 [B, S, vocab]; hidden: [B, S, hidden_size] in the engine's dtype."""

    logits: torch.Tensor
    hidden: torch.Tensor


class Executor(Protocol):
    """Runs graphs over a GraphMemory, in place."""

    def run(self, graph: str, row: int | None, inputs: dict[str, torch.Tensor]) -> Outputs:
        """Runs "model" or "mtp" once, in the order of the calls.

        row: None: a step of all rows; else a prompt chunk, one row, and this is the row of the KV caches that it is
        for. inputs: docs/engines.md, section 1, but for table, states and caches; int32 on the host, or on the device.
        """
