# SPDX-License-Identifier: Apache-2.0
"""Engine folders, made by `trtllm-replayssm build` with TensorRT-RTX in a process of its own, and what is refused."""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import onnx
import pytest

from trtllm_replayssm import SlotLayout, _core, builder, cli
from trtllm_replayssm.builder import BundleError, EngineConfig, EngineError, build, bundle, read, tensorrt_package
from trtllm_replayssm.builder.decoder import export
from trtllm_replayssm.builder.engine import Layer
from trtllm_replayssm.runtime import CheckpointError
from trtllm_replayssm.runtime.model_config import ATTENTION, MAMBA

from ..runtime.conftest import SMALL, TINY, write_checkpoint
from .test_evaluation import VARIANTS

RTX = all(importlib.util.find_spec(f"tensorrt_rtx_{part}") for part in ("bindings", "libs"))
needs_rtx = pytest.mark.skipif(not RTX, reason="needs TensorRT-RTX: pip install 'trtllm-replayssm[rtx]'")
SMALL_ENGINE = EngineConfig(max_batch=2, max_seq_len=128, max_prefill_tokens=32, draft_tokens=3)


def command(*arguments):
    """A child process, since a plugin or a parser may end one."""
    child = subprocess.run(
        [sys.executable, "-m", "trtllm_replayssm", *map(str, arguments)], capture_output=True, text=True, timeout=240
    )
    return child.returncode, child.stdout, child.stderr


def built(checkpoint, folder, *more):
    sizes = ("--max-batch", 4, "--max-seq-len", 1024, "--draft-tokens", 3, "--json")
    code, out, error = command("build", "--checkpoint", checkpoint, "--output", folder, *sizes, *more)
    assert code == 0, error
    longest = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    warning = f"trtllm-replayssm: warning: max_seq_len is 1024, but {checkpoint} was made for at most {longest} tokens"
    assert error == ("" if longest >= 1024 else f"{warning} (max_position_embeddings)\n")
    return json.loads(out)


def layers(folder, name):
    return [Layer(**row) for row in json.loads((folder / "layers.json").read_text())[name]]


def types_of(listed, name):
    """Dtypes of the inputs and outputs of a node that has a layer of its own, the same in both profiles."""
    (types,) = {(*layer.inputs, "->", *layer.outputs) for layer in listed if layer.nodes == [name]}
    return " ".join(types)


@needs_rtx
@pytest.mark.parametrize("state_io", ["alias", "same_pointer", "host_pointer"])
@pytest.mark.parametrize("model", ["tiny", "nano"])
def test_build(tmp_path, nano, model, state_io):
    """A38: from the builder's own list: every plugin node stands in the engine once a profile, nothing is copied."""
    folder = tmp_path / "engine"
    report = built(TINY if model == "tiny" else nano, folder, "--state-io", state_io)
    kinds = report["model"]["layers"]
    names = ["plan"] + [
        f"backbone.layers.{index}.mixer.{part}"
        for index, kind in enumerate(kinds)
        if kind == MAMBA
        for part in ("conv", "flush", "step")
    ]
    assert len(names) == 1 + 3 * kinds.count(MAMBA) and (model == "tiny" or len(names) == 82)
    listed = layers(folder, "model")
    expected = "PluginV3" if state_io == "alias" else "custom_layer"
    for name in names:
        assert [layer.kind for layer in listed if name in layer.nodes] == [expected] * 2, name
    assert not {"copy", "reformat", "Reformat"} & {layer.kind for layer in listed}
    if state_io == "alias":
        plugins = [layer.plugin for layer in listed if layer.kind == "PluginV3"]
        assert all("max_step_tokens=4" in plugin and "activation=bf16" in plugin for plugin in plugins)
        mixer = "backbone.layers.0.mixer."
        assert types_of(listed, "plan") == "Int32 Int32 Int32 Int32 Int32 -> Int32 Int32 Int32"
        assert types_of(listed, mixer + "conv") == "Int32 Int32 BFloat16 BFloat16 BFloat16 Int32 -> BFloat16 Int32"
        assert types_of(listed, mixer + "flush") == "Int32 Int32 Float Int32 -> Int32"
        assert types_of(listed, mixer + "step") == (
            "Int32 Int32 BFloat16 BFloat16 Float Float Float Int32 -> BFloat16 Int32"
        )

    bindings = report["bindings"]["model"]
    state = ["INT64", [1]] if state_io == "host_pointer" else ["INT32", [4, report_slot_words(report)]]
    assert [bindings[f"state.{layer}"] for layer in range(kinds.count(MAMBA))] == [
        ["input", *state] for _ in range(kinds.count(MAMBA))
    ]
    assert ("new_state.0" in bindings) == (state_io == "same_pointer")
    cache = ["BF16", [-1, 2, 1040, 64]]
    for layer in range(kinds.count(ATTENTION)):
        assert bindings[f"key_cache.{layer}"] == ["input", *cache]
        assert bindings[f"new_value_cache.{layer}"] == ["output", *cache]
    assert bindings["logits"] == ["output", "FLOAT", [-1, -1, 1024]]
    assert bindings["hidden_states"] == ["output", "BF16", [-1, -1, 256]]
    assert ("mtp" in report["bindings"]) == (model == "tiny")
    # Weights stand in the plan once, not once a profile, and are never there twice in memory but as pages of files.
    assert report["files"]["model.engine"]["bytes"] < report["files"]["weights.bin"]["bytes"] + 50e6
    assert report["plan"]["seconds"]["model"] > 0 and 1e8 < report["plan"]["peak_bytes"] < 2e9


