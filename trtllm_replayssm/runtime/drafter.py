# SPDX-License-Identifier: Apache-2.0
"""Who proposes the tokens that a step verifies."""

from __future__ import annotations

import torch

from .batch import Batch
from .memory import Memory
from .sequence import Sequence


class Drafter:
    """Proposes, for each sequence, a chain of tokens that may follow its newest one.

    Whatever is proposed, the text stays what the model alone would write: a wrong draft costs time only. A drafter
    answers in `follow`, on the device, where a step's tokens are not known to the host yet, or else in `propose`.

    on_device: `follow` always answers. Then a step may be launched before the host knows the tokens of the last one.
    """

    on_device = False

    def follow(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        following: torch.Tensor,
        last: torch.Tensor,
        count: int,
        memory: Memory,
    ) -> torch.Tensor | None:
        """Looks at a forward pass of the model, prompt chunks included.

        hidden [n, hidden]: what the model made of the n tokens. following int64 [n]: the token after each of them, any
        after a rejected one. last int64 [rows]: each row's last accepted token among the n, for the rows that need
        drafts.

        Returns int64 [rows, count], or None: `propose` is to be asked.
        """
        return None

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """At most `count` tokens that may follow `sequence`."""
        return []
