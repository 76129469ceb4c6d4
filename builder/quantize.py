# SPDX-License-Identifier: Apache-2.0
"""NVFP4 and FP8 checkpoints by NVIDIA's Model Optimizer, in the form that TensorRT-LLM and vLLM read.

Model Optimizer inserts quantisers into the model that transformers loads, measures the largest activations along the
calibration text, and exports. Around it: what it loses or spoils of `nemotron_h` checkpoints (multi-token prediction,
FP32 tensors, config keys, names in the module lists, weights that are all zero) is put right, and the result is read
back and compared with the source before it gets its name.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .. import ReplayConfig, SlotLayout
from ..runtime.engine import Engine
from ..runtime.model_config import MOE, CheckpointError, ModelConfig
from ..runtime.quantization import LIST_FILE, NVFP4, without_sentinels
from ..runtime.weights import Weights
from .bundle import being_written
from .layer_plan import STATE_KEY, slot_json

REPORT = "quantization_report.json"
_CPU = torch.device("cpu")
_BATCH = 4  # rows of a calibration step
_MOST_LOGITS = 2**28  # values that the comparison keeps
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*_nemotron_h.py",
)

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


@dataclass(frozen=True)
class WeightError:
    """Of a quantised weight: |W' - W| / |W|, and the cosine of the angle between them."""

    name: str
    format: str
    relative: float
    cosine: float


@dataclass(frozen=True)
class Divergence:
    """Of the quantised model's predictions from the source's, over `tokens` tokens of the calibration text. Both run in
    the embedded runtime: weights as they were rounded, activations as they are.

    kl: mean of KL(source || quantised), nats. same_top: how often the most likely token is the same. source_loss, loss:
    mean negative logarithm of the next token's probability.
    """

    tokens: int
    kl: float
    same_top: float
    source_loss: float
    loss: float


@dataclass(frozen=True)
class Report:
    """bytes, source_bytes: of the tensors with their scales, by format. text: what was calibrated on. divergence: None
    if predictions were not compared."""

    recipe: str
    modelopt: str
    text: str
    bytes: dict[str, int]
    source_bytes: dict[str, int]
    errors: list[WeightError]
    divergence: Divergence | None