def report_slot_words(report):
    bundle_ = bundle._from_json({key: value for key, value in report.items() if key in bundle.Bundle.__annotations__})
    return SlotLayout(bundle_.geometry, bundle_.engine.replay).slot_stride // 4


@needs_rtx
def test_what_checkpoints_may_ask_for(tmp_path):
    """Groups of experts, a latent width, biases, one group of channels, tied embeddings, odd sizes."""
    asked = {key: value for variant in VARIANTS.values() for key, value in variant.items()}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SMALL | asked)
    built(checkpoint, tmp_path / "engine")
    assert [layer.kind for layer in layers(tmp_path / "engine", "model")].count("PluginV3") == 2 * (1 + 3 * 3)


@needs_rtx
def test_trt_attention(tmp_path):
    built(TINY, tmp_path / "engine", "--trt-attention")
    attention = [
        layer for layer in layers(tmp_path / "engine", "model") if "backbone.layers.3.mixer.attention" in layer.nodes
    ]
    assert attention and not any("rows/mask" in layer.nodes for layer in attention)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine folder of the shipped checkpoint."""
    if not RTX:
        pytest.skip("needs TensorRT-RTX")
    folder = tmp_path_factory.mktemp("built") / "engine"
    built(TINY, folder)
    return folder


def test_inspect(engine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, error = command("inspect", engine, "--memory", "1GB", "--json")
    report = json.loads(out)
    assert (code, error) == (0, "")
    layout = SlotLayout(read(engine).geometry, read(engine).engine.replay)
    assert report["state_bytes_per_slot"] == 3 * layout.slot_stride
    assert report["kv_bytes_per_sequence"] == 2 * 2 * 2 * 1040 * 64 * 2  # K and V, of two layers with the MTP head
    tokens = 2 * (4 * 1024 + 2 * 256)  # logits and hidden states of both graphs
    each = report["state_bytes_per_slot"] + report["kv_bytes_per_sequence"] + 4 * tokens
    plans = sum(report["files"][name]["bytes"] for name in ("model.engine", "mtp.engine"))
    contexts = 2 * sum(report["plan"]["activation_bytes"].values())
    assert report["concurrency"] == (10**9 - plans - contexts - 512 * tokens) // each > 100
    code, out, error = command("inspect", engine, "--memory", "24GiB", "--layers")
    assert (code, error) == (0, "")
    for text in (
        "3 mamba, 1 mlp, 1 attention, 1 moe",
        "4 rows of 1..4 tokens",
        "plugins: 20, of 10 nodes",
        "PluginV3       backbone.layers.0.mixer.flush: Int32 Int32 Float Int32 -> Int32 ReplaySsmFlush: num_heads=8",
        "input  BF16  key_cache.0",
        "RTX GPUs, 8.x and 12.x",
        "this engine has slots for 4",
    ):
        assert text in out


def test_plans_made_anew(engine, tmp_path):
    """What the script for another machine calls: the same models, this machine's TensorRT and plugin library."""
    assert "--from" in (engine / "build-on-gpu.sh").read_text()
    code, _, error = command("build", "--from", engine, "--output", tmp_path / "again", "--target", "SM120")
    assert code == 0, error
    one, other = read(engine), read(tmp_path / "again")
    assert other == replace(one, plan=other.plan, files=other.files) and other.plan.targets == ("SM120",)
    assert other.files["weights.bin"] == one.files["weights.bin"]
    code, _, error = command("build", "--from", engine, "--output", tmp_path / "third", "--target", "SM100")
    assert (code, list(tmp_path.glob("*third*"))) == (2, []) and "target: expected one of SM" in error
    code, _, error = command("build", "--from", engine, "--output", tmp_path / "third", "--seed", 1)
    assert code == 2 and "--seed: the engine folder of --from says that already" in error


