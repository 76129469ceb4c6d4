# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that NVIDIA's Model Optimizer quantised: NVFP4 and FP8 linears beside plain tensors.

What is quantised is told by the tensors alone: the lists in the JSON files name modules that do not exist (Model
Optimizer 0.47 garbles them). Of a linear L [out, in]:

    NVFP4: L.weight U8 [out, in/2], two E2M1 codes a byte, the even column in the low four bits; L.weight_scale F8_E4M3
           [out, in/16]; L.weight_scale_2 F32 []. weight = code · (weight_scale · weight_scale_2)
    FP8:   L.weight F8_E4M3 [out, in]; L.weight_scale F32 []
    both:  L.input_scale F32 [], if activations are quantised, too
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..number_formats import E2M1
from ..runtime.model_config import CheckpointError
from ..runtime.weights import DTYPES, Shapes, Weights

BLOCK = 16
_ONE = ("F32",)


@dataclass(frozen=True)
class Nvfp4:
    """A W4A4 linear. codes uint8 [out, in/2]; block_scales float8_e4m3fn [out, in/16]; scale, input_scale fp32 []."""

    codes: torch.Tensor
    block_scales: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor


class QuantizedWeights(Weights):
    """As Weights, of plain checkpoints, too. `read` gives every tensor in a float dtype, whatever it is stored in."""

    def nvfp4(self, name: str) -> Nvfp4 | None:
        """The linear of this name if both its weights and its activations are NVFP4, else None."""
        linear = name.removesuffix(".weight")
        if self._formats.get(name) != "U8" or f"{linear}.input_scale" not in self._file_of:
            return None
        parts = ("weight", "weight_scale", "weight_scale_2", "input_scale")
        return Nvfp4(*(self._raw(f"{linear}.{part}") for part in parts))

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if name not in self._formats:
            return super().read(name, dtype, device)
        values, scale = self._raw(name), self._raw(name + "_scale").float()
        if self._formats[name] == "U8":
            scale = (scale * self._raw(name + "_scale_2"))[..., None]
            codes = torch.stack([values & 15, values >> 4], -1).int()
            values = torch.from_numpy(E2M1)[codes].unflatten(1, (-1, BLOCK // 2)).flatten(2)
        return (values.float() * scale).flatten(1).to(device=device, dtype=dtype)

    def _raw(self, name: str) -> torch.Tensor:
        return self._files[self._file_of[name]].get_tensor(name)

    def _check(self, checkpoint: Path, expected: Shapes) -> None:
        self._formats: dict[str, str] = {}  # of quantised weights
        self._scales: dict[str, tuple[str, ...]] = {}  # dtypes of their scales
        shapes = dict(expected)
        for name, shape in expected.items():
            if name not in self._file_of or len(shape) != 2:
                continue
            kind = self._files[self._file_of[name]].get_slice(name).get_dtype()
            scales = {}
            if kind == "U8":
                if shape[1] % BLOCK:
                    raise CheckpointError(
                        f"{checkpoint}: NVFP4 tensor {name!r} has {shape[1]} columns, no multiple of 16"
                    )
                shapes[name] = shape[0], shape[1] // 2
                scales = {"_scale": ((shape[0], shape[1] // BLOCK), ("F8_E4M3",)), "_scale_2": ((), _ONE)}
            elif kind == "F8_E4M3":
                scales = {"_scale": ((), _ONE)}
            else:
                continue
            self._formats[name] = kind
            scales = {name + part: given for part, given in scales.items()}
            if (given := name.removesuffix("weight") + "input_scale") in self._file_of:
                scales[given] = (), _ONE
            for scale, (scale_shape, kinds) in scales.items():
                shapes[scale], self._scales[scale] = scale_shape, kinds
        # Of an FP8 KV cache; the graph's is in the model's dtype.
        for name in self._file_of:
            if name.endswith((".k_proj.k_scale", ".v_proj.v_scale")):
                shapes[name], self._scales[name] = (), _ONE
        super()._check(checkpoint, shapes)

    def _dtypes(self, name: str) -> tuple[str, ...]:
        if name in self._formats:
            return (self._formats[name],)
        return self._scales.get(name, DTYPES)
