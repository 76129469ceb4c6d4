# SPDX-License-Identifier: Apache-2.0
"""The TensorRT that builds engines: the full one where it is installed, else TensorRT for RTX, which needs no GPU."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .. import _core, gpus

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
    """The full TensorRT, else, with a warning if one is installed that cannot be used, TensorRT for RTX.

    Raises:
        NoTensorRT: neither, or none that can be used, and why.
    """
    faults = []
    for name, load, least, packages in (
        ("tensorrt", _full, LEAST_FULL, ("tensorrt",)),
        ("tensorrt_rtx", rtx_bindings, _LEAST_RTX, ("tensorrt_rtx_bindings", "tensorrt_rtx_libs")),
    ):
        if any(importlib.util.find_spec(package) is None for package in packages):
            continue
        try:
            module = load()
        except (ImportError, OSError) as error:
            faults.append(f"{name} is installed, but cannot be used: {error}")
            continue
        version = getattr(module, "__version__", "0")
        if tuple(int(part) for part in version.split(".")[:2]) >= least:
            if faults:
                warnings.warn(f"{faults[0]}; {name} builds instead", stacklevel=2)
            return TensorRT(name, version, module)
        expected = ".".join(map(str, least))
        faults.append(f"{name} {version} is installed, expected {expected} or later: its ONNX parser lacks nodes")
    raise NoTensorRT(
        "; ".join(faults)
        or "no TensorRT is installed: pip install 'trtllm-replayssm[rtx]' brings TensorRT for RTX, which builds "
        "without a GPU; the full one comes with NVIDIA's containers"
    )


def installed() -> dict[str, str]:
    """TensorRT's Python packages here, usable or not, and their versions."""
    modules = {
        "tensorrt": "tensorrt",
        "tensorrt_rtx": "tensorrt_rtx_bindings",
        "tensorrt_lean": "tensorrt_lean_bindings",
    }
    distributions = importlib.metadata.packages_distributions()
    return {
        name: importlib.metadata.version(distributions[module][0]) if module in distributions else "unknown"
        for name, module in modules.items()
        if importlib.util.find_spec(module) is not None
    }


def abilities() -> dict[str, str]:
    """What this machine can do with engine folders: `build` them, and `run` their plans; or why not."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            tensorrt = find()
            build = f"plans by {tensorrt.name} {tensorrt.version}" + (f"; {RTX_ONLY}" if tensorrt.is_rtx else "")
        except NoTensorRT as error:
            build = f"no plans: {error}"
    build = "; ".join([build, *(str(warning.message) for warning in told)])
    here = gpus.found()
    if not here:
        return {"build": build, "run": "no plans: there is no GPU"}
    if not _core.has_cuda():
        return {"build": build, "run": "no plans: the plugins were built without CUDA ops"}
    rtx = here[0].capability[0] in (8, 12)
    fitting = [name for name in installed() if name == "tensorrt" or (name == "tensorrt_rtx" and rtx)]
    kinds = "tensorrt or tensorrt_rtx" if rtx else "tensorrt"
    run = f"plans of {', '.join(fitting)} on {here[0]}" if fitting else f"no plans: {here[0]} needs {kinds}"
    return {"build": build, "run": run}


def _full() -> ModuleType:
    """Raises ImportError if it cannot make a builder: without a GPU it has none.

    Tried in a process of its own: the first builder's logger may stay that of all, and engine.py reads its own.
    """
    code = "import tensorrt; tensorrt.Builder(tensorrt.Logger(tensorrt.Logger.INTERNAL_ERROR))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if child.returncode:
        words = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise ImportError(f"no builder can be made of it: {words[-1]}")
    return importlib.import_module("tensorrt")


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
