# SPDX-License-Identifier: Apache-2.0
"""The `nemotron_h` language model: embeddings, pre-norm residual layers of four kinds, head."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from tqdm import tqdm

from .attention import Attention
from .batch import Batch
from .dense import Linear, RMSNorm
from .mamba_mixer import MambaMixer
from .memory import Memory
from .mlp import MLP
from .model_config import ATTENTION, MAMBA, MOE, ModelConfig
from .model_config import MLP as MLP_LAYER
from .moe import MoE, Router
from .row_tiles import RowTiles
from .weights import Weights


class Model:
    """Weights in `dtype` on `device`, but for the router and A_log, D, dt_bias (fp32). `mode`: see
    mamba_mixer.STEPS.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        mode: str,
        dtype: torch.dtype,
        device: torch.device,
        tiles: RowTiles,
        progress: bool = False,
    ):
        self.tiles = tiles
        self._config, self._mode, self._dtype, self._device = config, mode, dtype, device
        self._weights = weights
        self.embeddings = self._read("backbone.embeddings.weight")
        self.layers: list[tuple[RMSNorm, Callable]] = []
        build = {MAMBA: self._mamba, ATTENTION: self._attention, MLP_LAYER: self._mlp, MOE: self._moe}
        shown = tqdm(config.layers, desc="loading layers", file=sys.stderr, disable=not progress, leave=False)
        for index, kind in enumerate(shown):
            name = f"backbone.layers.{index}."
            same_kind_before = config.layers[:index].count(kind)
            self.layers.append((self._norm(name + "norm"), build[kind](name + "mixer.", same_kind_before)))
        self.final_norm = self._norm("backbone.norm_f")
        self.head = Linear(self.embeddings, None) if config.tie_word_embeddings else self._linear("lm_head")
        del self._weights  # closes the files

    def __call__(self, batch: Batch, memory: Memory) -> torch.Tensor:
        """Logits fp32 [k, vocab] of the wanted tokens. Appends the batch's tokens to `memory` under `batch.plan`."""
        hidden = self.embeddings[batch.tokens]
        for norm, mixer in self.layers:
            hidden = hidden + mixer(self.tiles(norm, hidden), batch, memory)
        if batch.wanted is not None:
            hidden = hidden[batch.wanted]
        return self.tiles(lambda rows: self.head(self.final_norm(rows)), hidden).float()

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._weights.read(name, dtype or self._dtype, self._device)

    def _linear(self, name: str, bias: bool = False) -> Linear:
        return Linear(self._read(name + ".weight"), self._read(name + ".bias") if bias else None)

    def _norm(self, name: str, groups: int = 1) -> RMSNorm:
        return RMSNorm(self._read(name + ".weight"), self._config.norm_eps, groups)

    def _mamba(self, name: str, layer: int) -> MambaMixer:
        config = self._config
        return MambaMixer(
            layer,
            self._mode,
            in_proj=self._linear(name + "in_proj", config.mamba_bias),
            conv_weight=self._read(name + "conv1d.weight").squeeze(1),
            conv_bias=self._read(name + "conv1d.bias") if config.conv_bias else None,
            A_log=self._read(name + "A_log", torch.float32),
            D=self._read(name + "D", torch.float32),
            dt_bias=self._read(name + "dt_bias", torch.float32),
            dt_limit=config.time_step_limit,
            norm=self._norm(name + "norm", config.mamba_groups),
            out_proj=self._linear(name + "out_proj", config.mamba_bias),
            tiles=self.tiles,
        )

    def _attention(self, name: str, layer: int) -> Attention:
        q, k, v, o = (self._linear(name + proj) for proj in ("q_proj", "k_proj", "v_proj", "o_proj"))
        return Attention(layer, q, k, v, o, self._config.head_dim, self.tiles)

    def _mlp(self, name: str, layer: int) -> MLP:
        bias = self._config.mlp_bias
        return MLP(self._linear(name + "up_proj", bias), self._linear(name + "down_proj", bias), self.tiles)

    def _moe(self, name: str, layer: int) -> MoE:
        config = self._config
        router = Router(
            self._read(name + "gate.weight", torch.float32),
            self._read(name + "gate.e_score_correction_bias", torch.float32),
            chosen=config.experts_per_token,
            groups=config.expert_groups,
            groups_chosen=config.expert_groups_per_token,
            normalize=config.normalize_expert_weights,
            scale=config.expert_scale,
        )
        width = config.latent_size or config.hidden_size
        shape = (config.experts, config.expert_size, width)
        up, down = (torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(2))
        for expert in range(config.experts):
            up[expert] = self._read(f"{name}experts.{expert}.up_proj.weight")
            down[expert] = self._read(f"{name}experts.{expert}.down_proj.weight").T
        to_latent = from_latent = None
        if config.latent_size:
            to_latent = self._linear(name + "fc1_latent_proj", config.mlp_bias)
            from_latent = self._linear(name + "fc2_latent_proj", config.mlp_bias)
        return MoE(router, up, down, self._mlp(name + "shared_experts.", layer), to_latent, from_latent, self.tiles)
