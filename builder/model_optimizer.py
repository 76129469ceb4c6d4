# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Model Optimizer at work on a `nemotron_h` checkpoint: recipes, calibration, export.

What it loses or spoils of such checkpoints is put right: multi-token prediction, FP32 tensors, time step limits,
weights that are all zero, names in the module lists.
"""

from __future__ import annotations

import gc
import hashlib
import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..runtime.model_config import ModelConfig
from ..runtime.quantization import without_sentinels
from ..runtime.weights import Weights

_BATCH = 4  # rows of a calibration step

Progress = Callable[[str, int, int], None]  # a phase, steps done, steps in all


class Recipe(NamedTuple):
    """source: a file of Model Optimizer's recipes, or the name of one of its configurations. experts: whether routed
    experts are all that it makes NVFP4. layers: of the model whose layers it names by number."""

    source: str
    experts: bool = False
    layers: int | None = None


_NEMOTRON = "models/nvidia/NVIDIA-Nemotron-3-"
RECIPES = {
    "nemotron3": Recipe(_NEMOTRON + "Super-120B-A12B-BF16/ptq/nvfp4-max-calib", experts=True),
    "nemotron3-mse": Recipe(_NEMOTRON + "Super-120B-A12B-BF16/ptq/nvfp4-mse", experts=True),
    "nemotron3-4o6": Recipe(_NEMOTRON + "Ultra-550B-A55B-BF16/ptq/nvfp4-4o6", experts=True),
    "nemotron3-nano-4b": Recipe(_NEMOTRON + "Nano-4B-BF16/ptq/nvfp4_w4a16", layers=42),
    "aggressive": Recipe("MAMBA_MOE_NVFP4_AGGRESSIVE_CFG"),
}


class QuantizationError(ValueError):
    """What Model Optimizer made is not what was asked for: which tensor, and why."""


def modelopt():
    """The package. ImportError says how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this transformers is newer than it knows
            import modelopt as package
            import modelopt.torch.quantization  # noqa: F401
            import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"quantising needs {error.name}: pip install 'trtllm-replayssm[quantize]'") from None
    return package


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the messages that Model Optimizer and transformers print while all goes well."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.enable_progress_bar()
        logging.set_verbosity(verbosity)


def _config(recipe: str) -> dict[str, Any]:
    """Model Optimizer's configuration."""
    package = modelopt()
    source = RECIPES[recipe].source
    if "/" not in source:
        return getattr(package.torch.quantization, source)
    from modelopt.recipe import load_recipe

    with redirect_stdout(io.StringIO()):
        return load_recipe(source).quantize.model_dump()


def method(recipe: str) -> str:
    """How it finds scales: "max" is all that Model Optimizer can do without a GPU."""
    algorithm = _config(recipe)["algorithm"]
    return algorithm if isinstance(algorithm, str) else algorithm["method"]


def export(
    checkpoint: str | Path,
    source: Weights,
    recipe: str,
    rows: torch.Tensor,
    calibration: Calibration,
    folder: Path,
    progress: Progress,
) -> None:
    """Quantises the model of `checkpoint`, whose tensors are `source`, and writes it into `folder`."""
    with _quiet():
        _export(checkpoint, source, recipe, rows, calibration, folder, progress)
    gc.collect()  # of the model, before another is loaded


def _export(
    checkpoint: str | Path,
    source: Weights,
    recipe: str,
    rows: torch.Tensor,
    calibration: Calibration,
    folder: Path,
    progress: Progress,
) -> None:
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.nn import TensorQuantizer

    model = calibrated(checkpoint, source, recipe, rows, calibration, progress)
    for quantizer in model.modules():
        if isinstance(quantizer, TensorQuantizer) and quantizer.is_enabled and quantizer.amax is not None:
            # The scales of what is all zero would be 0, and its values 0 / 0.
            quantizer.amax = torch.where(quantizer.amax == 0, torch.ones_like(quantizer.amax), quantizer.amax)
    # transformers has no multi-token prediction and drops its tensors.
    model._mtp_layer_prefixes = ["mtp"] if source.has_mtp else []
    more = {name: source.stored(name).clone() for name in source.names if name.startswith("mtp.")}
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=folder, extra_state_dict=more)


