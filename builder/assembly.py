# SPDX-License-Identifier: Apache-2.0
"""Makes engine folders: a checkpoint's, or new plans for one that is there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import __version__, _core, gpus, plugins
from . import bundle as bundles
from . import tensorrt_package
from .bundle import Bundle, ModelSizes, Plan
from .engine import EngineError, Sizes, build_engine, require_options
from .engine_config import EngineConfig
from .tensorrt_package import NoTensorRT, TensorRT

_SCRIPT = """#!/bin/sh
# Plans for the GPU of this machine, from the ONNX models beside this script, into the new folder $1.
# Needs trtllm-replayssm, installed where nvcc is (its plugin library must have the CUDA ops), and the full TensorRT
# {least} or later, as in NVIDIA's TensorRT containers.
if [ $# -ne 1 ]; then
    echo "usage: sh $0 NEW_FOLDER" >&2
    exit 2
fi
python3 - "$0" <<'CHECK' || exit 2
import sys

def fail(why):
    sys.exit(f"{{sys.argv[1]}}: error: {{why}}")

try:
    import tensorrt
except (ImportError, OSError) as error:
    fail(f"import tensorrt: {{error}}; the full TensorRT {least} or later is needed, as in NVIDIA's containers")
try:
    from trtllm_replayssm import _core
except (ImportError, OSError) as error:
    fail(f"import trtllm_replayssm: {{error}}")
if not _core.has_cuda():
    fail("trtllm-replayssm was installed without CUDA ops: install it again, from source, where nvcc is")
CHECK
exec python3 -m trtllm_replayssm build --from="$(dirname "$0")" --output="$1"
"""

_DEFAULT = EngineConfig()


@dataclass(frozen=True)
class Report:
    """bundle: of the new folder. missing: why there are no plans in it, None if there are or none were asked for."""

    bundle: Bundle
    missing: str | None


Progress = Callable[[str, int, int], None]  # a phase, steps done, steps in all


def _silent(phase: str, done: int, total: int) -> None:
    pass


def build(
    checkpoint: str | Path,
    output: str | Path,
    config: EngineConfig = _DEFAULT,
    *,
    allow: Sequence[str] = (),
    plans: bool = True,
    targets: tuple[str, ...] = (),
    timing_cache: Path | None = None,
    progress: Progress = _silent,
) -> Report:
    """Makes the engine folder `output` of a `nemotron_h` checkpoint. bundle.py has its content.

    Without a TensorRT that can be used, it has no plans: the script in it makes them on another machine.

    Args:
        allow: `runtime.weights.Weights`.
        plans: False: none are asked for. The folder serves the reference executor, and to make plans elsewhere.
        targets, timing_cache: `engine.build_engine`.

    Raises:
        CheckpointError: the checkpoint, as `decoder.export` says, or its tokenizer.json, if it has one.
        EngineError: TensorRT refuses, or changes the graph. Nothing is left of `output` then.
        FileExistsError: `output` is there.
        ValueError: config.dtype is "float32" and plans are asked for, or options of plans and none are.
        ImportError: onnx, torch or safetensors are missing.
    """
    try:
        from ..runtime.tokenizer import Tokenizer
        from . import decoder
    except ImportError as error:
        raise ImportError(f"reading checkpoints needs {error.name}: pip install 'trtllm-replayssm[builder]'") from None
    if plans:
        _require_plans_of(config)
    elif targets or timing_cache:
        raise ValueError(f"{'target' if targets else 'timing cache'}: of plans, and none are asked for")
    _plugin_library()
    tokenizer = Path(checkpoint) / bundles.TOKENIZER
    if tokenizer.exists():
        Tokenizer(checkpoint)
    tensorrt, missing = None, None
    if plans:
        try:
            tensorrt = tensorrt_package.find()
        except NoTensorRT as error:
            missing = str(error)
    if tensorrt is not None:
        require_options(tensorrt, targets, timing_cache)
    with bundles.being_written(output) as folder:
        model, pool = decoder.export(checkpoint, folder, config, progress, allow)
        with_mtp = (folder / decoder.MTP).exists()
        if tokenizer.exists():
            shutil.copyfile(tokenizer, folder / bundles.TOKENIZER)
        bundle = Bundle(
            package=__version__,
            layout_version=_core.LAYOUT_VERSION,
            plugins_have_cuda=_core.has_cuda(),
            model=ModelSizes(
                vocab_size=model.vocab_size,
                hidden_size=model.hidden_size,
                layers=model.layers,
                mtp_layers=model.mtp_layers if with_mtp else (),
                kv_heads=model.kv_heads or 0,
                head_dim=model.head_dim or 0,
                stop_tokens=model.stop_tokens,
                max_position_embeddings=model.max_position_embeddings,
            ),
            geometry=pool.geometry,
            engine=replace(config, window=pool.replay.window),
            checkpoint={
                "config_sha256": hashlib.sha256((Path(checkpoint) / "config.json").read_bytes()).hexdigest(),
                "dtype": model.dtype,
            },
            mtp_head=bool(model.mtp_layers),
            dense_moe_factor=decoder.dense_moe_factor(model, with_mtp),
            bindings={},
            plan=None,
            files={},
        )
        return Report(_finish(folder, bundle, tensorrt, targets, timing_cache, progress), missing)


def rebuild(
    source: str | Path,
    output: str | Path,
    *,
    targets: tuple[str, ...] = (),
    timing_cache: Path | None = None,
    progress: Progress = _silent,
) -> Report:
    """Makes the engine folder `output` from another's ONNX models, with this machine's TensorRT and plugin library.

    Raises:
        BundleError: `source` is no whole engine folder.
        NoTensorRT: none is installed that can be used.
        EngineError, FileExistsError, ValueError: as `build`.
    """
    bundle = bundles.read(source)
    _require_plans_of(bundle.engine)
    tensorrt = tensorrt_package.find()
    require_options(tensorrt, targets, timing_cache)
    with bundles.being_written(output) as folder:
        for name in (*bundles.MODELS.values(), bundles.WEIGHTS, bundles.TOKENIZER):
            if name in bundle.files:
                shutil.copyfile(Path(source) / name, folder / name)
        bundle = replace(bundle, package=__version__, plugins_have_cuda=_core.has_cuda(), plan=None)
        return Report(_finish(folder, bundle, tensorrt, targets, timing_cache, progress), None)


def _finish(
    folder: Path,
    bundle: Bundle,
    tensorrt: TensorRT | None,
    targets: tuple[str, ...],
    timing_cache: Path | None,
    progress: Progress,
) -> Bundle:
    """Adds plugin library, script and, if there is a TensorRT, plans to the exported models, and seals the folder."""
    shutil.copyfile(_plugin_library(), folder / bundles.LIBRARY)
    script = folder / bundles.SCRIPT
    script.write_text(_SCRIPT.format(least=".".join(map(str, tensorrt_package.LEAST_FULL))), encoding="utf-8")
    script.chmod(0o755)
    if tensorrt is not None:
        bundle = _add_plans(folder, bundle, tensorrt, targets, timing_cache, progress)
    return bundles.seal(folder, bundle)


def _add_plans(
    folder: Path,
    bundle: Bundle,
    tensorrt: TensorRT,
    targets: tuple[str, ...],
    timing_cache: Path | None,
    progress: Progress,
) -> Bundle:
    engine = bundle.engine
    sizes = Sizes(engine.max_batch, engine.step_tokens, engine.max_prefill_tokens)
    built = {
        name: build_engine(
            tensorrt,
            folder / model,
            folder / bundles.PLANS[name],
            sizes,
            aliased=engine.state_io == "alias",
            targets=targets,
            timing_cache=timing_cache,
            progress=progress,
        )
        for name, model in bundles.MODELS.items()
        if (folder / model).exists()
    }
    layers = {name: [asdict(layer) for layer in one.layers] for name, one in built.items()}
    (folder / bundles.LAYERS).write_text(json.dumps(layers, indent=1) + "\n", encoding="utf-8")
    plan = Plan(
        tensorrt=tensorrt.name,
        version=tensorrt.version,
        targets=targets,
        gpu=None if tensorrt.is_rtx else next(iter(gpus.found()), None),
        activation_bytes={name: one.activation_bytes for name, one in built.items()},
        seconds={name: round(one.seconds, 2) for name, one in built.items()},
        peak_bytes=max(one.peak_bytes for one in built.values()),
    )
    return replace(bundle, plan=plan, bindings={name: one.bindings for name, one in built.items()})


def _require_plans_of(config: EngineConfig) -> None:
    if config.dtype == "float32":
        raise ValueError(
            "dtype: expected bfloat16 or float16, got 'float32', for which TensorRT has no attention kernel: it is for "
            "graphs without plans (--no-plans)"
        )


def _plugin_library() -> Path:
    try:
        return plugins.library_path()
    except RuntimeError as error:
        raise EngineError(str(error)) from None
