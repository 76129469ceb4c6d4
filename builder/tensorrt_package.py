# SPDX-License-Identifier: Apache-2.0
"""The TensorRT that builds engines: the full one where it is installed, else TensorRT for RTX, which needs no GPU."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# The parser takes RMSNormalization and TensorScatter from this version on.
LEAST_FULL = (10, 15)
_LEAST_RTX = (1, 7)
RTX_ONLY = "a plan of TensorRT for RTX runs on RTX GPUs of compute capability 8.x and 12.x only"


class NoTensorRT(ImportError):
    """No TensorRT that can build the graph, and what would bring one."""


@dataclass(frozen=True)
class TensorRT:
    name: str  # "tensorrt" or "tensorrt_rtx"
    version: str
    module: ModuleType

    @property
    def is_rtx(self) -> bool:
        return self.name == "tensorrt_rtx"


def find() -> TensorRT:
    """Raises NoTensorRT."""
    if importlib.util.find_spec("tensorrt") is not None:
        found = TensorRT("tensorrt", "", importlib.import_module("tensorrt"))
        least = LEAST_FULL
    elif all(importlib.util.find_spec(f"tensorrt_rtx_{part}") is not None for part in ("bindings", "libs")):
        found = TensorRT("tensorrt_rtx", "", rtx_bindings())
        least = _LEAST_RTX
    else:
        raise NoTensorRT(
            "no TensorRT is installed: pip install 'trtllm-replayssm[rtx]' brings TensorRT for RTX, which builds "
            "without a GPU; the full one comes with NVIDIA's containers"
        )
    version = getattr(found.module, "__version__", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < least:
        expected = ".".join(map(str, least))
        raise NoTensorRT(
            f"{found.name} {version} is installed, expected {expected} or later: its ONNX parser lacks nodes"
        )
    return TensorRT(found.name, version, found.module)


def rtx_bindings() -> ModuleType:
    """TensorRT for RTX's Python module.

    At the first custom node its ONNX parser opens, beside itself, a libtensorrt_rtx.so that the wheel lacks, and ends
    the process if there is none: it is loaded from a folder where there is one.
    """
    if "tensorrt_rtx_libs" not in sys.modules:
        wheel = Path(importlib.util.find_spec("tensorrt_rtx_libs").origin).parent
        folder = Path(tempfile.mkdtemp(prefix="tensorrt-rtx-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        core, parser = "libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1"
        for link, target in ((core, core), ("libtensorrt_rtx.so", core), (parser, parser)):
            (folder / link).symlink_to(wheel / target)
        for name in (core, parser):
            ctypes.CDLL(str(folder / name))
    return importlib.import_module("tensorrt_rtx_bindings")
