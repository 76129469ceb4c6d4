# SPDX-License-Identifier: Apache-2.0
"""convert, trtllm-model-file and trtllm-build on the command line, and the hook that registers the plugins."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_replayssm import cli, plugins
from trtllm_replayssm.integrations.trtllm_build.build_command import compose
from trtllm_replayssm.integrations.trtllm_build.convert import convert

from ..builder.checkpoints import write_family
from ..runtime.conftest import write_checkpoint
from .conftest import WIDE


@pytest.fixture(scope="module")
def converted(wide, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "checkpoint"
    convert(wide, folder, window=24)
    return folder


def fake_packages(folder, version="1.2.1"):
    """tensorrt_llm and tensorrt that tell what is done to their registry, and a trtllm-build that prints its call."""
    for name in ("tensorrt", "tensorrt_llm"):
        (folder / name).mkdir(parents=True)
    (folder / "tensorrt_llm" / "__init__.py").write_text("import tensorrt; print('tensorrt_llm is there')\n")
    (folder / "tensorrt" / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        "class Registry:\n"
        "    all_creators = []\n"
        "    def load_library(self, path):\n"
        "        print('loaded', path)\n"
        f"        Registry.all_creators = [SimpleNamespace(name=name, plugin_version={plugins.VERSION!r},\n"
        f"            plugin_namespace={plugins.NAMESPACE!r}) for name in {plugins.PLUGINS!r}]\n"
        "def get_plugin_registry():\n"
        "    return Registry()\n"
    )
    info = folder / f"tensorrt_llm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    build = folder / "trtllm-build"
    build.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ['TRTLLM_REPLAYSSM_PLUGIN']]))\nsys.exit(5)\n"
    )
    build.chmod(0o755)
    return folder


def python(folder, code, **environment):
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(folder), "PATH": path, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("value, loads", [(None, False), ("0", False), ("1", True)])
def test_importing_tensorrt_llm_registers_the_plugins(tmp_path, value, loads):
    """In any Python process, if the variable says so, and at no other time. A02."""
    environment = {} if value is None else {"TRTLLM_REPLAYSSM_PLUGIN": value}
    code = "import sys; print('trtllm_replayssm.plugins' in sys.modules); import tensorrt_llm, json"
    child = python(fake_packages(tmp_path / "packages"), code, **environment)
    lines = ["False", "tensorrt_llm is there"] + [f"loaded {plugins.library_path()}"] * loads
    assert child.returncode == 0 and child.stdout.splitlines() == lines


def test_another_value_is_an_error_that_stops_nothing_else(tmp_path):
    child = python(fake_packages(tmp_path / "packages"), "import tensorrt_llm", TRTLLM_REPLAYSSM_PLUGIN="yes")
    assert child.stdout == "tensorrt_llm is there\n"
    assert "TRTLLM_REPLAYSSM_PLUGIN: expected 0 or 1, got 'yes'" in child.stderr


def test_the_command_line_of_trtllm_build(converted, tmp_path):
    command = compose(converted, Path("engines"), ["--max_batch_size", "8", "--workers=1", "--paged_state", "enable"])
    options = dict(zip(command[1::2], command[2::2], strict=False))
    assert command[0] == "trtllm-build"
    assert options["--checkpoint_dir"] == str(converted) and options["--output_dir"] == "engines"
    assert options["--model_cls_name"] == "ReplayNemotronHForCausalLM"
    assert "import ReplayNemotronHForCausalLM" in Path(options["--model_cls_file"]).read_text()
    assert options["--max_beam_width"] == "1" and options["--use_paged_context_fmha"] == "disable"
    assert command[-5:] == ["--max_batch_size", "8", "--workers=1", "--paged_state", "enable"]
    assert command.count("--paged_state") == 1 and command.count("--workers") == 0
    pure = write_checkpoint(tmp_path / "source", WIDE | {"hybrid_override_pattern": "M-"})
    convert(pure, tmp_path / "pure")
    assert "--gpt_attention_plugin" not in compose(tmp_path / "pure", Path("engines"), [])


@pytest.mark.parametrize(
    "more, message",
    [
        (["--max_beam_width", "2"], "--max_beam_width: expected 1, which is given already, got 2"),
        (["--speculative_decoding_mode", "eagle"], "doesn't support speculative decoding"),
        (["--use_paged_context_fmha=enable"], "--use_paged_context_fmha: expected disable"),
        (["--max_input_len", "4096", "--max_num_tokens", "2048"], "at least --max_input_len 4096, got 2048"),
        (["--max_input_len", "4096"], "--max_num_tokens: expected at least --max_input_len 4096, it is missing"),
        (["--max_input_len", "many"], "--max_input_len: expected a number of tokens, at least 1, got 'many'"),
        (["--max_num_tokens", "-7", "--max_input_len", "-9"], "--max_num_tokens: expected .* at least 1, got '-7'"),
        (["--max_num_tokens", "7", "--max_input_len"], "--max_input_len: expected .* at least 1, got ''"),
        (["--max_beam", "1"], "--max_beam: expected an option's whole name, as --max_beam_width"),
        (["--speculative=eagle"], "--speculative: expected .* whole name, as --speculative_decoding_mode"),
        (["--max_inp", "4096"], "--max_inp: expected an option's whole name, as --max_input_len"),
        (["--model_cls_file", "mine.py"], "--model_cls_file: expected .*trtllm_model.py, which is given already"),
    ],
)
def test_options_that_recurrent_layers_cannot_have(converted, more, message):
    with pytest.raises(ValueError, match=message):
        compose(converted, Path("engines"), more)


def test_trtllm_build_is_run_with_the_plugins_registered(converted, tmp_path, monkeypatch):
    arguments = ["trtllm-build", "--checkpoint", str(converted), "--output", "engines", "--", "--max_batch_size", "4"]
    code = f"import sys; from trtllm_replayssm.cli import main; sys.exit(main({arguments!r}))"
    child = python(fake_packages(tmp_path / "packages"), code)
    printed, called = child.stdout.splitlines()
    given, variable = json.loads(called)
    assert child.returncode == 5 and variable == "1" and printed.split()[1:] == given
    assert given[-2:] == ["--max_batch_size", "4"]
    child = python(fake_packages(tmp_path / "older", "1.1.0"), code)
    assert child.returncode == 2 and child.stdout == ""
    assert "TensorRT-LLM 1.1.0 is installed, expected 1.2.x" in child.stderr


def test_without_tensorrt_llm_the_command_can_still_be_printed(converted, wide, capsys):
    build = ["trtllm-build", "--checkpoint", str(converted), "--output", "engines"]
    assert cli.main(build) == 2 and "TensorRT-LLM 1.2 is not installed" in capsys.readouterr().err
    assert cli.main([*build, "--print"]) == 0
    assert capsys.readouterr().out.startswith("trtllm-build --model_cls_file ")
    assert cli.main(["trtllm-build", "--checkpoint", str(wide), "--output", "engines"]) == 2
    assert "key 'replayssm' is missing; `trtllm-replayssm convert` writes it" in capsys.readouterr().err
    assert cli.main(["trtllm-model-file"]) == 0
    assert Path(capsys.readouterr().out.strip()).name == "trtllm_model.py"


def test_convert_on_the_command_line(wide, tmp_path, capsys):
    convert_it = ["convert", "--checkpoint", str(wide), "--tp", "2", "--output"]
    assert cli.main([*convert_it, str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "RecurrentGemmaForCausalLM bfloat16, 2 tensor-parallel ranks, 1 stages" in out
    file = tmp_path / "a" / "rank1.safetensors"
    assert f"  rank1.safetensors  {file.stat().st_size / 2**10:.2f} KiB\n" in out
    assert "not taken along" not in out and "not quantised any more" not in out
    assert cli.main([*convert_it, str(tmp_path / "b"), "--json", "--window", "12"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["replayssm"]["window"] == 12 and len(report["bytes"]) == 2
    assert cli.main([*convert_it, str(tmp_path / "b")]) == 2 and "is there already" in capsys.readouterr().err


def test_convert_takes_the_tensors_word_where_it_is_allowed(tmp_path, capsys):
    """Of a module that the lists contradict; the message names the option."""
    layers = {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3}
    checkpoint = write_family(tmp_path / "source", "nano-4b", quantized=True, **layers)
    for file in ("config.json", "hf_quant_config.json"):
        text = (checkpoint / file).read_text()
        changed = text.replace('"backbone.layers.1.mixer.up_proj": {', '"backbone.layers.1.mixer.other": {')
        assert changed != text
        (checkpoint / file).write_text(changed)
    convert_it = ["convert", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")]
    assert cli.main(convert_it) == 2
    assert "says that 'backbone.layers.1.mixer.up_proj' is plain" in (err := capsys.readouterr().err)
    assert "--allow MODULE takes the tensors' word" in err
    assert cli.main([*convert_it, "--allow", "backbone.layers.1.mixer.up_*"]) == 0
    lists = json.loads((tmp_path / "out" / "quant_cfg.json").read_text())["quantized_layers"]
    assert lists["transformer.layers.1.mlp.fc"] == {"quant_algo": "NVFP4", "group_size": 16}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing_of_a_conversion(wide, tmp_path, number):
    """Sent to itself with the first tensor, when the unfinished folder is there."""
    arguments = ["convert", "--checkpoint", str(wide), "--output", str(tmp_path / "out")]
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from trtllm_replayssm.cli import main\n"
        "from trtllm_replayssm.runtime.weights import Weights\n"
        "def stored(*_):\n"
        f"    print([len(list(path.iterdir())) for path in Path({str(tmp_path)!r}).iterdir()], flush=True)\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "Weights.stored = stored\n"
        f"sys.exit(main({arguments!r}))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert child.returncode == 128 + number and child.stdout == "[1]\n"
    assert list(tmp_path.iterdir()) == []
