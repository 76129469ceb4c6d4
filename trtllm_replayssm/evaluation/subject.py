# SPDX-License-Identifier: Apache-2.0
"""A checkpoint under measurement, and how it decodes given rows of tokens in one configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from .. import ReplayConfig
from ..runtime.batch import Batch, Grid
from ..runtime.loader import Loader
from ..runtime.mamba_mixer import STEPS, MambaMixer
from ..runtime.memory import Memory
from ..runtime.model import Model
from ..runtime.model_config import ModelConfig
from ..runtime.row_tiles import RowTiles
from ..runtime.tokenizer import Tokenizer
from ..runtime.weights import Weights

ACTIVATIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Subject:
    """A checkpoint, loaded once for any number of decoders.

    Args:
        checkpoint: directory, see runtime.Engine.
        device: where it runs.
        dtype: "float32", "bfloat16" or "float16", of weights and activations.
    """

    def __init__(self, checkpoint: str | Path, device: torch.device, dtype: str, progress: bool = False):
        self.config = ModelConfig.read(checkpoint)
        self.tokenizer = Tokenizer(checkpoint)
        self.device, self.dtype = device, getattr(torch, dtype)
        self.activation = ACTIVATIONS[dtype]
        loader = Loader(
            self.config,
            Weights(checkpoint, self.config),
            step=STEPS["replay"],
            dtype=self.dtype,
            activation=self.dtype,
            device=device,
            tiles=RowTiles(fixed=False),
            progress=progress,
        )
        self.model = Model(loader)
        self._attention_layers = loader.attention_layers

    @property
    def mixers(self) -> list[MambaMixer]:
        """The Mamba layers, in order."""
        return [mixer for _, mixer in self.model.stack.layers if isinstance(mixer, MambaMixer)]

    def memory(self, replay: ReplayConfig, rows: int, capacity: int) -> Memory:
        """Empty memory for `rows` sequences of at most `capacity` tokens, slot r of stream r."""
        memory = Memory(
            self.config,
            replay,
            slots=rows,
            attention_layers=self._attention_layers,
            capacity=capacity,
            snapshots=False,
            dtype=self.dtype,
            device=self.device,
        )
        memory.pool.reset(list(range(rows)), streams=list(range(rows)))
        return memory


class Decoder:
    """Decodes rows of tokens, each in its own slot, all at one position. The launches of a step depend on no value, so
    that a CUDA graph can hold them.

    tokens: int64 [rows, length] on the subject's device. May be written to between steps.
    """

    def __init__(self, subject: Subject, replay: ReplayConfig, tokens: torch.Tensor):
        rows, length = tokens.shape
        self.subject, self.tokens = subject, tokens
        self.memory = subject.memory(replay, rows, length)
        self._slots = torch.arange(rows, device=tokens.device)

    def step(self, first: torch.Tensor, count: int, context: int) -> torch.Tensor:
        """Logits fp32 [rows, count, vocab] after the tokens at positions first … first + count - 1, which become part
        of the sequences.

        first: int64 [], on the device. context: attention looks at so many positions, at least first + count.
        """
        rows, device = len(self._slots), self.tokens.device
        positions = first + torch.arange(count, device=device)
        packed = torch.arange(rows * count, device=device)
        batch = Batch(
            self.memory.pool.plan(self._slots.to(torch.int32), count),
            self.tokens.index_select(1, positions).flatten(),
            positions.repeat(rows),
            self._slots.repeat_interleave(count),
            context,
            grid=Grid(torch.full_like(self._slots, count), packed.unflatten(0, (rows, count)), packed),
        )
        hidden = self.subject.model(batch, self.memory)
        self.memory.pool.commit(batch.plan)
        return self.subject.model.logits(hidden).unflatten(0, (rows, count))
