# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint's tensors to layers."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from tqdm import tqdm

from .attention import Attention
from .batch import Batch
from .dense import Linear, RMSNorm, RowParallel
from .mamba_mixer import MambaMixer
from .memory import Memory
from .mlp import MLP
from .model_config import ATTENTION, MAMBA, MOE, ModelConfig
from .model_config import MLP as MLP_LAYER
from .moe import MoE, Router
from .row_tiles import RowTiles
from .tensor_parallel import TensorParallel
from .weights import Weights


class Stack:
    """Pre-norm residual layers and the norm after the last one. layers: (norm, mixer) pairs."""

    def __init__(self, layers: list[tuple[RMSNorm, Callable]], final_norm: RMSNorm):
        self.layers, self.final_norm = layers, final_norm

    def __call__(self, x: torch.Tensor, batch: Batch, memory: Memory) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]. Appends the batch's tokens to `memory`.

        The sum of the layers is kept in fp32, whatever the checkpoint's `residual_in_fp32` says: it costs next to
        nothing, and in 16 bits every layer's output would be rounded to the spacing of the whole sum.
        """
        total, newest = x.to(torch.float32, copy=True), None
        for norm, mixer in self.layers:
            newest = mixer(norm(total, newest), batch, memory, total)
        return self.final_norm(total, newest)


class Loader:
    """Builds layers by the names of their tensors: in `dtype` on `device`, but for the router and A_log, D, dt_bias
    (fp32). `activation`: dtype between the dense layers, `dtype` or fp32. `step`: one of mamba_mixer.STEPS. Layers that
    keep something in Memory are numbered in the order of loading. `parallel`: loads a rank's part; `config` is its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        step: Callable,
        dtype: torch.dtype,
        activation: torch.dtype,
        device: torch.device,
        tiles: RowTiles,
        parallel: TensorParallel | None = None,
        progress: bool = False,
    ):
        self.config, self.tiles, self._parallel = config, tiles, parallel
        self._weights, self._step, self._device, self._progress = weights, step, device, progress
        self._dtype, self._activation = dtype, activation
        self.mamba_layers = self.attention_layers = 0  # loaded so far

    def stack(self, prefix: str, kinds: tuple[str, ...], final_norm: str) -> Stack:
        """The layers `prefix`0, `prefix`1 … of these kinds."""
        build = {MAMBA: self._mamba, ATTENTION: self._attention, MLP_LAYER: self._mlp, MOE: self._moe}
        shown = tqdm(kinds, desc="loading layers", file=sys.stderr, disable=not self._progress, leave=False)
        names = (f"{prefix}{index}." for index in range(len(kinds)))
        layers = [
            (self.norm(name + "norm"), build[kind](name + "mixer.")) for name, kind in zip(names, shown, strict=True)
        ]
        return Stack(layers, self.norm(final_norm))

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self._dtype
        if self._parallel:
            return self._parallel.read(self._weights, name, dtype, self._device)
        return self._weights.read(name, dtype, self._device)

    def linear(self, name: str, bias: bool = False) -> Linear:
        return Linear(self.tensor(name + ".weight"), self.tensor(name + ".bias") if bias else None)

    def row_parallel(self, name: str, bias: bool = False) -> Linear | RowParallel:
        """One of tensor_parallel.ROW_PARALLEL."""
        linear = self.linear(name, bias)
        return RowParallel(linear.weight, linear.bias, self._parallel.all_reduce) if self._parallel else linear

    def norm(self, name: str, groups: int = 1) -> RMSNorm:
        return RMSNorm(self.tensor(name + ".weight"), self.config.norm_eps, groups, self._activation)

    def _mamba(self, name: str) -> MambaMixer:
        config = self.config
        self.mamba_layers += 1
        return MambaMixer(
            self.mamba_layers - 1,
            self._step,
            in_proj=self.linear(name + "in_proj", config.mamba_bias),
            conv_weight=self.tensor(name + "conv1d.weight").squeeze(1),
            conv_bias=self.tensor(name + "conv1d.bias") if config.conv_bias else None,
            A_log=self.tensor(name + "A_log", torch.float32),
            D=self.tensor(name + "D", torch.float32),
            dt_bias=self.tensor(name + "dt_bias", torch.float32),
            dt_limit=config.time_step_limit,
            norm=self.norm(name + "norm", config.mamba_groups),
            out_proj=self.row_parallel(name + "out_proj", config.mamba_bias),
            tiles=self.tiles,
        )

    def _attention(self, name: str) -> Attention:
        qkv = torch.cat([self.tensor(f"{name}{proj}_proj.weight") for proj in "qkv"])
        o = self.row_parallel(name + "o_proj")
        self.attention_layers += 1
        return Attention(self.attention_layers - 1, Linear(qkv, None), o, self.config.head_dim, self.tiles)

    def _mlp(self, name: str) -> MLP:
        bias = self.config.mlp_bias
        return MLP(self.linear(name + "up_proj", bias), self.row_parallel(name + "down_proj", bias), self.tiles)

    def _moe(self, name: str) -> MoE:
        config = self.config
        router = Router(
            self.tensor(name + "gate.weight", torch.float32),
            self.tensor(name + "gate.e_score_correction_bias", torch.float32),
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
            up[expert] = self.tensor(f"{name}experts.{expert}.up_proj.weight")
            down[expert] = self.tensor(f"{name}experts.{expert}.down_proj.weight").T
        to_latent = from_latent = None
        if config.latent_size:
            to_latent = self.linear(name + "fc1_latent_proj", config.mlp_bias)
            from_latent = self.linear(name + "fc2_latent_proj", config.mlp_bias)
        all_reduce = self._parallel.all_reduce if self._parallel else None
        shared = self._mlp(name + "shared_experts.")
        return MoE(router, up, down, shared, to_latent, from_latent, all_reduce, self.tiles)
