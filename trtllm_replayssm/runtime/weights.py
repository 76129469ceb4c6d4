# SPDX-License-Identifier: Apache-2.0
"""Safetensors weights of a `nemotron_h` checkpoint: names and shapes checked first, then read one by one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .model_config import ATTENTION, MAMBA, MLP, MOE, CheckpointError, ModelConfig
from .quantization import (
    BLOCK,
    FORMATS,
    NVFP4,
    PLAIN,
    Nvfp4,
    dequantize,
    input_scale,
    read_lists,
    scale_tensors,
    seems_swizzled,
    spoilt,
)

Shapes = dict[str, tuple[int, ...]]

DTYPES = ("F32", "BF16", "F16")  # of tensors that are not quantised
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}
_MOST_MAPPED = 2**28


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

    Linears and embeddings may be quantised as Model Optimizer exports them (quantization.py): `read` gives the values.

    Construction opens every file and checks every name, shape and dtype against `config`, so that a checkpoint that
    cannot be loaded is refused before anything is read or allocated. Scales are checked when they are read. Raises
    CheckpointError naming file and tensor.

    The head for multi-token prediction must be complete where there is one; it may be absent altogether (transformers
    drops it on saving). `has_mtp` says which.

    Memory: what is read stays in memory as long as the caller keeps it, and at most _MOST_MAPPED bytes besides.

    Args:
        allow: modules, or globs of them, whose tensors count although the lists in the JSON files contradict them, or
            although the order of their scales seems wrong.

    Attributes:
        names: of all tensors that are no scales.
        quantized: weight -> "NVFP4" or "FP8", of those that are.
        kv_scales: scales of an FP8 KV cache, which nothing here has.
    """

    def __init__(self, checkpoint: str | Path, config: ModelConfig, allow: Sequence[str] = ()):
        self.checkpoint = Path(checkpoint)
        self._allow = tuple(allow)
        self._files: dict[Path, safe_open] = {}
        self._file_of: dict[str, Path] = {}
        self._mapped = 0
        for path in _weight_files(self.checkpoint):
            self._open(path)
        expected = expected_tensors(config)
        self.has_mtp = any(name.startswith("mtp.") for name in self._file_of)
        if self.has_mtp:
            expected |= mtp_tensors(config)
        self.names = list(expected)
        self.quantized: dict[str, str] = {}
        self._check(expected)
        self._check_lists(expected)

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The values of tensor `name` in `dtype` on `device`."""
        stored = self.stored(name)
        if name not in self.quantized:
            return stored.to(device=device, dtype=dtype)
        scale = self._scale(name + "_scale")
        scale_2 = self._scale(name + "_scale_2") if self.quantized[name] == NVFP4 else None
        return dequantize(stored, scale, scale_2, dtype).to(device)

    def stored(self, name: str) -> torch.Tensor:
        """Tensor `name` (scales are tensors too) as the file has it, on the CPU. Do not write to it."""
        return self._mapping(name, lambda file: file.get_tensor(name))

    def slice(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        """As `stored`, of the elements start..stop-1 along dimension `axis`, 0 or 1; the others are not read."""
        part = slice(start, stop) if axis == 0 else (slice(None), slice(start, stop))
        return self._mapping(name, lambda file: file.get_slice(name)[part])

    def _mapping(self, name: str, read: Callable[[safe_open], torch.Tensor]) -> torch.Tensor:
        path = self._file_of[name]
        try:
            if self._mapped > _MOST_MAPPED:
                self._mapped = 0
                for opened in self._files:  # pages of a mapped file count as ours until it is closed
                    self._files[opened] = safe_open(opened, framework="pt")
            tensor = read(self._files[path])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name!r} cannot be read: {error}") from None
        self._mapped += tensor.nbytes
        return tensor

    def nvfp4(self, name: str) -> Nvfp4 | None:
        """The linear whose weight has this name if both its weights and its activations are NVFP4, else None."""
        given = input_scale(name)
        if self.quantized.get(name) != NVFP4 or given not in self._file_of:
            return None
        scales = (self._scale(part) for part in (name + "_scale", name + "_scale_2", given))
        return Nvfp4(self.stored(name), *scales)

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor; scales are tensors too."""
        return name in self._file_of

    def tensors(self, name: str) -> list[str]:
        """`name` and its scales, those of activations included."""
        parts = (name, name + "_scale", name + "_scale_2", input_scale(name))
        return [part for part in parts if part in self._file_of] if name in self.quantized else [name]

    def stored_bytes(self, name: str) -> int:
        """Of a tensor and its scales."""
        return sum(
            math.prod(header.get_shape()) * _ITEM_BYTES[header.get_dtype()]
            for header in map(self._header, self.tensors(name))
        )

    def dtype(self, name: str) -> str:
        """Of a tensor in the file: "BF16", "F32", "U8" …."""
        return self._header(name).get_dtype()

    def check_scales(self) -> None:
        """Reads the scales of all quantised weights and of the KV cache. CheckpointError at the first that is wrong."""
        for name in self.quantized:
            for part in self.tensors(name)[1:]:
                self._scale(part)
        for name in self.kv_scales:
            self._scale(name)

    def _header(self, name: str):
        return self._files[self._file_of[name]].get_slice(name)

    def _scale(self, name: str) -> torch.Tensor:
        scale = self.stored(name)
        if fault := spoilt(scale):
            raise CheckpointError(
                f"{self._file_of[name]}: scale {name!r} is spoilt: {fault}, expected positive numbers"
            )
        module = name.removesuffix(".weight_scale")
        if scale.dim() == 2 and not self._allowed(module) and seems_swizzled(scale):
            raise CheckpointError(
                f"{self._file_of[name]}: scale {name!r} seems to be swizzled in tiles of 128 x 4, expected rows; "
                f"--allow {module} takes it as rows"
            )
        return scale

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

    def _check(self, expected: Shapes) -> None:
        """Names, shapes and dtypes. Notes which weights are quantised."""
        accepted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        self.kv_scales = [
            scale
            for name in expected
            if (found := re.fullmatch(r"(.*\.)([kv])_proj\.weight", name))
            and (scale := f"{found[1]}{found[2]}_proj.{found[2]}_scale") in self._file_of
        ]
        optional = dict.fromkeys(self.kv_scales)
        for name, shape in expected.items():
            accepted[name] = shape, DTYPES
            if name not in self._file_of or len(shape) != 2 or (kind := FORMATS.get(self.dtype(name))) is None:
                continue
            self.quantized[name] = kind
            if kind == NVFP4 and shape[1] % BLOCK:
                raise CheckpointError(
                    f"{self._file_of[name]}: NVFP4 tensor {name!r} has {shape[1]} columns, no multiple of {BLOCK}"
                )
            accepted[name] = (shape[0], shape[1] // 2) if kind == NVFP4 else shape, (self.dtype(name),)
            accepted |= scale_tensors(name, kind, shape)
            optional[input_scale(name)] = None
        accepted |= {name: ((), ("F32",)) for name in optional if name in self._file_of}
        if missing := [name for name in accepted if name not in self._file_of]:
            raise CheckpointError(
                f"{self._home(missing[0])}: tensor {missing[0]!r} is missing{_and_more(missing)}, "
                f"expected shape {list(accepted[missing[0]][0])}"
            )
        if extra := [name for name in self._file_of if name not in accepted]:
            raise CheckpointError(
                f"{self._file_of[extra[0]]}: tensor {extra[0]!r} is unknown{_and_more(extra)}; {self._why(extra[0])}"
            )
        for name, (shape, dtypes) in accepted.items():
            header = self._header(name)
            if (given := tuple(header.get_shape())) != shape:
                raise CheckpointError(
                    f"{self._file_of[name]}: tensor {name!r} has shape {list(given)}, expected {list(shape)}"
                    f"{_reminder(name, given, shape)}"
                )
            if header.get_dtype() not in dtypes:
                raise CheckpointError(
                    f"{self._file_of[name]}: tensor {name!r} has dtype {header.get_dtype()}, "
                    f"expected one of {', '.join(dtypes)}"
                )

    def _home(self, name: str) -> Path:
        """The file where a missing tensor should be: that of its weight, if it is a scale."""
        return self._file_of.get(re.sub(r"_scale(_2)?$", "", name), self.checkpoint)

    def _why(self, extra: str) -> str:
        """Why nothing accounts for a tensor."""
        weight = re.sub(r"weight_scale(_2)?$|input_scale$", "weight", extra)
        if weight != extra and weight in self._file_of:
            return f"{weight!r} is {self.dtype(weight)}, which has no such scale"
        return "config.json does not account for it"

    def _check_lists(self, expected: Shapes) -> None:
        """Compares the tensors with what the JSON files say of them."""
        linears = {
            name.removesuffix(".weight"): self.quantized.get(name, PLAIN)
            for name, shape in expected.items()
            if len(shape) == 2 and (name != "backbone.embeddings.weight" or name in self.quantized)
        }
        contradictions = []
        for lists in read_lists(self.checkpoint):
            for module, format in linears.items():
                if (claim := lists.claim(module)) != format and not self._allowed(module):
                    dtype = self.dtype(module + ".weight")
                    contradictions.append(
                        f"{lists.path}: says that {module!r} is {claim}, but {module + '.weight'!r} in "
                        f"{self._file_of[module + '.weight'].name} is {dtype} ({format})"
                    )
        if contradictions:
            raise CheckpointError(
                f"{contradictions[0]}{_and_more(contradictions)}; --allow MODULE takes the tensors' word"
            )

    def _allowed(self, module: str) -> bool:
        return any(fnmatchcase(module, pattern) for pattern in self._allow)


def _reminder(name: str, given: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """What a wrong shape reminds of."""
    if given == expected[::-1]:
        return ": it is transposed"
    if name.endswith("_scale") and len(given) == len(expected) == 2:
        if given == (expected[0], expected[1] // 2):
            return ": it is half as large"
        if given == (-(-expected[0] // 128) * 128, -(-expected[1] // 4) * 4):
            return ": it is padded to tiles of 128 x 4, as swizzled scales are"
    return ""


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