FAULTS = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "model.engine: truncated: has .* bytes"),
    "foreign": (lambda path: path.write_bytes(b"x" * path.stat().st_size), "model.engine: not the file that was made"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "model.engine: another file: has .* bytes"),
    "missing": (lambda path: path.unlink(), "model.engine: no such file, but config.json lists it"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_spoilt_files(engine, tmp_path, fault):
    """A39."""
    spoil, message = FAULTS[fault]
    folder = shutil.copytree(engine, tmp_path / "engine")
    spoil(folder / "model.engine")
    with pytest.raises(BundleError, match=message):
        read(folder)


def test_spoilt_configs(tmp_path, monkeypatch):
    """A39: each fault of config.json has its own message."""
    monkeypatch.setattr(tensorrt_package, "find", no_tensorrt)
    build(TINY, tmp_path / "engine", SMALL_ENGINE)
    path = tmp_path / "engine" / "config.json"
    raw = json.loads(path.read_text())
    changed = "config.json: changed or damaged since the engine was made"

    def sealed(**changes):
        rest = {key: value for key, value in (raw | changes).items() if key != "sha256"}
        return json.dumps(rest | {"sha256": bundle._seal_of(rest)})

    def refused(text, message):
        path.write_text(text)
        with pytest.raises(BundleError, match=message):
            read(tmp_path / "engine")

    refused("{", "config.json: not readable as JSON")
    refused("9" * 5000, "config.json: not readable as JSON")
    refused((TINY / "config.json").read_text(), "config.json: has no key 'format'")
    refused("[" * 100000, "config.json: not readable as JSON")
    for found in (99, "3", True):
        refused(json.dumps(raw | {"format": found}), f"config.json: of format {found!r}, expected 3: build the engine")
    for key in raw.keys() - {"format"}:
        refused(json.dumps({other: value for other, value in raw.items() if other != key}), changed)
        for value in (None, [], {}, "x"):
            if value != raw[key]:
                refused(json.dumps(raw | {key: value}), changed)
    refused(json.dumps(raw | {"engine": raw["engine"] | {"max_batch": 3}}), changed)
    code, out, error = command("build", "--from", tmp_path / "engine", "--output", tmp_path / "again")
    assert (code, out, error.count("\n")) == (2, "", 1) and changed in error and "Traceback" not in error
    # Folders of other versions.
    refused(sealed(layout_version=1, model={}), f"layout version 1, this installation's {_core.LAYOUT_VERSION}")
    for found in (str(_core.LAYOUT_VERSION), None, True):
        refused(sealed(layout_version=found), f"config.json: layout_version is {found!r}, expected an integer")
    refused(sealed(model={}), "config.json: KeyError: 'layers'")
    refused(sealed(files=raw["files"] | {"../x": {}}), "'../x' is not a plain file name")
    for name in ("model.onnx", "mtp.onnx", "weights.bin", "libtrtllm_replayssm_plugins.so"):
        rest = {other: entry for other, entry in raw["files"].items() if other != name}
        refused(sealed(files=rest), f"'files' does not list {name}")
    path.write_text(sealed())
    assert read(tmp_path / "engine").files == raw["files"]
    with pytest.raises(BundleError, match="no such file; an engine folder is what `trtllm-replayssm build` makes"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "weights.bin"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_files_that_are_none(tmp_path, name, make):
    """A pipe, which would be waited for, and a folder."""
    build(TINY, tmp_path / "engine", replace(SMALL_ENGINE, dtype="float32"), plans=False)
    (tmp_path / "engine" / name).unlink()
    make(tmp_path / "engine" / name)
    code, out, error = command("inspect", tmp_path / "engine")
    assert (code, out) == (2, "")
    assert error == f"trtllm-replayssm: error: {tmp_path / 'engine' / name}: not a regular file\n"


def test_checkpoint_files_that_are_none(tmp_path, monkeypatch):
    """Refused before anything is written: a garbage tokenizer, and what is no file."""
    monkeypatch.setattr(tensorrt_package, "find", no_tensorrt)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SMALL)

    def refused(message):
        with pytest.raises(CheckpointError, match=message):
            build(checkpoint, tmp_path / "engine", SMALL_ENGINE)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]

    (checkpoint / "tokenizer.json").write_text('{"model": "garbage"}')
    refused("checkpoint/tokenizer.json: not a tokenizer: ")
    (checkpoint / "tokenizer.json").unlink()
    os.mkfifo(checkpoint / "tokenizer.json")
    refused("checkpoint/tokenizer.json: not a regular file")
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "config.json").write_text("[" * 100_000)
    refused("checkpoint/config.json: not readable as JSON: ")
    (checkpoint / "config.json").unlink()
    os.mkfifo(checkpoint / "config.json")
    refused("checkpoint/config.json: not a regular file")


