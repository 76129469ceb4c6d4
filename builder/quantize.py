# SPDX-License-Identifier: Apache-2.0
"""NVFP4 and FP8 checkpoints by NVIDIA's Model Optimizer, in the form that TensorRT-LLM and vLLM read.

The result is read back and compared with its source before it gets its name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from .. import ReplayConfig, SlotLayout
from ..runtime.engine import Engine
from ..runtime.model_config import MOE, CheckpointError, ModelConfig
from ..runtime.quantization import LIST_FILE, NVFP4
from ..runtime.sampler import SamplingParams
from ..runtime.weights import Weights
from .bundle import being_written
from .layer_plan import STATE_KEY, slot_json
from .model_optimizer import RECIPES, Calibration, Progress, QuantizationError, export, method, modelopt, repaired
from .rounding import Divergence, WeightError, divergence, weight_errors

REPORT = "quantization_report.json"
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
    if not torch.cuda.is_available() and (found := method(recipe)) != "max":
        raise ValueError(f"recipe {recipe!r} calibrates by {found!r}, which Model Optimizer does on a GPU only")
    layout = SlotLayout(model.geometry, state)
    calibration = Calibration(output, checkpoint, recipe, rows)
    with being_written(output) as folder:
        export(checkpoint, source, recipe, rows, calibration, folder, progress)
        _finish_config(Path(checkpoint), folder, layout)
        result = Weights(folder, ModelConfig.read(folder))
        _check(source, result, recipe, progress)
        report = Report(
            recipe=recipe,
            modelopt=modelopt().__version__,
            text=text,
            bytes=stored_bytes(result),
            source_bytes=stored_bytes(source),
            errors=list(weight_errors(source, result, progress)),
            divergence=divergence(checkpoint, folder, rows, progress) if compare else None,
        )
        (folder / REPORT).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    calibration.forget()
    return report


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


def stored_bytes(weights: Weights) -> dict[str, int]:
    """Of all tensors with their scales, by format."""
    sizes: Counter[str] = Counter()
    for name in weights.names:
        sizes[weights.quantized.get(name) or weights.dtype(name)] += weights.stored_bytes(name)
    return dict(sorted(sizes.items()))


def generated_rows(checkpoint: str | Path, rows: int, tokens: int) -> torch.Tensor:
    """int64 [rows, tokens]: texts that the model itself makes, each from a random token, sampled at temperature 1."""
    engine = Engine(checkpoint, max_batch=min(rows, 8), context=tokens)
    random = torch.Generator().manual_seed(0)
    firsts = torch.randint(engine.config.vocab_size, (rows,), generator=random).tolist()
    params = [SamplingParams(max_tokens=tokens - 1, temperature=1.0, seed=row, stop_tokens=()) for row in range(rows)]
    texts = engine.generate([[first] for first in firsts], params)
    return torch.tensor([text.prompt + text.tokens for text in texts])
