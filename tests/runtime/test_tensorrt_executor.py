# SPDX-License-Identifier: Apache-2.0
"""How engine folders are bound to TensorRT, and what is said where they cannot run.

The first part has TensorRT's calls done by ONNX's reference evaluator on whatever memory they name: shapes, addresses
and profiles are those that a GPU would get. The second is TensorRT-RTX itself, as far as it goes without a GPU."""

import ctypes
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from trtllm_replayssm.builder import EngineConfig, build, bundle, read
from trtllm_replayssm.builder.bundle import MODELS, Plan
from trtllm_replayssm.builder.evaluator import HostGraph
from trtllm_replayssm.gpus import GPU
from trtllm_replayssm.runtime import EngineRunner, ExecutorError, SamplingParams, engine_runner, tensorrt_executor
from trtllm_replayssm.runtime.tensorrt_executor import TensorRTExecutor, _require_gpu, _require_tensors

from .conftest import TINY
from .prompts import PROMPTS

RTX = all(importlib.util.find_spec(f"tensorrt_rtx_{part}") for part in ("bindings", "libs"))
needs_rtx = pytest.mark.skipif(not RTX, reason="needs TensorRT-RTX: pip install 'trtllm-replayssm[rtx]'")
CONFIG = EngineConfig(max_batch=3, max_seq_len=96, draft_tokens=3, max_prefill_tokens=16, window=8)
H200, RTX_5090 = GPU("NVIDIA H200", (9, 0)), GPU("NVIDIA GeForce RTX 5090", (12, 0))

# ---- bound and executed ----------------------------------------------------------------------------------------------


class Mode(IntEnum):
    INPUT, OUTPUT = 0, 1


TRT = SimpleNamespace(TensorIOMode=Mode, ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=2))
NUMPY = {1: np.float32, 6: np.int32, 7: np.int64, 16: ml_dtypes.bfloat16}  # of onnx.TensorProto


class Engine:
    """An ICudaEngine of a graph with the two profiles of `config`."""

    scratch = 1000

    def __init__(self, path, config):
        self.graph, self.config, self.contexts = HostGraph(path), config, []
        declared = HostGraph(path)
        self.inputs = declared.inputs
        hidden = [name for name in declared.outputs if name.startswith(("new_table", "new_state"))]
        aliased = config.state_io == "alias"  # TensorRT's outputs leave these out
        self.names = [*self.inputs, *(name for name in declared.outputs if not (aliased and name in hidden))]
        self.num_io_tensors = len(self.names)

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_mode(self, name):
        return Mode.INPUT if name in self.inputs else Mode.OUTPUT

    def get_device_memory_size_for_profile_v2(self, profile):
        return self.scratch + profile

    def create_execution_context(self, strategy):
        assert strategy == 2
        self.contexts.append(Context(self))
        return self.contexts[-1]


class Context:
    """An IExecutionContext."""

    def __init__(self, engine):
        self.engine, self.shapes, self.addresses, self.profile, self.memory = engine, {}, {}, None, 0

    def set_device_memory(self, address, size):
        assert address % 256 == 0 and size >= Engine.scratch + 1
        self.memory = address

    def set_optimization_profile_async(self, profile, stream):
        self.profile = profile
        return True

    def set_input_shape(self, name, shape):
        config, named = self.engine.config, [size.dim_param for size in self.engine.inputs[name].shape.dim]
        rows, least, most = (
            (config.max_batch, 1, config.step_tokens)
            if self.profile == 0
            else (1, config.step_tokens + 1, config.max_prefill_tokens)
        )
        for size, param in zip(shape, named, strict=True):
            assert {"B": size == rows, "S": least <= size <= most}.get(param, True), (name, shape)
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name, address):
        assert address and name in self.engine.names
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        """Every output goes to its address; what an input's twin has must be the input's own."""
        engine = self.engine
        assert self.memory and set(self.addresses) == set(engine.names)
        given = {}
        for name, tensor in engine.inputs.items():
            shape = self.shapes.get(name) or [size.dim_value for size in tensor.shape.dim]
            given[name] = array(self.addresses[name], shape, NUMPY[tensor.elem_type])
        outputs = engine.graph(**given)
        for name, values in outputs.items():
            twin = name.removeprefix("new_")
            address = self.addresses.get(name, self.addresses.get(twin))
            assert address == self.addresses.get(twin, address), name
            array(address, values.shape, values.dtype)[...] = values
        return True


