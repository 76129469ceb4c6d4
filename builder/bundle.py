# SPDX-License-Identifier: Apache-2.0
"""An engine folder: all that serving needs, made in one piece, and read again with every byte accounted for.

    config.json        what the engine is, a hash of every other file, and one of all this
    model.onnx         the language model; mtp.onnx: its head for multi-token prediction, if drafts were asked for
    weights.bin        weights of both
    model.engine       the plans, if a TensorRT was there; mtp.engine
    layers.json        the plans' layers, as the builder listed them
    libtrtllm_replayssm_plugins.so
    build-on-gpu.sh    makes plans for the GPU of the machine it runs on
    tokenizer.json     of the checkpoint, if it has one

Reading takes numpy alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import MambaGeometry, _core
from ..gpus import GPU
from ..plugins import NAMESPACE, PLUGINS, VERSION
from .engine_config import ITEM_BYTES, EngineConfig, Pool

FORMAT = 3
CONFIG, LAYERS, SCRIPT, TOKENIZER = "config.json", "layers.json", "build-on-gpu.sh", "tokenizer.json"
WEIGHTS, LIBRARY = "weights.bin", "libtrtllm_replayssm_plugins.so"
MODELS = {"model": "model.onnx", "mtp": "mtp.onnx"}
PLANS = {"model": "model.engine", "mtp": "mtp.engine"}
_CHUNK = 1 << 22


class BundleError(ValueError):
    """A folder that is no engine, or no longer the one that was made: the file, what was found, what is expected."""


@dataclass(frozen=True)
class ModelSizes:
    """What a runner must know of the model. Sizes are element counts."""

    vocab_size: int
    hidden_size: int
    layers: tuple[str, ...]  # "mamba" | "attention" | "mlp" | "moe"
    mtp_layers: tuple[str, ...]  # of mtp.onnx, () without one
    kv_heads: int  # 0 without attention layers
    head_dim: int
    stop_tokens: tuple[int, ...]
    max_position_embeddings: int


@dataclass(frozen=True)
class Plan:
    """How plans were made. targets: compute capabilities asked for; (): TensorRT's choice. gpu: where the full TensorRT
    made them, and what they run on."""

    tensorrt: str  # "tensorrt" or "tensorrt_rtx"
    version: str
    targets: tuple[str, ...]
    gpu: GPU | None
    activation_bytes: dict[str, int | None]  # of a context, besides weights and bindings, by model
    seconds: dict[str, float]
    peak_bytes: int  # most memory of the process that built


@dataclass(frozen=True)
class Bundle:
    """An engine folder's config.json. Attributes as the dataclasses say; files: name -> {"bytes", "sha256"}."""

    package: str  # version of trtllm-replayssm
    layout_version: int
    plugins_have_cuda: bool
    model: ModelSizes
    geometry: MambaGeometry
    engine: EngineConfig
    checkpoint: dict[str, str]  # sha256 of the checkpoint's config.json, dtype of its weights
    mtp_head: bool  # whether the checkpoint has one; model.mtp_layers: whether the engine has it
    dense_moe_factor: float | None  # how much more arithmetic the routed experts do than their router asks for
    bindings: dict[str, dict]  # model -> name -> ["input" or "output", type, shape]
    plan: Plan | None
    files: dict[str, dict]

    @property
    def pool(self) -> Pool:
        return Pool.of(self.geometry, self.engine, self.model.layers.count("mamba"))

    @property
    def attention_layers(self) -> int:
        return self.model.layers.count("attention") + self.model.mtp_layers.count("attention")

    @property
    def state_bytes(self) -> int:
        """Of a slot, all layers."""
        return self.pool.num_layers * self.pool.layout.slot_stride

    @property
    def kv_bytes(self) -> int:
        """Of a row of the KV caches, all layers."""
        values = 2 * self.attention_layers * self.model.kv_heads * self.engine.kv_capacity * self.model.head_dim
        return values * ITEM_BYTES[self.engine.dtype]

    @property
    def weight_bytes(self) -> int:
        """Of the plans, else of the ONNX models."""
        plans = sum(self.files[name]["bytes"] for name in PLANS.values() if name in self.files)
        return plans or self.files[WEIGHTS]["bytes"]

    @property
    def step_output_bytes(self) -> int:
        """Logits and hidden states of a row of a step."""
        return self.engine.step_tokens * self._token_bytes

    @property
    def fixed_bytes(self) -> int:
        """What a GPU holds whatever the number of rows: weights, the contexts of the two profiles, and the outputs of a
        prompt chunk."""
        contexts = sum(size or 0 for size in self.plan.activation_bytes.values()) * 2 if self.plan else 0
        return self.weight_bytes + contexts + self.engine.max_prefill_tokens * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        graphs = 2 if self.model.mtp_layers else 1
        return graphs * (4 * self.model.vocab_size + ITEM_BYTES[self.engine.dtype] * self.model.hidden_size)

    def to_json(self) -> str:
        raw = {"format": FORMAT, **asdict(self)}
        # The window as a number: "auto" may choose another in a later version.
        raw["engine"]["window"] = self.pool.replay.window
        return json.dumps({**raw, "sha256": _seal_of(raw)}, indent=2) + "\n"

    @property
    def required_files(self) -> tuple[str, ...]:
        """What `files` must list."""
        models = ("model", "mtp") if self.model.mtp_layers else ("model",)
        plans = (*(PLANS[name] for name in models), LAYERS) if self.plan else ()
        return (*(MODELS[name] for name in models), WEIGHTS, LIBRARY, *plans)


