# SPDX-License-Identifier: Apache-2.0
"""Linears that NVIDIA's Model Optimizer quantised: what their tensors mean, and what its lists claim about them.

A linear L [out, in] of a unified Hugging Face export:

    NVFP4: L.weight U8 [out, in/2], two E2M1 codes a byte, the even column in the low four bits; L.weight_scale F8_E4M3
           [out, in/16], row-major; L.weight_scale_2 F32 []. weight = code · (weight_scale · weight_scale_2), in fp32
    FP8:   L.weight F8_E4M3 [out, in]; L.weight_scale F32 []
    both:  L.input_scale F32 [], if activations are quantised, too

The tensors decide. The lists (hf_quant_config.json, and quantization_config in config.json) are claims about them:
names with garbage at their ends, missing modules and formats that were never written have all been reported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ..number_formats import E2M1
from .model_config import CheckpointError

NVFP4, FP8, PLAIN = "NVFP4", "FP8", "plain"
BLOCK = 16
FORMATS = {"U8": NVFP4, "F8_E4M3": FP8}  # by the dtype of a weight
LIST_FILE = "hf_quant_config.json"

_ONE = ((), ("F32",))
_ALGORITHMS = {"NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "FP8": FP8}
_GLOB = re.compile(r"[*?[]")
_SENTINEL = re.compile(r"\.\x00.*?_name_sentinel")
_CHUNK = 2**22  # values that are expanded at a time
_TILE_ROWS, _TILE_COLUMNS = 128, 4  # of the layout in which matrix units read block scales
_DEVIATIONS, _GAIN = 20, 0.1  # of a table that seems swizzled


@dataclass(frozen=True)
class Nvfp4:
    """A W4A4 linear. codes uint8 [out, in/2]; block_scales float8_e4m3fn [out, in/16]; scale, input_scale fp32 []."""

    codes: torch.Tensor
    block_scales: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor


def scale_tensors(weight: str, kind: str, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Name -> (shape, dtypes) of the scales that a quantised weight [out, in] of this name must have."""
    if kind == FP8:
        return {f"{weight}_scale": _ONE}
    return {f"{weight}_scale": ((shape[0], shape[1] // BLOCK), ("F8_E4M3",)), f"{weight}_scale_2": _ONE}


def input_scale(weight: str) -> str:
    return weight.removesuffix("weight") + "input_scale"


def dequantize(
    stored: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The values [out, in] in `dtype` of a weight as it is stored, NVFP4 if there is a scale_2, else FP8. Products are
    fp32, as Model Optimizer's."""
    rows, columns = stored.shape
    if scale_2 is not None:
        columns *= 2
        scale = (scale.float() * scale_2)[..., None]
        table = torch.from_numpy(E2M1)
    values = torch.empty((rows, columns), dtype=dtype)
    step = max(1, _CHUNK // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        if scale_2 is None:
            values[part] = (stored[part].float() * scale).to(dtype)
        else:
            codes = torch.stack([stored[part] & 15, stored[part] >> 4], -1).int()
            blocks = table[codes].unflatten(1, (-1, BLOCK // 2)).flatten(2)
            values[part] = (blocks * scale[part]).flatten(1).to(dtype)
    return values


def spoilt(scales: torch.Tensor) -> str | None:
    """What is wrong with the values of a scale tensor; None if they are positive numbers."""
    values = scales.float()
    for what, bad in (
        ("NaN", values.isnan()),
        ("infinite", values.isinf()),
        ("zero", values == 0),
        ("negative", values < 0),
    ):
        if count := int(bad.sum()):
            return f"{count} of its {values.numel()} values {'is' if count == 1 else 'are'} {what}"
    return None


def seems_swizzled(scales: torch.Tensor) -> bool:
    """Whether a table of block scales [out, in/16] is more likely in the layout of matrix units (tiles of 128 x 4, in
    them 32 x 4 x 4) than row-major.

    Rows and columns of trained weights differ in size, and so do their scales: the right order is the one in which
    log(scale) = row + column leaves less. It must be a tenth less, and the logarithm of the likelihoods' quotient many
    times its standard deviation for scales without any order. (Of the right tables of a small trained model, one
    reached 4 % and 9 deviations.) A swizzled table shows only where rows or columns do differ.
    """
    rows, columns = scales.shape
    if rows % _TILE_ROWS or columns % _TILE_COLUMNS:
        return False  # a swizzled table would be padded, which its shape tells
    table = scales.float().log2()
    tiles = table.reshape(rows // _TILE_ROWS, columns // _TILE_COLUMNS, 32, 4, _TILE_COLUMNS)
    given, other = _left_over(table), _left_over(tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns))
    if not given > 0 or not other > 0:
        return given > other
    gain = math.log(given / other)
    return gain > max(_GAIN, 2 * _DEVIATIONS * math.sqrt(rows + columns) / table.numel())


def _left_over(table: torch.Tensor) -> float:
    """Sum of squares that row + column does not explain."""
    return float((table - table.mean(1, keepdim=True) - table.mean(0, keepdim=True) + table.mean()).square().sum())


class Lists:
    """What a JSON file says about the modules of a checkpoint."""

    def __init__(self, path: Path, raw: Mapping[str, Any]):
        self.path = path
        algorithm = raw.get("quant_algo")
        self._check_size("quantization", raw)
        self._mixed = algorithm == "MIXED_PRECISION"
        self._default = PLAIN if algorithm is None or self._mixed else self._format("quant_algo", algorithm)
        self._plain = _Names(dict.fromkeys(self._list("exclude_modules", raw) + self._list("ignore", raw), PLAIN))
        layers = raw.get("quantized_layers") or {}
        if not isinstance(layers, dict) or not all(isinstance(entry, dict) for entry in layers.values()):
            self._fail("quantized_layers is no object of objects")
        if self._mixed and not layers:
            self._fail("quant_algo is 'MIXED_PRECISION', but quantized_layers names no module")
        for name, entry in layers.items():
            self._check_size(name, entry)
        self._layers = _Names({_clean(name): self._format(name, e.get("quant_algo")) for name, e in layers.items()})

    def claim(self, module: str) -> str:
        """The format that a linear has by this file."""
        return self._layers.find(module) or self._plain.find(module) or self._default

    def _check_size(self, where: str, raw: Mapping[str, Any]) -> None:
        if (size := raw.get("group_size")) not in (None, 0, BLOCK):
            self._fail(f"{where}: group_size is {size!r}, expected {BLOCK}")

    def _list(self, key: str, raw: Mapping[str, Any]) -> list[str]:
        names = raw.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self._fail(f"{key} is no list of names")
        return [_clean(name) for name in names]

    def _format(self, where: str, algorithm: Any) -> str:
        if algorithm not in _ALGORITHMS:
            self._fail(f"{where} is {algorithm!r}, known are {', '.join(_ALGORITHMS)} and MIXED_PRECISION")
        return _ALGORITHMS[algorithm]

    def _fail(self, message: str):
        raise CheckpointError(f"{self.path}: {message}")


def read_lists(checkpoint: Path) -> list[Lists]:
    """Those of hf_quant_config.json and of config.json, where they are."""
    lists = []
    for file, key in ((LIST_FILE, "quantization"), ("config.json", "quantization_config")):
        path = checkpoint / file
        if not path.exists():
            continue
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
        part = raw.get(key) if isinstance(raw, dict) else None
        if part is None and file == "config.json":
            continue
        if not isinstance(part, dict):
            raise CheckpointError(f"{path}: {key!r} is {part!r}, expected an object")
        if (method := part.get("quant_method", "modelopt")) != "modelopt":
            raise CheckpointError(f"{path}: quant_method is {method!r}, expected 'modelopt'")
        if "quant_algo" in part:
            lists.append(Lists(path, part))
    return lists


def without_sentinels(value: Any) -> Any:
    """JSON without the garbage that Model Optimizer 0.47 leaves at the ends of module names of `nemotron_h` models."""
    if isinstance(value, str):
        return _SENTINEL.sub("", value)
    if isinstance(value, list):
        return [without_sentinels(item) for item in value]
    if isinstance(value, dict):
        return {without_sentinels(key): without_sentinels(item) for key, item in value.items()}
    return value


def _clean(name: str) -> str:
    return without_sentinels(name).rstrip(".")


class _Names:
    """Formats by names as lists write them: of a module, of what it is part of, or globs. There may be tens of
    thousands of modules, and as many names."""

    def __init__(self, formats: dict[str, str]):
        self._exact = {name: format for name, format in formats.items() if not _GLOB.search(name)}
        self._globs = {name: format for name, format in formats.items() if _GLOB.search(name)}

    def find(self, module: str) -> str | None:
        name = module
        while name:
            if name in self._exact:
                return self._exact[name]
            name = name.rpartition(".")[0]
        return next((format for glob, format in self._globs.items() if fnmatchcase(module, glob)), None)
