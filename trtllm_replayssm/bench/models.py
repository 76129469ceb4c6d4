# SPDX-License-Identifier: Apache-2.0
"""Models to measure: of known sizes with random weights, or checkpoints."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import torch

from .. import ReplayConfig, SlotLayout
from ..operators import ACTIVATIONS
from ..runtime.loader import Loader
from ..runtime.mamba_mixer import STEPS
from ..runtime.memory import Memory
from ..runtime.model import Model
from ..runtime.model_config import ATTENTION, MAMBA, MLP, MOE, ModelConfig
from ..runtime.row_tiles import RowTiles
from ..runtime.weights import Weights, expected_tensors, mtp_tensors

_LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}


def _layers(pattern: str) -> tuple[str, ...]:
    return tuple(_LETTERS[letter] for letter in pattern)


_COMMON = dict(
    mtp_layers=(),
    mtp_depths=0,
    norm_eps=1e-5,
    tie_word_embeddings=False,
    stop_tokens=(),
    dtype="bfloat16",
    state_dim=128,
    conv_kernel=4,
    conv_bias=True,
    mamba_bias=False,
    time_step_limit=(0.0, math.inf),
)
MODELS = {
    # NVIDIA-Nemotron-3-Nano-4B: 21 Mamba, 17 MLP and 4 attention layers
    "nano4b": ModelConfig(
        vocab_size=131072,
        hidden_size=3136,
        layers=_layers("M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"),
        max_position_embeddings=262144,
        mamba_heads=96,
        mamba_head_dim=80,
        mamba_groups=8,
        attention_heads=40,
        kv_heads=8,
        head_dim=128,
        intermediate_size=12544,
        **_COMMON,
    ),
    # Every kind of layer, for a look at the command on a CPU
    "tiny": ModelConfig(
        vocab_size=512,
        hidden_size=64,
        layers=_layers("M-M*ME"),
        max_position_embeddings=4096,
        mamba_heads=4,
        mamba_head_dim=32,
        mamba_groups=2,
        attention_heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        experts=4,
        experts_per_token=2,
        expert_size=32,
        shared_expert_size=64,
        **_COMMON,
    ),
}


class RandomWeights:
    """Tensors of a model's shapes with plausible random values, made on the device when asked for and kept: whoever
    asks again gets the same memory. In the place of runtime.weights.Weights.
    """

    def __init__(self, config: ModelConfig):
        self.has_mtp = bool(config.mtp_layers)
        self._shapes = expected_tensors(config) | mtp_tensors(config)
        self._made: dict[tuple, torch.Tensor] = {}

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Tensor `name` in `dtype` on `device`; its values depend on the name only."""
        key = name, dtype, device
        if key not in self._made:
            shape = self._shapes[name]
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            if name.endswith("A_log"):
                values = torch.rand(shape, generator=generator, device=device) * math.log(16)
            else:
                values = torch.randn(shape, generator=generator, device=device)
                if name.endswith("dt_bias"):
                    values -= 3
                elif name.endswith("e_score_correction_bias"):
                    values *= 0.1
                elif len(shape) == 1:
                    values = 1 + 0.1 * values
                elif not name.endswith("embeddings.weight"):
                    values *= shape[-1] ** -0.5
            self._made[key] = values.to(dtype)
        return self._made[key]


class Subject:
    """A model under measurement: its weights once, and as many ways of decoding and memories as are asked for.

    Args:
        name: of MODELS, or a checkpoint directory.
        device, dtype: where and in what it runs; dtype "float32", "bfloat16" or "float16".
    """

    def __init__(self, name: str, device: torch.device, dtype: str):
        self.device, self.dtype = device, getattr(torch, dtype)
        self.is_random = name in MODELS
        if self.is_random:
            self.name, self.config = name, MODELS[name]
            self._weights = RandomWeights(self.config)
        elif Path(name).is_dir():
            self.name, self.config = Path(name).resolve().name, ModelConfig.read(name)
            self._weights = _Kept(Weights(name, self.config))
        else:
            raise ValueError(f"model is {name!r}, expected {', '.join(MODELS)} or a checkpoint directory")
        self.has_mtp = self._weights.has_mtp

    def model(self, way: str) -> tuple[Model, Loader]:
        """The model whose decode step treats the state in one of mamba_mixer.STEPS, and what loads more of it."""
        loader = Loader(
            self.config,
            self._weights,
            step=STEPS[way],
            dtype=self.dtype,
            activation=self.dtype,
            device=self.device,
            tiles=RowTiles(fixed=False),
        )
        return Model(loader), loader

    def replay_config(
        self, window: int | None, step_tokens: int, checkpoint: str = "fp32", read_copy: str = "none"
    ) -> ReplayConfig:
        """With a number for the window; None: the one that costs least."""
        activation = next(name for name, dtype in ACTIVATIONS.items() if dtype == self.dtype)
        config = ReplayConfig(window or "auto", step_tokens, checkpoint, read_copy, activation)
        return SlotLayout(self.config.geometry, config).config

    def memory(self, replay: ReplayConfig, attention_layers: int, slots: int, capacity: int, snapshots: bool) -> Memory:
        """Empty memory of `slots` sequences of up to `capacity` tokens."""
        return Memory(
            self.config,
            replay,
            slots=slots,
            attention_layers=attention_layers,
            capacity=capacity,
            snapshots=snapshots,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def weight_bytes(self) -> int:
        """Of all weights in the model's dtype."""
        shapes = expected_tensors(self.config) | (mtp_tensors(self.config) if self.has_mtp else {})
        return sum(math.prod(shape) for shape in shapes.values()) * self.dtype.itemsize


class _Kept:
    """A checkpoint's tensors, each read once."""

    def __init__(self, weights: Weights):
        self.has_mtp, self._weights = weights.has_mtp, weights
        self._read: dict[tuple, torch.Tensor] = {}

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = name, dtype, device
        if key not in self._read:
            self._read[key] = self._weights.read(name, dtype, device)
        return self._read[key]
