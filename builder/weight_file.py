# SPDX-License-Identifier: Apache-2.0
"""The weights of ONNX models in one file beside them, written tensor by tensor: memory for one of them is enough."""

from __future__ import annotations

from pathlib import Path

import torch
from onnx import TensorProto

KINDS = {
    torch.float32: TensorProto.FLOAT,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float16: TensorProto.FLOAT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
}
_ALIGNMENT = 4096  # so that readers can map a tensor
_INLINE_BYTES = 1024  # smaller tensors stand in the model itself


class WeightFile:
    """Several models may share it: a tensor of a name is written once."""

    def __init__(self, path: Path):
        self.name = path.name
        self._file = path.open("xb")
        self._places: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def tensor(self, name: str, read) -> TensorProto:
        """An initializer `name`, whose values `read()` gives as a CPU tensor; uint8: pairs of FP4 codes."""
        values = read().contiguous()
        if values.dtype == torch.uint8:  # two FP4 codes a byte, the first in the low four bits
            proto = TensorProto(name=name, data_type=TensorProto.FLOAT4E2M1, dims=values.shape)
            proto.dims[-1] *= 2
        else:
            proto = TensorProto(name=name, data_type=KINDS[values.dtype], dims=values.shape)
        data = memoryview(values.flatten().view(torch.uint8).numpy())
        if data.nbytes <= _INLINE_BYTES:
            proto.raw_data = bytes(data)
            return proto
        if name not in self._places:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            self._places[name] = self._file.tell(), data.nbytes
            self._file.write(data)
        offset, length = self._places[name]
        proto.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.name), ("offset", offset), ("length", length)):
            proto.external_data.add(key=key, value=str(value))
        return proto
