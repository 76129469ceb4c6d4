# SPDX-License-Identifier: Apache-2.0
"""The plans of an engine folder on a GPU, by TensorRT.

Every graph has two optimization profiles (docs/engines.md): steps of all rows, and prompt chunks of one. A context
serves one shape of steps, since a captured CUDA graph is good for one, and another all prompt chunks; those of a graph
share their scratch memory, as runs never overlap. State, table and caches are bound where they lie, in and out alike.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from .. import gpus, plugins
from ..builder import tensorrt_package
from ..builder.bundle import LIBRARY, PLANS, SCRIPT, Bundle
from .cuda_graph import no_collection
from .engine import DTYPES
from .executor import ExecutorError, Outputs
from .graph_memory import GraphMemory

_STEPS, _CHUNKS = 0, 1  # profiles
_BY_ROW = ("tokens", "positions", "slots", "accepted")
_ALIGNMENT = 256  # of scratch memory
# EngineInvalidityDiagnostics -> what is wrong
_INVALID = {
    "VERSION_MISMATCH": "made by another version of TensorRT",
    "UNSUPPORTED_CC": "made for another GPU",
    "OLD_CUDA_DRIVER": "needs a newer CUDA driver",
    "OLD_CUDA_RUNTIME": "needs a newer CUDA runtime",
    "INSUFFICIENT_GPU_MEMORY": "needs more GPU memory",
    "MALFORMED_ENGINE": "no plan of this TensorRT, or a damaged one",
}


class LoadedPlans:
    """An engine folder's plans in the TensorRT that made them.

    Raises:
        ExecutorError: TensorRT, its version, the plugin library, the GPU, or a plan is not what the folder needs, each
            by name with what was found.
    """

    def __init__(self, folder: Path, bundle: Bundle):
        self.bundle, self.trt = bundle, _tensorrt(folder, bundle)
        self.log = _Log.of(self.trt)
        if bundle.plan.tensorrt == "tensorrt_rtx":  # each of its runtimes has a registry, and none needs a GPU
            self._runtime = self.trt.Runtime(self.log)
            self._register(self._runtime.get_plugin_registry(), folder / LIBRARY)
            _require_gpu(bundle, gpus.found())
        else:
            self._register(self.trt.get_plugin_registry(), folder / LIBRARY)
            _require_gpu(bundle, gpus.found())
            self._runtime = self.trt.Runtime(self.log)  # must outlive its engines
        self.engines = {graph: self._load(folder / plan) for graph, plan in PLANS.items() if plan in bundle.files}

    def _register(self, registry, library: Path) -> None:
        try:
            plugins.register(registry, library)
        except RuntimeError as error:
            raise ExecutorError(f"{error}: {self.log.first_error()}") from None

    def _load(self, path: Path):
        """The ICudaEngine in a file."""
        trt, runtime, data = self.trt, self._runtime, path.read_bytes()
        if hasattr(runtime, "get_engine_validity"):  # TensorRT for RTX looks at the header alone
            _, bits = runtime.get_engine_validity(data[: runtime.engine_header_size])
            known = ((what, getattr(trt.EngineInvalidityDiagnostics, name, 0)) for name, what in _INVALID.items())
            if faults := [what for what, bit in known if bits & int(bit)]:
                raise ExecutorError(f"{path}: {', '.join(faults)}")
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise ExecutorError(f"{path}: TensorRT cannot load it: {self.log.first_error()}")
        _require_tensors(path, engine, self.bundle.bindings[path.stem])
        return engine


class TensorRTExecutor:
    """An Executor."""

    def __init__(self, plans: LoadedPlans, memory: GraphMemory):
        device = memory.pool.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._engines = {
            graph: _Engine(plans, graph, engine, memory, self._stream) for graph, engine in plans.engines.items()
        }

    def run(self, graph: str, row: int | None, inputs: dict[str, torch.Tensor]) -> Outputs:
        if self._stream is None:
            return self._engines[graph].run(row, inputs)
        # Not torch's default stream: TensorRT would synchronise.
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = self._engines[graph].run(row, inputs)
        current.wait_stream(self._stream)
        return outputs


def _tensorrt(folder: Path, bundle: Bundle) -> ModuleType:
    """The TensorRT that made the plans."""
    plan = bundle.plan
    if plan is None:
        raise ExecutorError(
            f"{folder} has no plans: sh {folder / SCRIPT} NEW_FOLDER makes them, on the machine with the GPU; "
            "executor 'reference' needs none"
        )
    needed = f"{folder}: its plans were made by {plan.tensorrt} {plan.version}, and need it to run"
    try:
        module = importlib.import_module("tensorrt") if plan.tensorrt == "tensorrt" else _rtx()
    except (ImportError, OSError) as error:
        others = ", ".join(map(" ".join, tensorrt_package.installed().items())) or "none"
        raise ExecutorError(f"{needed}: {error}; TensorRT packages here: {others}") from None
    version = getattr(module, "__version__", "unknown")
    if version != plan.version:
        raise ExecutorError(
            f"{needed}; found {plan.tensorrt} {version}: sh {folder / SCRIPT} NEW_FOLDER makes them anew"
        )
    return module


def _rtx() -> ModuleType:
    if importlib.util.find_spec("tensorrt_rtx_libs") is None:
        raise ImportError("no package tensorrt_rtx is installed (pip install 'trtllm-replayssm[rtx]')")
    return tensorrt_package.rtx_bindings()


def _require_tensors(path: Path, engine, bindings: dict) -> None:
    """ExecutorError unless the engine has inputs and outputs of these names."""
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    if names != set(bindings):
        name = min(names ^ set(bindings))
        raise ExecutorError(
            f"{path}: a plan of another graph: {name} is in {'it' if name in names else 'config.json'} only"
        )


def _require_gpu(bundle: Bundle, found: list[gpus.GPU]) -> None:
    """The first GPU is the one that is used."""
    plan = bundle.plan
    if plan.tensorrt == "tensorrt_rtx":
        targets = {(int(target[2:-1]), int(target[-1])) for target in plan.targets}
        names = ", ".join(f"{major}.{minor}" for major, minor in sorted(targets)) or "8.x or 12.x"
        needed = f"an RTX GPU of compute capability {names}"
        suits = bool(found) and (found[0].capability in targets if targets else found[0].capability[0] in (8, 12))
    else:
        needed = f"a GPU like that on which they were built, {plan.gpu}"
        suits = bool(found) and (plan.gpu is None or found[0].capability == plan.gpu.capability)
    if not suits:
        raise ExecutorError(
            f"the plans of {plan.tensorrt} {plan.version} need {needed}; found {found[0] if found else 'no GPU'}"
        )
    if not bundle.plugins_have_cuda:
        raise ExecutorError(
            f"{LIBRARY} of this engine folder has no CUDA ops: it was made by an installation without nvcc; "
            "`trtllm-replayssm build --from` of one with it makes another"
        )
    if not torch.cuda.is_available():
        raise ExecutorError(f"found {found[0]}, but torch {torch.__version__} cannot use it: it needs torch with CUDA")


class _Log:
    """What TensorRT has to say."""

    @staticmethod
    def of(trt: ModuleType) -> _Log:
        """An ILogger of this TensorRT that is a _Log, too."""

        class Logger(trt.ILogger, _Log):
            def __init__(self):
                trt.ILogger.__init__(self)
                self.errors = []

            def log(self, severity, message):
                if severity.name in ("ERROR", "INTERNAL_ERROR"):
                    self.errors.append(message)

        return Logger()

    def first_error(self) -> str:
        """Since the last call: later ones follow from it."""
        errors, self.errors = self.errors, []
        return errors[0] if errors else "TensorRT does not say why"


@dataclass
class _Shape:
    """A context, its inputs and outputs; the CUDA graph of its execution, once there is one."""

    context: object
    inputs: dict[str, torch.Tensor]
    outputs: Outputs
    captured: torch.cuda.CUDAGraph | None = None


class _Engine:
    """One plan: its contexts and what is bound to them."""

    def __init__(self, plans: LoadedPlans, graph: str, engine, memory: GraphMemory, stream: torch.cuda.Stream | None):
        self.trt, self.log, self.bundle = plans.trt, plans.log, plans.bundle
        self.graph, self.engine, self.memory, self.stream = graph, engine, memory, stream
        self._steps: dict[int, _Shape] = {}  # by tokens a row
        self._chunks: _Shape | None = None
        sizes, model, device = self.bundle.engine, self.bundle.model, memory.pool.device
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        self._inputs = [n for n in names if self.engine.get_tensor_mode(n) == self.trt.TensorIOMode.INPUT]
        self._outputs = [n for n in names if n not in self._inputs]
        scratch = max(self.engine.get_device_memory_size_for_profile_v2(profile) for profile in (_STEPS, _CHUNKS))
        self._scratch = torch.empty(max(scratch, 1) + _ALIGNMENT, dtype=torch.uint8, device=device)
        self._scratch = self._scratch[-self._scratch.data_ptr() % _ALIGNMENT :][: max(scratch, 1)]
        state = {"table": self.memory.pool.table}
        state |= {f"state.{layer}": data for layer, data in enumerate(self.memory.pool.data)}
        self._addresses = {name: memory.data_ptr() for name, memory in state.items() if name in self._inputs}
        if sizes.state_io == "host_pointer":  # what is bound is where the address stands
            self._pointers = {name: ctypes.c_int64(address) for name, address in self._addresses.items()}
            self._addresses = {name: ctypes.addressof(pointer) for name, pointer in self._pointers.items()}
        # Of inputs and outputs, by profile; a context of a smaller shape uses a part of them.
        self._buffers = []
        for rows, tokens in ((sizes.max_batch, sizes.step_tokens), (1, sizes.max_prefill_tokens)):
            needed = {
                "token_ids": (rows * tokens, torch.int32),
                **{name: (rows, torch.int32) for name in _BY_ROW},
                "hidden": (rows * tokens * model.hidden_size, DTYPES[sizes.dtype]),
                "logits": (rows * tokens * model.vocab_size, torch.float32),
                "hidden_states": (rows * tokens * model.hidden_size, DTYPES[sizes.dtype]),
                "status": (8, torch.int32),
            }
            self._buffers.append(
                {
                    name: torch.zeros(count, dtype=dtype, device=device)
                    for name, (count, dtype) in needed.items()
                    if name in names
                }
            )

    def run(self, row: int | None, inputs: dict[str, torch.Tensor]) -> Outputs:
        width = inputs["token_ids"].shape[1]
        if row is None:
            shape = self._steps.get(width) or self._steps.setdefault(width, self._shape(_STEPS, width))
        else:
            shape = self._chunks = self._shape(_CHUNKS, width, row, self._chunks and self._chunks.context)
        for name, values in inputs.items():
            if name in shape.inputs:
                shape.inputs[name].copy_(values.view(shape.inputs[name].shape), non_blocking=True)
        if row is None and self.stream is not None:
            self._replay(shape)
        else:
            self._execute(shape)
        return shape.outputs

    def _replay(self, shape: _Shape) -> None:
        """The first run of a shape is not captured: TensorRT prepares itself then."""
        if shape.captured is not None:
            return shape.captured.replay()
        self._execute(shape)
        captured = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(captured, stream=self.stream):
            self._execute(shape)
        shape.captured = captured

    def _execute(self, shape: _Shape) -> None:
        handle = 0 if self.stream is None else self.stream.cuda_stream
        if not shape.context.execute_async_v3(handle):
            raise RuntimeError(f"{PLANS[self.graph]}: execution refused: {self.log.first_error()}")

    def _shape(self, profile: int, width: int, row: int | None = None, context=None) -> _Shape:
        """A context, made for these sizes or given, with everything bound."""
        rows = self.bundle.engine.max_batch if row is None else 1
        if context is None:
            context = self.engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if context is None:
                raise RuntimeError(f"{PLANS[self.graph]}: no execution context: {self.log.first_error()}")
            context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
            handle = 0 if self.stream is None else self.stream.cuda_stream
            if not context.set_optimization_profile_async(profile, handle):
                raise RuntimeError(f"{PLANS[self.graph]}: profile {profile} refused: {self.log.first_error()}")
        buffers = self._buffers[profile]
        model = self.bundle.model
        shapes = {name: (rows,) for name in _BY_ROW} | {
            "token_ids": (rows, width),
            "hidden": (rows, width, model.hidden_size),
            "logits": (rows, width, model.vocab_size),
            "hidden_states": (rows, width, model.hidden_size),
            "status": (8,),
        }
        views = {
            name: buffers[name][: torch.Size(shape).numel()].view(shape)
            for name, shape in shapes.items()
            if name in buffers
        }
        first = row or 0
        caches = {name: cache[first : first + rows] for name, cache in self.memory.caches[self.graph].items()}
        for name in self._inputs:
            tensor = views.get(name, caches.get(name))
            if tensor is not None and not context.set_input_shape(name, tuple(tensor.shape)):
                raise RuntimeError(f"{PLANS[self.graph]}: {name} of shape {tuple(tensor.shape)} refused")
        bound = {name: tensor.data_ptr() for name, tensor in (views | caches).items()} | self._addresses
        for name in (*self._inputs, *self._outputs):
            context.set_tensor_address(name, bound[name.removeprefix("new_")])
        return _Shape(
            context,
            {name: views[name] for name in self._inputs if name in views},
            Outputs(views["logits"], views["hidden_states"]),
        )