def calibrated(
    checkpoint: str | Path,
    source: Weights,
    recipe: str,
    rows: torch.Tensor,
    calibration: Calibration,
    progress: Progress,
):
    """The model of `checkpoint`, whose tensors are `source`, in transformers, with quantisers that simulate what the
    recipe does. On a GPU where there is one."""
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM

    on_gpu = {"device_map": "auto"} if torch.cuda.is_available() else {}
    config = ModelConfig.read(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, config.dtype), **on_gpu).eval()
    model.config.architectures = model.config.architectures or ["NemotronHForCausalLM"]
    _restore(model, source, config)

    def loop(model) -> None:
        first = calibration.resume(model)
        for begin in range(first, len(rows), _BATCH):
            progress("calibrating", begin, len(rows))
            batch = rows[begin : begin + _BATCH].to(model.device)
            with torch.no_grad():
                model(batch, use_cache=False)
            calibration.save(model, begin + len(batch))
        progress("calibrating", len(rows), len(rows))

    try:
        return mtq.quantize(model, _config(recipe), loop)
    except AssertionError as error:  # values that are not finite, above all
        raise QuantizationError(f"{checkpoint}: Model Optimizer refuses to calibrate: {error}") from None


def _restore(model, source: Weights, config: ModelConfig) -> None:
    """What transformers changes on loading: the FP32 tensors of a 16-bit checkpoint, and the limits of time steps, for
    which it takes time_step_min, an initialisation value."""
    parameters = dict(model.named_parameters())
    for name in source.names:
        parameter = parameters.get(re.sub(r"^backbone\.", "model.", name))
        if parameter is not None and parameter.dtype != torch.float32 and source.dtype(name) == "F32":
            parameter.data = source.stored(name).to(parameter.device, copy=True)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = config.time_step_limit


class Calibration:
    """The largest values that the quantisers have seen so far, in a file beside the output, until that is there."""

    def __init__(self, output: Path, checkpoint: str | Path, recipe: str, rows: torch.Tensor):
        self._file = output.with_name(f".{output.name}.calibration")
        digest = hashlib.sha256()
        for path in sorted(Path(checkpoint).glob("*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
        digest.update((Path(checkpoint) / "config.json").read_bytes())
        digest.update(f"{recipe} {modelopt().__version__} {list(rows.shape)}".encode())
        digest.update(rows.numpy().tobytes())
        self._of = digest.hexdigest()

    def resume(self, model) -> int:
        """Gives the quantisers what an interrupted calibration of the same kind had found. Returns rows done."""
        try:
            with safe_open(self._file, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("of") != self._of:
                    return 0
                for name, calibrator in _calibrators(model):
                    if name in file.keys():
                        calibrator._calib_amax = file.get_tensor(name).to(_device(model, name))
                return int(about["rows"])
        except (FileNotFoundError, SafetensorError):
            return 0

    def save(self, model, rows: int) -> None:
        seen = {
            name: calibrator._calib_amax.cpu().contiguous()
            for name, calibrator in _calibrators(model)
            if calibrator._calib_amax is not None
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_name(self._file.name + ".tmp")
        save_file(seen, temporary, metadata={"of": self._of, "rows": str(rows)})
        os.replace(temporary, self._file)

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)


def _calibrators(model) -> Iterator[tuple[str, Any]]:
    """Name and max calibrator of every enabled quantiser."""
    from modelopt.torch.quantization.calib import MaxCalibrator
    from modelopt.torch.quantization.nn import TensorQuantizer

    for name, quantizer in model.named_modules():
        if isinstance(quantizer, TensorQuantizer) and quantizer.is_enabled:
            if isinstance(calibrator := getattr(quantizer, "_calibrator", None), MaxCalibrator):
                yield name, calibrator


def _device(model, name: str) -> torch.device:
    """Of the layer that the quantiser `name` belongs to: several GPUs share a model that one cannot hold."""
    parameter = None
    while parameter is None:
        name = name.rpartition(".")[0]
        parameter = next(model.get_submodule(name).parameters(), None)
    return parameter.device


def repaired(lists: Any) -> Any:
    """Model Optimizer's JSON with module names that a loader finds.

    Version 0.47 ends each in a sentinel. And it excludes layer 3 by "backbone.layers.3*", which 30 to 39 match, too.
    """

    def name(text: str) -> str:
        return re.sub(r"\.layers\.(\d+)\*$", r".layers.\1.*", text.rstrip("."))

    def each(value: Any) -> Any:
        if isinstance(value, str):
            return name(value)
        if isinstance(value, list):
            return [each(item) for item in value]
        return {name(key): each(item) for key, item in value.items()} if isinstance(value, dict) else value

    return each(without_sentinels(lists))
