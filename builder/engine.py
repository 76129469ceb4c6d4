# SPDX-License-Identifier: Apache-2.0
"""A plan from an ONNX model, and what the builder says about it, checked: a graph that TensorRT changes in silence is
no engine."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import plugins
from .tensorrt_package import TensorRT

# Messages after which an engine would copy state, or leave something out.
_REFUSED_MESSAGES = ("Inserting copy", "Unused Input", "not found in plugin node")
_REFUSED_LAYERS = ("copy", "reformat", "Reformat")


class EngineError(ValueError):
    """TensorRT did not build the engine, or not as it must be."""


@dataclass(frozen=True)
class Sizes:
    """Rows and tokens of the two optimization profiles: steps of all rows, prompt chunks of one."""

    max_batch: int
    step_tokens: int
    max_prefill_tokens: int

    @property
    def profiles(self) -> tuple[tuple[int, int, int], ...]:
        """(rows, fewest tokens, most tokens)."""
        return (self.max_batch, 1, self.step_tokens), (1, self.step_tokens + 1, self.max_prefill_tokens)


@dataclass(frozen=True)
class Layer:
    """A layer of the finished engine.

    kind: TensorRT's word: "kgen" and "gemm" (kernels), "PluginV3", "custom_layer" (a plugin without an alias) …
    nodes: the ONNX nodes that are in it.
    inputs, outputs: their dtypes in TensorRT's words; the inputs with the constants.
    plugin: "Name: field=value …", where the builder tells.
    """

    kind: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    plugin: str = ""


@dataclass(frozen=True)
class Built:
    """bindings: name -> ["input" or "output", type, shape]; -1 where a profile decides.
    activation_bytes: what a context needs beside weights and bindings, of the profile that needs more.
    peak_bytes: most memory that the process ever had.
    """

    layers: list[Layer]  # of all profiles; [] if the full TensorRT does not list them
    bindings: dict[str, list]
    activation_bytes: int | None
    seconds: float
    peak_bytes: int


class Failures:
    """The first exception of TensorRT's callbacks. Its Python bindings swallow what those raise, and go on: so they
    work `with` this, which keeps it, to be raised outside."""

    def __init__(self):
        self.first: BaseException | None = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.first is None:
            self.first = error
        return True

    def raise_first(self) -> None:
        if self.first is not None:
            raise self.first


def require_options(tensorrt: TensorRT, targets: tuple[str, ...], timing_cache: str | Path | None) -> None:
    """EngineError if this TensorRT cannot take these arguments of `build_engine`."""
    if targets and not tensorrt.is_rtx:
        raise EngineError(
            f"target: {tensorrt.name} builds for the GPU of its machine, only TensorRT for RTX for others"
        )
    for target in targets:
        _target(tensorrt.module, target)
    if timing_cache is None:
        return
    if tensorrt.is_rtx:
        raise EngineError(f"timing cache: of the full TensorRT only, {tensorrt.name} {tensorrt.version} has none")
    if not Path(timing_cache).parent.is_dir():
        raise EngineError(f"timing cache: {Path(timing_cache).parent} is no directory")


def build_engine(
    tensorrt: TensorRT,
    model: Path,
    plan: Path,
    sizes: Sizes,
    *,
    aliased: bool,
    targets: tuple[str, ...] = (),
    timing_cache: str | Path | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Built:
    """Builds `model` (its weights beside it) into `plan`, of which nothing is left if it fails.

    Args:
        aliased: the plugins declare their state outputs aliases.
        targets: compute capabilities of RTX GPUs ("SM86", "SM120", …) to compile for; (): whatever TensorRT takes.
        timing_cache: the full TensorRT's file of kernel timings, read if it is there, and written if all went well.
        progress: called with a phase, steps done, steps in all. What it raises ends the build.

    Raises:
        EngineError: with TensorRT's own words; timing_cache is no timing cache.
        OSError: a file cannot be written.
    """
    require_options(tensorrt, targets, timing_cache)
    timing_cache = None if timing_cache is None else Path(timing_cache)
    failures = Failures()
    try:
        with _signals_kept(failures):
            return _build(tensorrt, model, plan, sizes, aliased, targets, timing_cache, progress, failures)
    except BaseException:
        plan.unlink(missing_ok=True)
        raise


def _build(
    tensorrt: TensorRT,
    model: Path,
    plan: Path,
    sizes: Sizes,
    aliased: bool,
    targets: tuple[str, ...],
    timing_cache: Path | None,
    progress: Callable[[str, int, int], None],
    failures: Failures,
) -> Built:
    began = time.perf_counter()
    trt, log = tensorrt.module, Log.of(tensorrt, failures)
    builder = trt.Builder(log)
    plugins.register(builder.get_plugin_registry() if tensorrt.is_rtx else trt.get_plugin_registry())
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse_from_file(str(model))
    failures.raise_first()
    if not parsed:
        log.rows += [("ERROR", parser.get_error(index).desc()) for index in range(parser.num_errors)]
        raise log.error(f"{model.name} cannot be parsed")
    _require_cache_rows(network, model.name)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, aliased)
    config.progress_monitor = _monitor(trt, progress, failures)
    if targets:
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            config.set_compute_capability(_target(trt, target), index)
    for profile in sizes.profiles:
        config.add_optimization_profile(_profile(builder, network, profile))
    if timing_cache is not None:
        _read_timings(config, log, timing_cache)
    with plan.open("wb") as file:
        writer = _writer(trt, file, failures)
        done = builder.build_serialized_network_to_stream(network, config, writer)
        failures.raise_first()
    failures.raise_first()
    if not done:
        raise log.error(f"{model.name} cannot be built")
    if plan.stat().st_size != writer.bytes:
        raise EngineError(f"{plan.name}: has {plan.stat().st_size} bytes, TensorRT wrote {writer.bytes}")
    layers = layers_in(log.text("Layers:"))
    if not layers and tensorrt.is_rtx:
        raise EngineError("TensorRT did not list the layers")
    layers = layers or layers_in(_inspected(trt, log, plan))
    _require_whole(network, layers, log)
    failures.raise_first()
    if timing_cache is not None:
        _write_timings(config, timing_cache)
    return Built(
        layers=layers,
        bindings=_bindings(network),
        activation_bytes=log.activation_bytes(),
        seconds=time.perf_counter() - began,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


@contextmanager
def _signals_kept(failures: Failures) -> Iterator[None]:
    """Raises the first failure at the end; what handlers of signals raise is one.

    Python would raise it at the first instruction of whatever callback comes next, before that can catch anything.
    Only the main thread may set handlers, and it runs them.
    """
    ours = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if ours else ()
    handlers = {number: signal.getsignal(number) for number in numbers if callable(signal.getsignal(number))}

    def keep(number, frame):
        with failures:
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is keep:  # a handler may have set another
                signal.signal(number, handler)
        failures.raise_first()


def _read_timings(config, log: Log, path: Path) -> None:
    """TensorRT goes on with an empty cache when it cannot read one, and would replace a file that is something else."""
    before = len(log.rows)
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    refused = any("Failed to deserialize timing cache" in message for _, message in log.rows[before:])
    if refused or cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise EngineError(f"timing cache: {path} is not one of this TensorRT and this GPU")


def _write_timings(config, path: Path) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(config.get_timing_cache().serialize())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class Log:
    """What TensorRT says, down to VERBOSE: the finished engine's layers are one such message."""

    @staticmethod
    def of(tensorrt: TensorRT, failures: Failures):
        """An ILogger of this TensorRT that is a Log, too."""
        trt = tensorrt.module

        class Logger(trt.ILogger, Log):
            def __init__(self):
                trt.ILogger.__init__(self)
                self.rows = []

            def log(self, severity, message):
                with failures:
                    self.rows.append((severity.name, message))

        return Logger()

    def error(self, what: str) -> EngineError:
        errors = [message for severity, message in self.rows if severity in ("ERROR", "INTERNAL_ERROR")]
        # The first is the cause. On a machine without a GPU others complain of that, too.
        return EngineError(f"{what}: {errors[0] if errors else 'TensorRT does not say why'}")

    def text(self, beginning: str) -> str:
        """The last message that begins so."""
        return next((message for _, message in reversed(self.rows) if message.startswith(beginning)), "")

    def activation_bytes(self) -> int | None:
        found = re.findall(r"^Total Activation Memory: (\d+)", "\n".join(message for _, message in self.rows), re.M)
        return max(map(int, found)) if found else None