def quantize(
    checkpoint: str | Path,
    output: str | Path,
    rows: torch.Tensor,
    recipe: str = "nemotron3",
    *,
    state: ReplayConfig,
    text: str,
    compare: bool = True,
    progress: Progress = lambda *_: None,
) -> Report:
    """Makes the folder `output`.

    An interrupted calibration continues where it was when it is called again with the same arguments.

    Args:
        checkpoint: BF16, FP16 or FP32.
        rows: int64 [rows, length], tokens to calibrate on.
        recipe: a name in RECIPES. Those that search for scales need a GPU.
        state: how the config.json of the result says that states be kept. docs/quantize.md has the keys.
        text: what `rows` are, for the report.
        compare: load the source and then the result into the embedded runtime, and compare their predictions.

    Raises:
        CheckpointError: the checkpoint is incomplete, or quantised already.
        ValueError: the recipe is unknown, needs a GPU, or is for other models.
        QuantizationError: the result is not what it should be.
        FileExistsError: `output` is there.
        ImportError: Model Optimizer or transformers are missing.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {recipe!r}")
    output = Path(output)
    if os.path.lexists(output):
        raise FileExistsError(f"{output}: is there already, expected a new folder")
    model = ModelConfig.read(checkpoint)
    source = Weights(checkpoint, model)
    if source.quantized:
        name, format = next(iter(source.quantized.items()))
        raise CheckpointError(f"{checkpoint}: is quantised already: {name!r} is {format}")
    if RECIPES[recipe].experts and MOE not in model.layers:
        raise ValueError(
            f"recipe {recipe!r} makes routed experts NVFP4, but {checkpoint} has no layers with any: take 'aggressive'"
        )
    if RECIPES[recipe].layers not in (None, len(model.layers)):
        raise ValueError(
            f"recipe {recipe!r} names layers of a model of {RECIPES[recipe].layers}, but {checkpoint} has "
            f"{len(model.layers)}: take 'aggressive'"
        )
    if not torch.cuda.is_available() and (method := _method(recipe)) != "max":
        raise ValueError(f"recipe {recipe!r} calibrates by {method!r}, which Model Optimizer does on a GPU only")
    layout = SlotLayout(model.geometry, state)
    calibration = _Calibration(output, checkpoint, recipe, rows)
    with being_written(output) as folder:
        with _quiet():
            _export(checkpoint, source, recipe, rows, calibration, folder, progress)
        _finish_config(Path(checkpoint), folder, layout)
        result = Weights(folder, ModelConfig.read(folder))
        _check(source, result, recipe, progress)
        report = Report(
            recipe=recipe,
            modelopt=_modelopt().__version__,
            text=text,
            bytes=stored_bytes(result),
            source_bytes=stored_bytes(source),
            errors=list(_errors(source, result, progress)),
            divergence=_divergence(checkpoint, folder, rows, progress) if compare else None,
        )
        (folder / REPORT).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    calibration.forget()
    return report


def stored_bytes(weights: Weights) -> dict[str, int]:
    """Of all tensors with their scales, by format."""
    sizes: Counter[str] = Counter()
    for name in weights.names:
        sizes[weights.quantized.get(name) or weights.dtype(name)] += weights.stored_bytes(name)
    return dict(sorted(sizes.items()))


def generated_rows(checkpoint: str | Path, rows: int, tokens: int) -> torch.Tensor:
    """int64 [rows, tokens]: texts that the model itself makes, each from a random token, sampled at temperature 1."""
    from ..runtime import SamplingParams

    engine = Engine(checkpoint, max_batch=min(rows, 8), context=tokens)
    random = torch.Generator().manual_seed(0)
    firsts = torch.randint(engine.config.vocab_size, (rows,), generator=random).tolist()
    params = [SamplingParams(max_tokens=tokens - 1, temperature=1.0, seed=row, stop_tokens=()) for row in range(rows)]
    texts = engine.generate([[first] for first in firsts], params)
    return torch.tensor([text.prompt + text.tokens for text in texts])


# ---- Model Optimizer -------------------------------------------------------------------------------------------------


def _modelopt():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this transformers is newer than it knows
            import modelopt
            import modelopt.torch.quantization  # noqa: F401
            import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"quantising needs {error.name}: pip install 'trtllm-replayssm[quantize]'") from None
    return modelopt


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
    modelopt = _modelopt()
    source = RECIPES[recipe].source
    if "/" not in source:
        return getattr(modelopt.torch.quantization, source)
    from modelopt.recipe import load_recipe

    with redirect_stdout(io.StringIO()):
        return load_recipe(source).quantize.model_dump()


def _method(recipe: str) -> str:
    algorithm = _config(recipe)["algorithm"]
    return algorithm if isinstance(algorithm, str) else algorithm["method"]


def _export(
    checkpoint: str | Path,
    source: Weights,
    recipe: str,
    rows: torch.Tensor,
    calibration: _Calibration,
    folder: Path,
    progress: Progress,
) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.nn import TensorQuantizer
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

    model = mtq.quantize(model, _config(recipe), loop)
    for name, quantizer in model.named_modules():
        if isinstance(quantizer, TensorQuantizer) and quantizer.is_enabled and quantizer.amax is not None:
            if not quantizer.amax.isfinite().all():
                raise QuantizationError(f"{checkpoint}: {name} has seen values that are not finite")
            # The scales of what is all zero would be 0, and its values 0 / 0.
            quantizer.amax = torch.where(quantizer.amax == 0, torch.ones_like(quantizer.amax), quantizer.amax)
    # transformers has no multi-token prediction and drops its tensors.
    model._mtp_layer_prefixes = ["mtp"] if source.has_mtp else []
    more = {name: source.stored(name).clone() for name in source.names if name.startswith("mtp.")}
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=folder, extra_state_dict=more)


def _restore(model, source: Weights, config: ModelConfig) -> None:
    """What transformers changes on loading: the FP32 tensors of a 16-bit checkpoint, and the limits of time steps, for
    which it takes time_step_min, an initialisation value."""
    parameters = dict(model.named_parameters())
    for name in source.names:
        parameter = parameters.get(re.sub(r"^backbone\.", "model.", name))
        if parameter is not None and source.dtype(name) == "F32":
            parameter.data = source.stored(name).to(parameter.device, copy=True)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = config.time_step_limit


class _Calibration:
    """The largest values that the quantisers have seen so far, in a file beside the output, until that is there."""

    def __init__(self, output: Path, checkpoint: str | Path, recipe: str, rows: torch.Tensor):
        self._file = output.with_name(f".{output.name}.calibration")
        digest = hashlib.sha256()
        for path in sorted(Path(checkpoint).glob("*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
        digest.update((Path(checkpoint) / "config.json").read_bytes())
        digest.update(f"{recipe} {_modelopt().__version__} {list(rows.shape)}".encode())
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
                        calibrator._calib_amax = file.get_tensor(name)
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


# ---- the folder ------------------------------------------------------------------------------------------------------


def _finish_config(checkpoint: Path, folder: Path, layout: SlotLayout) -> None:
    """The source's config.json with what was added, the lists without garbage, and the source's other small files."""
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    raw = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    raw |= {"quantization_config": repaired(written), STATE_KEY: slot_json(layout)}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    lists = folder / LIST_FILE
    lists.write_text(json.dumps(repaired(json.loads(lists.read_text(encoding="utf-8"))), indent=2) + "\n")
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in _COPIED):
            shutil.copyfile(path, folder / path.name)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)  # transformers writes them for their owner only


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


def _check(source: Weights, result: Weights, recipe: str, progress: Progress) -> None:
    """The result has what the recipe promises, in scales that can be used, and all else as it was, to the bit."""
    if NVFP4 not in result.quantized.values():
        raise QuantizationError(f"{result.checkpoint}: has no NVFP4 weight after recipe {recipe!r}")
    result.check_scales()
    if result.names != source.names:
        raise QuantizationError(f"{result.checkpoint}: has tensors {set(result.names) ^ set(source.names)} too few")
    plain = [name for name in source.names if name not in result.quantized]
    for number, name in enumerate(plain):
        progress("comparing", number, len(plain))
        before, after = source.stored(name), result.stored(name)
        if before.dtype != after.dtype or not torch.equal(before.view(torch.uint8), after.view(torch.uint8)):
            raise QuantizationError(
                f"{result.checkpoint}: {name!r} is not quantised, but differs from the source ({before.dtype}; "
                f"{after.dtype} now)"
            )
    progress("comparing", len(plain), len(plain))


def _errors(source: Weights, result: Weights, progress: Progress) -> Iterator[WeightError]:
    for number, (name, format) in enumerate(result.quantized.items()):
        progress("measuring errors", number, len(result.quantized))
        before, after = (weights.read(name, torch.float32, _CPU).flatten() for weights in (source, result))
        size = float(before.norm())
        relative = float((after - before).norm()) / size if size else 0.0
        cosine = float(F.cosine_similarity(before.double(), after.double(), dim=0)) if size else 1.0
        yield WeightError(name, format, relative, cosine)
    progress("measuring errors", len(result.quantized), len(result.quantized))


def _divergence(checkpoint: str | Path, folder: Path, rows: torch.Tensor, progress: Progress) -> Divergence | None:
    try:
        return _compared(checkpoint, folder, rows, progress)
    except torch.OutOfMemoryError as error:
        warnings.warn(f"predictions are not compared: {error}", stacklevel=3)
        return None


def _compared(checkpoint: str | Path, folder: Path, rows: torch.Tensor, progress: Progress) -> Divergence:
    length = rows.shape[1]
    vocabulary = ModelConfig.read(checkpoint).vocab_size
    compared = rows[: max(1, _MOST_LOGITS // (length * vocabulary))]
    done, total = 0, 2 * len(compared)

    def logarithms(which: str | Path) -> Iterator[torch.Tensor]:
        nonlocal done
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that weights are dequantised: the report says so
            engine = Engine(which, max_batch=1, context=length)
        for row in compared:
            progress("comparing predictions", done, total)
            done += 1
            yield engine.logits(row.tolist()).cpu().log_softmax(-1)

    kept = list(logarithms(checkpoint))
    sums = torch.zeros(4, dtype=torch.float64)
    for row, before, after in zip(compared, kept, logarithms(folder), strict=True):
        kl = (before.exp().double() * (before.double() - after.double())).sum()
        same = (before.argmax(-1) == after.argmax(-1)).sum()
        losses = (F.nll_loss(one[:-1], row[1:], reduction="sum") for one in (before, after))
        sums += torch.tensor([kl, same, *losses], dtype=torch.float64)
    progress("comparing predictions", total, total)
    kl, same, source_loss, loss = sums.tolist()
    tokens, predicted = compared.numel(), len(compared) * (length - 1)
    return Divergence(tokens, kl / tokens, same / tokens, source_loss / predicted, loss / predicted)
