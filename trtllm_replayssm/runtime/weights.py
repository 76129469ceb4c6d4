# SPDX-License-Identifier: Apache-2.0
"""Safetensors weights of a `nemotron_h` checkpoint: names and shapes checked first, then read one by one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .model_config import ATTENTION, MAMBA, MLP, MOE, CheckpointError, ModelConfig

Shapes = dict[str, tuple[int, ...]]

DTYPES = ("F32", "BF16", "F16")


def expected_tensors(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor of the language model itself."""
    hidden = config.hidden_size
    shapes: Shapes = {"backbone.embeddings.weight": (config.vocab_size, hidden), "backbone.norm_f.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index, kind in enumerate(config.layers):
        shapes |= _layer_tensors(config, kind, f"backbone.layers.{index}.")
    return shapes


def mtp_tensors(config: ModelConfig) -> Shapes:
    """Name and shape of the tensors of the multi-token-prediction head.

    Each depth is a run of inner layers; its first one also merges the token's embedding with the hidden state, its last
    one also norms the result (the naming of Nemotron 3 Super).
    """
    hidden = config.hidden_size
    shapes: Shapes = {}
    per_depth = len(config.mtp_layers) // max(config.mtp_depths, 1)
    for index, kind in enumerate(config.mtp_layers):
        prefix = f"mtp.layers.{index}."
        shapes |= _layer_tensors(config, kind, prefix)
        if index % per_depth == 0:
            shapes |= {
                prefix + "enorm.weight": (hidden,),
                prefix + "hnorm.weight": (hidden,),
                prefix + "eh_proj.weight": (hidden, 2 * hidden),
            }
        if index % per_depth == per_depth - 1:
            shapes[prefix + "final_layernorm.weight"] = (hidden,)
    return shapes


def _layer_tensors(config: ModelConfig, kind: str, prefix: str) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {"norm.weight": (hidden,)}

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        shapes[f"mixer.{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"mixer.{name}.bias"] = (rows,)

    if kind == MAMBA:
        heads = (config.mamba_heads,)
        linear("in_proj", config.d_inner + config.conv_channels + config.mamba_heads, hidden, config.mamba_bias)
        shapes["mixer.conv1d.weight"] = (config.conv_channels, 1, config.conv_kernel)
        if config.conv_bias:
            shapes["mixer.conv1d.bias"] = (config.conv_channels,)
        shapes |= {
            "mixer.A_log": heads,
            "mixer.D": heads,
            "mixer.dt_bias": heads,
            "mixer.norm.weight": (config.d_inner,),
        }
        linear("out_proj", hidden, config.d_inner, config.mamba_bias)
    elif kind == ATTENTION:
        queries, keys = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
        for name, rows, columns in (
            ("q_proj", queries, hidden),
            ("k_proj", keys, hidden),
            ("v_proj", keys, hidden),
            ("o_proj", hidden, queries),
        ):
            linear(name, rows, columns)
    elif kind == MLP:
        linear("up_proj", config.intermediate_size, hidden, config.mlp_bias)
        linear("down_proj", hidden, config.intermediate_size, config.mlp_bias)
    elif kind == MOE:
        linear("gate", config.experts, hidden)
        shapes["mixer.gate.e_score_correction_bias"] = (config.experts,)
        width = config.latent_size or hidden
        for expert in range(config.experts):
            linear(f"experts.{expert}.up_proj", config.expert_size, width)
            linear(f"experts.{expert}.down_proj", width, config.expert_size)
        linear("shared_experts.up_proj", config.shared_expert_size, hidden, config.mlp_bias)
        linear("shared_experts.down_proj", hidden, config.shared_expert_size, config.mlp_bias)
        if config.latent_size:
            linear("fc1_latent_proj", width, hidden, config.mlp_bias)
            linear("fc2_latent_proj", hidden, width, config.mlp_bias)
    return {prefix + name: shape for name, shape in shapes.items()}


class Weights:
    """The tensors of a checkpoint directory (one `model.safetensors`, or shards with an index), read on demand.

    Construction opens every file and checks every name, shape and dtype against `config`, so that a checkpoint that
    cannot be loaded is refused before anything is read or allocated. Raises CheckpointError naming file and tensor.

    The head for multi-token prediction must be complete where there is one; it may be absent altogether (transformers
    drops it on saving). `has_mtp` says which.
    """

    def __init__(self, checkpoint: str | Path, config: ModelConfig):
        self._files: dict[Path, safe_open] = {}
        self._file_of: dict[str, Path] = {}
        for path in _weight_files(Path(checkpoint)):
            self._open(path)
        expected = expected_tensors(config)
        self.has_mtp = any(name.startswith("mtp.") for name in self._file_of)
        if self.has_mtp:
            expected |= mtp_tensors(config)
        self._check(Path(checkpoint), expected)
        self.names = list(expected)

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Tensor `name` in `dtype` on `device`."""
        path = self._file_of[name]
        try:
            return self._files[path].get_tensor(name).to(device=device, dtype=dtype)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name!r} cannot be read: {error}") from None

    def slice(self, name: str, axis: int | None, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop-1 along dimension `axis` (0 or 1) of tensor `name` as it is stored, the only ones that
        are read; axis None: the whole tensor."""
        path = self._file_of[name]
        try:
            stored = self._files[path].get_slice(name)
            return stored[:] if axis is None else stored[start:stop] if axis == 0 else stored[:, start:stop]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name!r} cannot be read: {error}") from None

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file, but the index lists it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a complete safetensors file: {error}") from None
        self._files[path] = file
        for name in file.keys():
            if name in self._file_of:
                raise CheckpointError(f"{path}: tensor {name!r} is in {self._file_of[name].name} too")
            self._file_of[name] = path

    def _check(self, checkpoint: Path, expected: Shapes) -> None:
        if missing := [name for name in expected if name not in self._file_of]:
            raise CheckpointError(
                f"{checkpoint}: tensor {missing[0]!r} is missing{_and_more(missing)}, "
                f"expected shape {list(expected[missing[0]])}"
            )
        if extra := [name for name in self._file_of if name not in expected]:
            raise CheckpointError(
                f"{self._file_of[extra[0]]}: tensor {extra[0]!r} is unknown{_and_more(extra)}; "
                "config.json does not account for it"
            )
        for name, shape in expected.items():
            header = self._files[self._file_of[name]].get_slice(name)
            if (given := tuple(header.get_shape())) != shape:
                raise CheckpointError(
                    f"{self._file_of[name]}: tensor {name!r} has shape {list(given)}, expected {list(shape)}"
                )
            if header.get_dtype() not in (accepted := self._dtypes(name)):
                raise CheckpointError(
                    f"{self._file_of[name]}: tensor {name!r} has dtype {header.get_dtype()}, "
                    f"expected one of {', '.join(accepted)}"
                )

    def _dtypes(self, name: str) -> tuple[str, ...]:
        """Dtypes that a tensor may have."""
        return DTYPES


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _weight_files(checkpoint: Path) -> list[Path]:
    index, single = checkpoint / "model.safetensors.index.json", checkpoint / "model.safetensors"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index ({type(error).__name__}: {error})") from None
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{index}: shard {name!r} is not a plain file name")
        return [checkpoint / name for name in names]
    if single.exists():
        return [single]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in checkpoint.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{checkpoint}: holds pickled weights ({pickles[0]}), which are never loaded since a pickle can "
            "run code; save the model as safetensors"
        )
    raise CheckpointError(f"{checkpoint}: neither model.safetensors nor model.safetensors.index.json is there")