def no_tensorrt():
    raise tensorrt_package.NoTensorRT("no TensorRT is installed: pip install …")


def test_without_tensorrt(tmp_path, monkeypatch):
    """Everything but the plans."""
    monkeypatch.setattr(tensorrt_package, "find", no_tensorrt)
    report = build(TINY, tmp_path / "engine", SMALL_ENGINE)
    assert report.missing.startswith("no TensorRT is installed")
    made = read(tmp_path / "engine")
    assert made == report.bundle and made.plan is None
    assert sorted(made.files) == [
        "build-on-gpu.sh",
        "libtrtllm_replayssm_plugins.so",
        "model.onnx",
        "mtp.onnx",
        "tokenizer.json",
        "weights.bin",
    ]
    with pytest.raises(tensorrt_package.NoTensorRT):
        builder.rebuild(tmp_path / "engine", tmp_path / "again")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(tensorrt_package.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tensorrt_package.NoTensorRT, match=r"pip install 'trtllm-replayssm\[rtx\]'"):
        tensorrt_package.find()


UNUSABLE = {
    "import": ("raise ImportError('libnvinfer.so.10: cannot open')", "ImportError: libnvinfer.so.10: cannot open"),
    "library": ("raise OSError('not an ELF file')", "OSError: not an ELF file"),
    "builder": (
        "class Logger:\n INTERNAL_ERROR = 0\n def __init__(self, _): pass\n"
        "def Builder(_): raise TypeError('factory function returned nullptr')",
        "TypeError: factory function returned nullptr",
    ),
    "old": (
        "__version__ = '10.3.0'\nclass Logger:\n INTERNAL_ERROR = 0\n def __init__(self, _): pass\n"
        "def Builder(_): pass",
        "tensorrt 10.3.0 is installed, expected 10.15 or later",
    ),
}


@pytest.mark.parametrize("fault", UNUSABLE)
@pytest.mark.parametrize("other", [pytest.param(True, marks=needs_rtx), False])
def test_unusable_tensorrt(tmp_path, monkeypatch, fault, other):
    """Is none: TensorRT-RTX builds, else the reason is told."""
    source, message = UNUSABLE[fault]
    (tmp_path / "tensorrt.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # so that the one of this test goes with it
    del sys.modules["tensorrt"]
    if not other:
        known = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "_rtx" in name else known(name))
        with pytest.raises(tensorrt_package.NoTensorRT, match=message):
            tensorrt_package.find()
        return
    code, out, error = child("from trtllm_replayssm.builder.tensorrt_package import find; print(find().name)")
    assert (code, out) == (0, "tensorrt_rtx\n"), error
    assert "UserWarning: tensorrt" in error and "tensorrt_rtx builds instead" in error


