# SPDX-License-Identifier: Apache-2.0
"""The `nemotron_h` language model: embeddings, pre-norm residual layers of four kinds, head."""

from __future__ import annotations

import torch

from .batch import Batch
from .dense import fp32_product
from .loader import Loader
from .memory import Memory


class Model:
    def __init__(self, loader: Loader):
        config, self.tiles = loader.config, loader.tiles
        self.embeddings = loader.tensor("backbone.embeddings.weight")  # [vocab, hidden]
        self.stack = loader.stack("backbone.layers.", config.layers, "backbone.norm_f")
        self.head = self.embeddings if config.tie_word_embeddings else loader.tensor("lm_head.weight")

    def __call__(self, batch: Batch, memory: Memory) -> torch.Tensor:
        """Hidden states [n, hidden] after the final norm. Appends the batch's tokens to `memory` under `batch.plan`."""
        return self.stack(self.embeddings[batch.tokens], batch, memory)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[k, hidden] -> fp32 [k, vocab], never rounded to 16 bits: near 7, bf16 numbers are 0.03 apart."""
        return self.tiles(lambda rows: fp32_product(rows, self.head), hidden)