def layers_in(text: str) -> list[Layer]:
    """Of a builder's message, or an engine inspector's lines."""
    lines = re.findall(r"^Name: .*?, LayerType: (\w+), (.*)$", text, re.M)
    return [_layer(kind, rest) for kind, rest in lines if kind != "shape_call"]


def _inspected(trt, log: Log, plan: Path) -> str:
    """Where there is a GPU, the plan can be loaded and asked."""
    engine = trt.Runtime(log).deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        raise log.error(f"{plan.name} cannot be loaded again")
    return engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.ONELINE)


def _layer(kind: str, rest: str) -> Layer:
    plugin = re.search(r"PluginType: (\w+), .*PluginMetadata: (.*?), TacticValue", rest)
    given, _, made = rest.partition(", Outputs: [")
    return Layer(
        kind=kind,
        nodes=tuple(re.findall(r"\[ONNX Layer: ([^\]]*)\]", rest)),
        inputs=tuple(re.findall(r"Datatype: (\w+)", given)),
        outputs=tuple(re.findall(r"Datatype: (\w+)", made)),
        plugin=f"{plugin[1]}: {plugin[2]}" if plugin else "",
    )


def _require_cache_rows(network, name: str) -> None:
    """A cache with other rows than the batch builds without complaint, and is written at the wrong places."""
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if "_cache." in tensor.name and tensor.get_dimension_name(0) != "B":
            rows = tensor.get_dimension_name(0) or tensor.shape[0]
            raise EngineError(f"{name}: {tensor.name} has {rows} rows, expected those of the batch, B")


