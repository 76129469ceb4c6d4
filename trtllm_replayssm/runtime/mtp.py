# SPDX-License-Identifier: Apache-2.0
"""Drafts by the checkpoint's own multi-token-prediction head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from .batch import Batch, Grid, Row
from .drafter import Drafter
from .loader import Loader
from .memory import Memory
from .model import Model
from .model_config import MAMBA, CheckpointError, ModelConfig
from .weights import Weights


class MTP(Drafter):
    """From the model's hidden state after token t and token t+1, predicts token t+2.

    For a further draft its own output takes the place of the hidden state, as in Nemotron 3 Super. Its attention has a
    layer of the KV cache after the model's, where the entry of (hidden t, token t+1) stands at position t. Entries
    beyond the accepted tokens are overwritten by later ones, like those of the model.

    together: batches of one token a row launch the same work whatever the values (see Batch.on_host).
    """

    on_device = True

    def __init__(self, model: Model, loader: Loader, together: bool):
        config = loader.config
        self.model, self.tiles, self.together = model, loader.tiles, together
        first, last = "mtp.layers.0.", f"mtp.layers.{len(config.mtp_layers) - 1}."
        self.token_norm, self.hidden_norm = loader.norm(first + "enorm"), loader.norm(first + "hnorm")
        self.merge = loader.linear(first + "eh_proj")
        self.stack = loader.stack("mtp.layers.", config.mtp_layers, last + "final_layernorm")

    @staticmethod
    def require(checkpoint: str | Path, config: ModelConfig, weights: Weights) -> None:
        """CheckpointError unless the checkpoint has a head that can draft here."""
        if not weights.has_mtp:
            raise CheckpointError(
                f"{checkpoint}: speculation 'mtp' drafts with the checkpoint's mtp.* tensors, but it has none; "
                "'ngram' needs no weights"
            )
        if config.mtp_depths > 1 or MAMBA in config.mtp_layers:
            raise CheckpointError(
                f"{checkpoint}: num_nextn_predict_layers is {config.mtp_depths} and the MTP layers are "
                f"{', '.join(config.mtp_layers)}; speculation 'mtp' supports one MTP layer, without Mamba"
            )

    def __call__(self, batch: Batch, hidden: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Hidden states [n, hidden] after the final norm, from hidden [n, hidden] and the tokens that follow it."""
        merged = self.tiles(
            lambda tokens, states: self.merge(torch.cat([self.token_norm(tokens), self.hidden_norm(states)], -1)),
            self.model.embeddings[batch.tokens],
            hidden,
        )
        return self.stack(merged, batch, memory)

    def follow(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        following: torch.Tensor,
        last: torch.Tensor,
        count: int,
        memory: Memory,
    ) -> torch.Tensor:
        hidden = self(replace(batch, tokens=following), hidden, memory)[last]
        positions, slots = batch.positions[last], batch.kv_slots[last]
        context, drafts = min(batch.context + count, memory.kv.capacity), []
        while len(drafts) < count and len(last):
            if drafts:
                positions = positions + 1
                hidden = self(self._newest(drafts[-1], positions, slots, context), hidden, memory)
            drafts.append(self.model.logits(hidden).argmax(-1))
        return torch.stack(drafts, 1) if drafts else following.new_empty((len(last), count))

    def _newest(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, context: int) -> Batch:
        """One more token of each row."""
        batch = Batch(None, tokens, positions, slots, context, Grid.of_single_tokens(len(tokens), tokens.device))
        if not self.together:
            rows = zip(slots.tolist(), positions.tolist(), strict=True)
            batch.on_host = [Row(slot, position, 1) for slot, position in rows]
        return batch
