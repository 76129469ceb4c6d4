# SPDX-License-Identifier: Apache-2.0
"""Which drafts the model agrees with, and how often it does."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from .batch import Grid


def accept(tokens: torch.Tensor, chosen: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Compares drafts with what the model chooses in their place.

    tokens int64 [n], packed: each row's newest token and its drafts. chosen int64 [n]: the model's choice, by argmax or
    by sampling, after each of them.

    As long as a draft equals the choice, the choice after it stands too; the first choice that differs replaces its
    draft, and what comes later is void. The text consists of choices only, those that decoding token by token would
    make. For sampling this is rejection sampling: a draft x is accepted with its probability p(x) under the model, and
    if it is not, the token comes from p without x. Since a choice depends on (seed, position) only, the text of a seed
    stays the same too.

    Returns accepted int64 [rows], 1..count: how many of a row's tokens stand, and how many new ones it gets; and the
    choices int64 [rows, width], of which the first `accepted` are these new tokens.
    """
    choices, width = chosen[grid.cells], grid.cells.shape[1]
    is_draft = torch.arange(1, width, device=tokens.device) < grid.counts[:, None]
    right = (choices[:, :-1] == tokens[grid.cells[:, 1:]]) & is_draft
    return 1 + right.long().cumprod(1).sum(1), choices


@dataclass(frozen=True)
class Acceptance:
    """Decode steps of sequences, and how their drafts fared. Tokens accepted after a text's end count too.

    steps: of which `verified` had drafts. drafts, accepted: how many drafts the steps had, and how many stood.
    """

    steps: int = 0
    verified: int = 0
    drafts: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, steps: list[tuple[int, int]]) -> Acceptance:
        """steps: tokens that each step of a sequence brought (1 + drafts) and kept."""
        return cls(
            steps=len(steps),
            verified=sum(brought > 1 for brought, _ in steps),
            drafts=sum(brought - 1 for brought, _ in steps),
            accepted=sum(kept - 1 for _, kept in steps),
        )

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.accepted / max(self.steps, 1)

    @property
    def length(self) -> float:
        """Mean tokens that a step with drafts gives, the model's own included."""
        return 1 + self.accepted / max(self.verified, 1)

    @property
    def rate(self) -> float:
        """Share of the drafts that were accepted."""
        return self.accepted / max(self.drafts, 1)