def test_script(tmp_path, monkeypatch):
    """Says what is missing before anything is built; the printed command is one that a shell takes."""
    monkeypatch.setattr(tensorrt_package, "find", no_tensorrt)
    folder = tmp_path / "an engine"
    build(TINY, folder, SMALL_ENGINE)
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")

    def run(*arguments):
        script = ["sh", str(folder / "build-on-gpu.sh"), *map(str, arguments)]
        done = subprocess.run(script, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    assert run() == (2, f"usage: sh {folder}/build-on-gpu.sh NEW_FOLDER\n")
    (tmp_path / "tensorrt.py").write_text("raise ImportError('no libnvinfer')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, text = run(tmp_path / "new")
    assert code == 2 and "build-on-gpu.sh: error: import tensorrt: no libnvinfer" in text
    if not _core.has_cuda():
        (tmp_path / "tensorrt.py").write_text("")
        code, text = run(tmp_path / "new")
        assert code == 2 and "error: trtllm-replayssm was installed without CUDA ops" in text
    assert not (tmp_path / "new").exists()


def test_drafts_without_a_head(tmp_path, monkeypatch, capsys):
    """Told by build; inspect tells a head that is not there from one that was not asked for."""
    monkeypatch.setattr(tensorrt_package, "find", no_tensorrt)
    headless = write_checkpoint(tmp_path / "headless", SMALL | {"num_nextn_predict_layers": 0})
    sizes = ["--max-batch", "2", "--max-seq-len", "64"]
    for checkpoint, drafts, told, head in ((headless, "3", True, "none"), (TINY, "0", False, "not exported")):
        folder = str(tmp_path / f"an engine {drafts}")
        arguments = ["build", "--checkpoint", str(checkpoint), "--output", folder, "--draft-tokens", drafts, *sizes]
        assert cli.main(arguments) == 2
        out = capsys.readouterr().out
        assert ("has no MTP head: drafts must come from elsewhere" in out) == told
        assert f"sh {shlex.quote(folder + '/build-on-gpu.sh')} NEW_FOLDER" in out
        assert cli.main(["inspect", folder]) == 0
        assert f"MTP head   {head}\n" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing(tmp_path, number):
    arguments = ["build", "--checkpoint", TINY, "--output", tmp_path / "engine", "--max-seq-len", 64]
    process = subprocess.Popen([sys.executable, "-m", "trtllm_replayssm", *map(str, arguments)])
    until = time.monotonic() + 60
    while not list(tmp_path.glob(".engine.*")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert list(tmp_path.glob(".engine.*"))
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_output_is_new_and_whole(tmp_path, monkeypatch):
    """Nothing is left of a folder that could not be finished, and none is written over."""
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there: is there already, expected a new folder"):
        build(TINY, tmp_path / "there", SMALL_ENGINE)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="link: is there already, expected a new folder"):
        build(TINY, tmp_path / "link", SMALL_ENGINE)

    def fails(*_):
        raise EngineError("no")

    monkeypatch.setattr(bundle, "seal", fails)
    with pytest.raises(EngineError):
        build(TINY, tmp_path / "new", SMALL_ENGINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


REFUSED = {
    "max_batch": (0, r"max_batch: expected 1\.\."),
    "max_seq_len": (2**31 - 64, r"max_seq_len: expected 2\.\.16777216, got 2147483584"),
    "draft_tokens": (16, r"draft_tokens: expected 0\.\.15, got 16"),
    "window": (2, "max_step_tokens"),
    "max_prefill_tokens": (4, "expected more than the 4 tokens of a step"),
    "dtype": ("int8", "dtype: expected one of float32, bfloat16, float16, got 'int8'"),
    "state_io": ("copy", "state_io: expected one of alias, same_pointer, host_pointer, got 'copy'"),
    "checkpoint_format": ("fp4", "checkpoint: expected one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_sizes(name):
    value, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        replace(SMALL_ENGINE, **{name: value})


def test_chunks_are_no_longer_than_sequences():
    assert EngineConfig(max_seq_len=100).max_prefill_tokens == 100
    assert EngineConfig(max_seq_len=4096).max_prefill_tokens == 512


def test_refused_checkpoints(tmp_path):
    """MoE of more than 16 experts, unless asked for; an MTP head with Mamba layers."""
    many = write_checkpoint(tmp_path / "many", SMALL | {"n_routed_experts": 18})
    with pytest.raises(CheckpointError, match=r"MoE layers of 18 experts, expected at most 16: .* 9\.0 times"):
        export(many, tmp_path, SMALL_ENGINE)
    assert not (tmp_path / "weights.bin").exists()
    export(many, tmp_path, replace(SMALL_ENGINE, allow_dense_moe=True))
    assert (tmp_path / "weights.bin").exists()
    head = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M*"}
    mamba = write_checkpoint(tmp_path / "mamba", SMALL | head)
    with pytest.raises(CheckpointError, match="MTP layers are mamba, attention; expected one MTP layer, without Mamba"):
        export(mamba, tmp_path / "none", SMALL_ENGINE)


def test_dtype_without_attention(tmp_path):
    config = replace(SMALL_ENGINE, dtype="float32")
    with pytest.raises(ValueError, match="dtype: expected bfloat16 or float16, got 'float32'"):
        build(TINY, tmp_path / "engine", config)
    report = build(TINY, tmp_path / "engine", config, plans=False)
    assert (report.missing, report.bundle.plan) == (None, None)
    with pytest.raises(ValueError, match="dtype: expected bfloat16 or float16, got 'float32'"):
        builder.rebuild(tmp_path / "engine", tmp_path / "again")


@needs_rtx
def test_refused_before_the_export(tmp_path):
    """What this TensorRT cannot take is told before anything is written."""
    refused = {
        "--timing-cache timings": "timing cache: of the full TensorRT only, tensorrt_rtx 1.",
        "--target SM100": "target: expected one of SM",
        "--no-plans --target SM120": "target: of plans, and none are asked for",
        "--no-plans --timing-cache timings": "timing cache: of plans, and none are asked for",
    }
    code, out, error = child(
        "import trtllm_replayssm.builder.decoder as d; d.export = None; from trtllm_replayssm import cli; "
        "print([cli.main(['build', *sys.argv[1:5], *more.split()]) for more in sys.argv[5:]])",
        *("--checkpoint", TINY, "--output", tmp_path / "engine"),
        *refused,
    )
    assert (code, out, list(tmp_path.iterdir())) == (0, "[2, 2, 2, 2]\n", []), error
    for line, message in zip(error.splitlines(), refused.values(), strict=True):
        assert message in line


def child(code, *arguments):
    """Runs Python in a process of its own: exit code, stdout, stderr."""
    code = "import json, sys; from pathlib import Path; from trtllm_replayssm.builder import *; " + code
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@needs_rtx
def test_cache_rows_are_those_of_the_batch(tmp_path):
    """A cache of other rows builds without complaint: the builder must refuse it."""
    export(TINY, tmp_path, SMALL_ENGINE)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        if "_cache." in value.name:
            value.type.tensor_type.shape.dim[0].dim_param = "slots"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    code, _, error = child(
        "from trtllm_replayssm.builder import engine, tensorrt_package; folder = Path(sys.argv[1]); "
        "engine.build_engine(tensorrt_package.find(), folder / 'model.onnx', folder / 'plan', engine.Sizes(2, 4, 32), "
        "aliased=True)",
        tmp_path,
    )
    assert code == 1 and error.splitlines()[-1].endswith(
        "EngineError: model.onnx: key_cache.0 has slots rows, expected those of the batch, B"
    )


@needs_rtx
def test_progress(tmp_path):
    """Every phase, of the export and of TensorRT, counts up to its end."""
    code, out, error = child(
        "seen = []; build(*sys.argv[1:], EngineConfig(max_batch=2, max_seq_len=64), "
        "progress=lambda *step: seen.append(step)); print(json.dumps(seen))",
        TINY,
        tmp_path / "engine",
    )
    assert code == 0, error
    phases = {}
    for phase, done, total in json.loads(out):
        assert 0 <= done <= total
        phases[phase] = total - done
    assert list(phases)[0] == "writing model" and len(phases) > 3 and not any(phases.values())