def array(address, shape, dtype):
    """The memory at an address."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("state_io", ["alias", "same_pointer", "host_pointer"])
def test_bound_in_place(tmp_path, state_io, monkeypatch):
    """Steps of both widths, prompt chunks into rows of the caches, the MTP graph: the reference executor's texts. There
    are three contexts a graph, whatever is run."""
    config = replace(CONFIG, state_io=state_io)
    build(TINY, tmp_path / "engine", config, plans=False)
    made = read(tmp_path / "engine")
    engines = {graph: Engine(tmp_path / "engine" / name, config) for graph, name in MODELS.items()}
    log = SimpleNamespace(first_error=lambda: "")
    plans = SimpleNamespace(trt=TRT, log=log, bundle=made, engines=engines)
    expected = EngineRunner(tmp_path / "engine", executor="reference", speculation="mtp")
    bound = engine_runner._executor("reference", tmp_path / "engine", made)[1]
    monkeypatch.setattr(engine_runner, "_executor", lambda *_: (lambda memory: TensorRTExecutor(plans, memory), bound))
    given = EngineRunner(tmp_path / "engine", speculation="mtp")
    params = [SamplingParams(max_tokens=20, draft_tokens=0)] + [SamplingParams(max_tokens=20)] * 4
    for prompts, knobs in ((PROMPTS[:1], params[:1]), (PROMPTS[:5], params)):
        one, other = (e.generate(prompts, knobs) for e in (given, expected))
        assert [(t.tokens, t.steps) for t in one] == [(t.tokens, t.steps) for t in other]
    assert {graph: [c.profile for c in engine.contexts] for graph, engine in engines.items()} == {
        "model": [1, 0, 0],
        "mtp": [1, 0, 0],
    }


def test_refused_execution(tmp_path, monkeypatch):
    """Carries TensorRT's first error."""
    build(TINY, tmp_path / "engine", CONFIG, plans=False)
    made = read(tmp_path / "engine")
    engines = {"model": Engine(tmp_path / "engine" / "model.onnx", CONFIG)}
    plans = SimpleNamespace(
        trt=TRT, log=SimpleNamespace(first_error=lambda: "no such kernel"), bundle=made, engines=engines
    )
    bound = engine_runner._executor("reference", tmp_path / "engine", made)[1]
    monkeypatch.setattr(engine_runner, "_executor", lambda *_: (lambda memory: TensorRTExecutor(plans, memory), bound))
    monkeypatch.setattr(Context, "execute_async_v3", lambda self, stream: False)
    with pytest.raises(RuntimeError, match="model.engine: execution refused: no such kernel"):
        EngineRunner(tmp_path / "engine").generate(["So"], SamplingParams(max_tokens=2))


# ---- what is missing -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An engine folder with plans of TensorRT-RTX."""
    if not RTX:
        pytest.skip("needs TensorRT-RTX")
    path = tmp_path_factory.mktemp("built") / "engine"
    code = "from trtllm_replayssm import cli; import sys; sys.exit(cli.main(sys.argv[1:]))"
    sizes = "--max-batch 2 --max-seq-len 64 --max-prefill-tokens 16 --json".split()
    arguments = ["build", "--checkpoint", str(TINY), "--output", str(path), *sizes]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, timeout=240)
    return path


def resealed(folder, target, files=None, **changes):
    """A copy with other content in some files, whose config.json agrees with them, and with these attributes."""
    copy = shutil.copytree(folder, target)
    for name, data in (files or {}).items():
        (copy / name).write_bytes(data)
    bundle.seal(copy, replace(read(folder), **changes))
    return copy