def _profile(builder, network, sizes: tuple[int, int, int]):
    rows, *tokens = sizes
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
        if any(names):
            shapes = (
                [{"B": rows, "S": count}.get(name, size) for name, size in zip(names, tensor.shape, strict=True)]
                for count in (tokens[0], tokens[1], tokens[1])
            )
            profile.set_shape(tensor.name, *shapes)
    return profile


def _target(trt, name: str):
    known = [known for known in dir(trt.ComputeCapability) if known.startswith("SM")]
    if name not in known:
        raise EngineError(f"target: expected one of {', '.join(known)}, got {name!r}")
    return getattr(trt.ComputeCapability, name)


def _bindings(network) -> dict[str, list]:
    tensors = [("input", network.get_input(index)) for index in range(network.num_inputs)]
    tensors += [("output", network.get_output(index)) for index in range(network.num_outputs)]
    return {tensor.name: [way, tensor.dtype.name, list(tensor.shape)] for way, tensor in tensors}


def _require_whole(network, layers: list[Layer], log: Log) -> None:
    """Every plugin of the network stands in the engine, as far as TensorRT lists its layers, and nothing is copied."""
    for _, message in log.rows:
        if any(text in message for text in _REFUSED_MESSAGES):
            raise EngineError(f"TensorRT would change the graph: {message}")
    for layer in layers:
        # A copy of nothing is that of a host's number, a length of TensorRT's attention node, say.
        if layer.kind in _REFUSED_LAYERS and layer.inputs:
            raise EngineError(f"the engine has a {layer.kind} layer at {', '.join(layer.nodes) or 'no node'}")
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name == "PLUGIN_V3":
            if layers and not any(layer.name in built.nodes for built in layers):
                raise EngineError(f"plugin node {layer.name} is not in the engine")


def _monitor(trt, progress, failures: Failures):
    class Monitor(trt.IProgressMonitor):
        def __init__(self):
            trt.IProgressMonitor.__init__(self)
            self.steps = {}

        def phase_start(self, phase_name, parent_phase, num_steps):
            with failures:
                self.steps[phase_name] = num_steps
                progress(phase_name, 0, num_steps)

        def step_complete(self, phase_name, step):
            with failures:
                progress(phase_name, step + 1, self.steps[phase_name])
            return failures.first is None  # whether TensorRT goes on

        def phase_finish(self, phase_name):
            with failures:
                total = self.steps.pop(phase_name)
                progress(phase_name, total, total)

    return Monitor()


def _writer(trt, file, failures: Failures):
    class Writer(trt.IStreamWriter):
        def __init__(self):
            trt.IStreamWriter.__init__(self)
            self.bytes = 0

        def write(self, data):
            if failures.first is not None:
                return 0
            with failures:
                self.bytes += len(data)
                return file.write(data)
            return 0

    return Writer()