def read(folder: str | Path) -> Bundle:
    """Reads config.json and checks every file of the folder against it.

    Raises:
        BundleError: a missing, truncated, changed or foreign file, or another format or slot layout, each by name.
    """
    folder = Path(folder)
    path = folder / CONFIG
    if path.exists() and not path.is_file():
        raise BundleError(f"{path}: not a regular file")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(f"{path}: no such file; an engine folder is what `trtllm-replayssm build` makes") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(raw, dict) or "format" not in raw:
        raise BundleError(f"{path}: has no key 'format', expected the config.json of an engine folder")
    if type(raw["format"]) is not int or raw["format"] != FORMAT:
        raise BundleError(f"{path}: of format {reprlib.repr(raw['format'])}, expected {FORMAT}: build the engine again")
    if raw.pop("sha256", None) != _seal_of(raw):
        raise BundleError(f"{path}: changed or damaged since the engine was made: its SHA-256 differs")
    layout_version = raw.get("layout_version")
    if type(layout_version) is not int:
        raise BundleError(f"{path}: layout_version is {reprlib.repr(layout_version)}, expected an integer")
    if layout_version != _core.LAYOUT_VERSION:
        raise BundleError(
            f"{path}: the engine's slots have layout version {layout_version}, this installation's "
            f"{_core.LAYOUT_VERSION}: build the engine again"
        )
    del raw["format"]
    try:
        bundle = _from_json(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{path}: {type(error).__name__}: {error}: build the engine again") from None
    for name in bundle.required_files:
        if name not in bundle.files:
            raise BundleError(f"{path}: 'files' does not list {name}, which is a part of this engine")
    for name, expected in bundle.files.items():
        if Path(name).name != name:
            raise BundleError(f"{path}: {name!r} is not a plain file name")
        _check(folder / name, expected)
    return bundle


def _from_json(raw: dict) -> Bundle:
    model = raw.pop("model")
    tuples = {name: tuple(model[name]) for name in ("layers", "mtp_layers", "stop_tokens")}
    plan = raw.pop("plan")
    return Bundle(
        model=ModelSizes(**{**model, **tuples}),
        geometry=MambaGeometry(**raw.pop("geometry")),
        engine=EngineConfig(**raw.pop("engine")),
        plan=plan and _plan_of(plan),
        **raw,
    )


def _plan_of(raw: dict) -> Plan:
    gpu = raw["gpu"] and GPU(raw["gpu"]["name"], tuple(raw["gpu"]["capability"]))
    return Plan(**{**raw, "targets": tuple(raw["targets"]), "gpu": gpu})


def _check(path: Path, expected: dict) -> None:
    if path.exists() and not path.is_file():
        raise BundleError(f"{path}: not a regular file")
    if not path.exists():
        has = f"; it has the plugins {', '.join(PLUGINS)}, namespace {NAMESPACE}, version {VERSION}"
        raise BundleError(f"{path}: no such file, but config.json lists it{has if path.name == LIBRARY else ''}")
    size = path.stat().st_size
    if size != expected["bytes"]:
        what = "truncated" if size < expected["bytes"] else "another file"
        raise BundleError(f"{path}: {what}: has {size} bytes, expected {expected['bytes']}")
    if _sha256(path) != expected["sha256"]:
        raise BundleError(f"{path}: not the file that was made with this config.json: its SHA-256 differs")


def seal(folder: Path, bundle: Bundle) -> Bundle:
    """Writes config.json over the files that are in the folder now."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != CONFIG
    }
    bundle = replace(bundle, files=files)
    (folder / CONFIG).write_text(bundle.to_json(), encoding="utf-8")
    return bundle


def _seal_of(raw: dict) -> str:
    """SHA-256 of a config.json's values, however they are set out."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def being_written(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when all went well, and vanishes otherwise.

    Raises:
        FileExistsError: `folder` is there already.
    """
    folder = Path(folder)
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder}: is there already, expected a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def concurrency(bundle: Bundle, budget: int) -> int:
    """Sequences that fit into `budget` bytes of GPU memory, KV cache and outputs counted."""
    each = bundle.state_bytes + bundle.kv_bytes + bundle.step_output_bytes
    return max(0, (budget - bundle.fixed_bytes) // each)
