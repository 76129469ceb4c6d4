# SPDX-License-Identifier: Apache-2.0
"""What may go wrong while TensorRT-RTX builds a plan: its bindings swallow the exceptions of callbacks, and go on.

Each case builds a small graph without plugins in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from textwrap import dedent

import onnx
import pytest
from onnx import TensorProto, helper

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="needs TensorRT-RTX: pip install 'trtllm-replayssm[rtx]'",
)

BEGINNING = """
import json, os, resource, signal, sys
from pathlib import Path
from trtllm_replayssm.builder import engine, tensorrt_package

signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may have it ignored
PLAN, earlier = Path("model.plan"), signal.getsignal(signal.SIGINT)
made, rows, phases = engine.Log.of, [], []


def of(*given):
    log = made(*given)
    log.rows = rows
    return log


def build(plan=PLAN, progress=lambda *what: phases.append(what), **more):
    found, sizes = tensorrt_package.find(), engine.Sizes(4, 4, 32)
    return engine.build_engine(found, Path("model.onnx"), plan, sizes, aliased=True, progress=progress, **more)


def fault():
    return None


engine.Log.of, result = of, None
"""
END = """
try:
    result = build(**(fault() or {}))
except BaseException as error:
    said = [type(error).__name__, str(error)]
else:
    said = [result.bindings["y"][1], len(result.layers)]
report = {"said": said, "plan": PLAN.stat().st_size if PLAN.exists() else None, "phases": phases}
report["messages"] = [message for _, message in rows]
report["restored"] = signal.getsignal(signal.SIGINT) is earlier
print(json.dumps(report), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """y = x w, in a folder of its own."""
    folder = tmp_path_factory.mktemp("model")
    x, y = (helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["B", 64]) for name in "xy")
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, [64, 64], [0.5] * 4096)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]), folder / "model.onnx")
    return folder


def built(folder, script=""):
    """Report of a child that builds, after `script`, where `fault` may give other arguments."""
    code = BEGINNING + dedent(script) + END
    with tempfile.TemporaryDirectory() as temporary:  # a process that ends so cleans nothing up
        child = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, "TMPDIR": temporary},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert report["restored"]
    return report


def refused(folder, script):
    """What is raised; no plan is left."""
    report = built(folder, script)
    assert report["plan"] is None
    return report["said"]


def test_sound(model):
    """What the cases below change one thing of."""
    report = built(model)
    assert report["said"][0] == "BF16" and report["said"][1] >= 2  # the product, once a profile
    assert report["plan"] > 64 * 64 * 2
    assert len(report["phases"]) > 3
    (model / "model.plan").unlink()


FAILING = """
class File:
    def __init__(self, file, good_calls):
        self.file, self.good, self.calls = file, good_calls, 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, data):
        self.calls += 1
        if self.calls > self.good:
            raise OSError(f"no space at call {self.calls}")
        return self.file.write(data)

"""


def test_failing_file(model):
    script = """
class Plan(type(PLAN)):
    def open(self, mode):
        return File(super().open(mode), 0)


def fault():
    return {"plan": Plan("model.plan")}
"""
    assert refused(model, FAILING + script) == ["OSError", "no space at call 1"]


def test_writes_after_a_failure(model):
    """TensorRT-RTX gives such a plan in one piece; more of them are written here. After the first failure, none is."""
    script = """
def fault():
    failures, file = engine.Failures(), File(open("pieces", "wb"), 1)
    writer = engine._writer(tensorrt_package.find().module, file, failures)
    written = [writer.write(b"abc") for _ in range(4)]
    file.good = 9
    assert [*written, writer.write(b"abc")] == [3, 0, 0, 0, 0] and file.calls == 2
    failures.raise_first()
"""
    assert refused(model, FAILING + script) == ["OSError", "no space at call 2"]


def test_full_disk(model):
    """The operating system's own limit, whose signal Python ignores."""
    script = """
        def fault():
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    """
    assert refused(model, script) == ["OSError", "[Errno 27] File too large"]


def test_lost_bytes(model):
    """A file that says it has written, and has not."""
    script = """
        class Plan(type(PLAN)):
            def open(self, mode):
                file = super().open(mode, buffering=0)
                class Losing:
                    __enter__ = lambda self: self
                    __exit__ = lambda self, *error: file.close()
                    write = lambda self, data: file.write(data[:-1]) + 1
                return Losing()

        def fault():
            return {"plan": Plan("model.plan")}
    """
    kind, message = refused(model, script)
    assert kind == "EngineError" and message.startswith("model.plan: has ") and "TensorRT wrote " in message


@pytest.mark.parametrize(
    "name, text, raised",
    [
        ("SIGINT", "Parsing node", ["KeyboardInterrupt", ""]),
        ("SIGINT", "Layers:", ["KeyboardInterrupt", ""]),
        ("SIGTERM", "Total Activation Memory", ["SystemExit", "143"]),
    ],
)
def test_signals(model, name, text, raised):
    """What their handlers raise while it parses, or builds, ends the build, and takes no row from the log."""
    script = f"""
        class Rows(list):
            def append(self, row):
                if {text!r} in row[1] and not any({text!r} in message for _, message in self):
                    os.kill(os.getpid(), signal.{name})
                super().append(row)

        rows = Rows()
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    """
    report = built(model, script)
    assert (report["said"], report["plan"]) == (raised, None)
    assert any(text in message for message in report["messages"])


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "BrokenPipeError"])
def test_failing_progress(model, error):
    """TensorRT is told to stop: it never comes to the plan's bytes."""
    script = f"""
        def fails(phase, done, total):
            phases.append((phase, done, total))
            if done == 1:
                raise {error}("stop")

        def fault():
            return {{"progress": fails}}
    """
    report = built(model, script)
    assert (report["said"], report["plan"]) == ([error, "stop"], None)
    whole = built(model)["phases"]
    (model / "model.plan").unlink()
    assert len(report["phases"]) < len(whole)


def test_no_layer_list(model):
    script = """
        class Rows(list):
            def append(self, row):
                if not row[1].startswith("Layers:"):
                    super().append(row)

        rows = Rows()
    """
    assert refused(model, script) == ["EngineError", "TensorRT did not list the layers"]


def test_timing_cache_of_rtx(model):
    kind, message = refused(model, "def fault(): return {'timing_cache': 'timings'}")
    assert kind == "EngineError" and message.startswith("timing cache: of the full TensorRT only, tensorrt_rtx 1.")
    assert not (model / "timings").exists()


def test_timing_cache_that_is_none(model):
    """None yet is an empty one, and written; something else stays as it is.

    What a foreign file would meet with the full TensorRT: RTX's bindings have its functions and messages still."""
    (model / "notes.txt").write_text("dear diary")
    script = """
        def fault():
            found = tensorrt_package.find()
            log = made(found, engine.Failures())
            builder = found.module.Builder(log)
            config = builder.create_builder_config()
            engine._read_timings(config, log, Path("timings"))
            engine._write_timings(config, Path("timings"))
            engine._read_timings(builder.create_builder_config(), log, Path("notes.txt"))
    """
    assert refused(model, script) == [
        "EngineError",
        "timing cache: notes.txt is not one of this TensorRT and this GPU",
    ]
    assert (model / "notes.txt").read_text() == "dear diary"
    assert [path.name for path in model.glob("timings*") if path.stat().st_size] == ["timings"]