def said(*folders, before="", cwd=None):
    """What a fresh process says that makes a runner of each folder; `before` may change this machine."""
    code = (
        "import sys\nfrom trtllm_replayssm import gpus, plugins\nfrom trtllm_replayssm.gpus import GPU\n"
        f"{dedent(before)}\nfrom trtllm_replayssm.runtime import EngineRunner\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n        EngineRunner(folder)\n"
        "    except ValueError as error:\n        print(type(error).__name__, error, sep=': ')\n"
        "import os; sys.stdout.flush(); os._exit(0)\n"
    )
    with tempfile.TemporaryDirectory() as temporary:  # a process that ends so cleans nothing up
        child = subprocess.run(
            [sys.executable, "-c", code, *map(str, folders)],
            cwd=cwd,
            env={**os.environ, "TMPDIR": temporary},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


def test_fresh_process(folder, tmp_path):
    """A34: in another directory, by the public entry point. The folder's own plugin library goes into TensorRT's
    registry; then a GPU is missing."""
    spy = """
        register = plugins.register

        def spy(registry, library):
            register(registry, library)
            print(library, plugins.missing(registry))

        plugins.register = spy
    """
    loaded, refused = said(folder, before=spy, cwd=tmp_path)
    assert loaded == f"{folder / bundle.LIBRARY} []"
    assert refused == (
        f"ExecutorError: the plans of tensorrt_rtx {read(folder).plan.version} need an RTX GPU of compute capability "
        "8.x or 12.x; found no GPU"
    )


def test_what_is_not_there(folder, tmp_path):
    """A34, A39: the plugin library, its plugins, that version of TensorRT, and another TensorRT altogether."""
    plan = read(folder).plan
    gone = shutil.copytree(folder, tmp_path / "gone")
    (gone / bundle.LIBRARY).unlink()
    foreign = Path(importlib.util.find_spec("_ctypes").origin).read_bytes()
    lines = said(
        gone,
        resealed(folder, tmp_path / "other", {bundle.LIBRARY: foreign}),
        resealed(folder, tmp_path / "older", plan=replace(plan, version="1.6.0.1")),
        resealed(folder, tmp_path / "full", plan=replace(plan, tensorrt="tensorrt", version="10.15.1")),
        before="sys.modules['tensorrt'] = None",
    )
    names = "ReplaySsmPlan, ReplayCausalConv, ReplaySsmFlush, ReplaySsmStep, namespace trtllm_replayssm, version 1"
    assert lines[0].startswith("BundleError: ") and lines[0].endswith(f"it has the plugins {names}")
    named = "ExecutorError: plugin ReplaySsmPlan, namespace trtllm_replayssm, version 1: not in the registry after "
    assert lines[1].startswith(named) and bundle.LIBRARY in lines[1]
    assert f"made by tensorrt_rtx 1.6.0.1, and need it to run; found tensorrt_rtx {plan.version}" in lines[2]
    assert "its plans were made by tensorrt 10.15.1, and need it to run: " in lines[3]
    assert f"TensorRT packages here: tensorrt_rtx {plan.version}" in lines[3]


def test_no_tensorrt(folder):
    hidden = """
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: None if "rtx" in name else find(name, *more)
    """
    (line,) = said(folder, before=hidden)
    assert "no package tensorrt_rtx is installed (pip install" in line and line.count("tensorrt_rtx") == 2


def test_plans(folder, tmp_path):
    """A39: a library without CUDA ops; plans that config.json takes and TensorRT does not; and one that is good, whose
    loading ends where the driver is missing."""
    with_gpu = """
        import torch
        torch.cuda.is_available = lambda: True
        gpus.found = lambda: [GPU("NVIDIA GeForce RTX 5090", (12, 0))]
    """
    folders = [resealed(folder, tmp_path / "host", plugins_have_cuda=False)]
    for name, data in (("empty", b""), ("foreign", b"\x7fELF" + bytes(range(256)) * 40)):
        folders.append(resealed(folder, tmp_path / name, {"model.engine": data}, plugins_have_cuda=True))
    folders.append(resealed(folder, tmp_path / "good", plugins_have_cuda=True))
    lines = [line for line in said(*folders, before=with_gpu) if line.startswith("ExecutorError: ")]
    assert "libtrtllm_replayssm_plugins.so of this engine folder has no CUDA ops" in lines[0]
    for line, path in zip(lines[1:3], folders[1:3], strict=True):
        assert line == f"ExecutorError: {path}/model.engine: no plan of this TensorRT, or a damaged one"
    assert lines[3].startswith(f"ExecutorError: {folders[3]}/model.engine: TensorRT cannot load it: ")
    assert "CUDA driver" in lines[3]


def test_plan_of_another_graph(tmp_path):
    """One that has the right hash, and other tensors."""
    build(TINY, tmp_path / "engine", CONFIG, plans=False)
    head = Engine(tmp_path / "engine" / "mtp.onnx", CONFIG)
    expected = dict.fromkeys(Engine(tmp_path / "engine" / "model.onnx", CONFIG).names)
    with pytest.raises(ExecutorError, match="model.engine: a plan of another graph: accepted is in config.json only"):
        _require_tensors(tmp_path / "model.engine", head, expected)
    _require_tensors(tmp_path / "mtp.engine", head, dict.fromkeys(head.names))


def plan_of(tensorrt, targets=(), gpu=None):
    plan = Plan(tensorrt, "1.2.3", tuple(targets), gpu, {}, {}, 0)
    return SimpleNamespace(plan=plan, plugins_have_cuda=True)


@pytest.mark.parametrize(
    "plan, found, message",
    [
        (plan_of("tensorrt_rtx"), [], "an RTX GPU of compute capability 8.x or 12.x; found no GPU"),
        (plan_of("tensorrt_rtx"), [H200], r"8.x or 12.x; found NVIDIA H200 \(compute capability 9.0\)"),
        (
            plan_of("tensorrt_rtx", ["SM86", "SM89"]),
            [RTX_5090],
            r"capability 8.6, 8.9; found NVIDIA GeForce RTX 5090 \(c",
        ),
        (
            plan_of("tensorrt", gpu=H200),
            [RTX_5090],
            r"like that on which they were built, NVIDIA H200 \(.* 9.0\); found",
        ),
        (plan_of("tensorrt", gpu=H200), [], "found no GPU"),
    ],
)
def test_wrong_gpu(plan, found, message):
    """A39."""
    with pytest.raises(ExecutorError, match=message):
        _require_gpu(plan, found)


def test_right_gpu(monkeypatch):
    monkeypatch.setattr(tensorrt_executor.torch.cuda, "is_available", lambda: True)
    _require_gpu(plan_of("tensorrt_rtx"), [RTX_5090, H200])
    _require_gpu(plan_of("tensorrt_rtx", ["SM86", "SM120"]), [RTX_5090])
    _require_gpu(plan_of("tensorrt", gpu=H200), [replace(H200, name="NVIDIA H200 NVL")])
    monkeypatch.setattr(tensorrt_executor.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ExecutorError, match="but torch .* cannot use it"):
        _require_gpu(plan_of("tensorrt", gpu=H200), [H200])


def test_gpus_of_this_machine():
    """What torch finds, if it has CUDA; JSON takes it and gives it back."""
    import torch

    from trtllm_replayssm import gpus

    found = gpus.found()
    if torch.cuda.is_available():
        assert [gpu.capability for gpu in found] == [
            torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
        ]
    raw = json.loads(json.dumps({"gpu": {"name": H200.name, "capability": list(H200.capability)}, "targets": []}))
    assert (
        bundle._plan_of(raw | dict(tensorrt="t", version="v", activation_bytes={}, seconds={}, peak_bytes=0)).gpu
        == H200
    )
