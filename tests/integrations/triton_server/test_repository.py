# SPDX-License-Identifier: Apache-2.0
"""What `triton-repo` writes: configurations that follow Triton's schema."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from trtllm_replayssm.cli import main
from trtllm_replayssm.integrations.triton_server.interface import INTERFACES
from trtllm_replayssm.integrations.triton_server.repository import parse_config
from trtllm_replayssm.integrations.triton_server.settings import Settings

from ...builder.checkpoints import nvfp4_tensors, save_shards
from .serving import TINY, free_ports


@pytest.mark.parametrize("name", INTERFACES)
def test_config(tmp_path, capsys, name):
    command = ["triton-repo", "--model", str(TINY), "--output", str(tmp_path), "--interface", name]
    assert main([*command, "--max-batch", "4", "--speculative", "mtp", "--adaptive", "--window", "auto", "--json"]) == 0
    interface = INTERFACES[name]
    assert json.loads(capsys.readouterr().out)["models"] == [interface.model]
    config = parse_config((tmp_path / interface.model / "config.pbtxt").read_text(), "config.pbtxt")
    assert (config.name, config.backend) == (interface.model, "python")
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == (1 if interface.batched else 0)
    required = [each.name for each in config.input if not each.optional]
    assert required == (["text_input", "max_tokens"] if name == "ensemble" else ["text_input"])
    assert len({each.name for each in config.input}) == len(config.input) == len(interface.inputs)
    given = Settings.read({key: value.string_value for key, value in config.parameters.items()})
    expected = {"max_batch": 4, "speculation": "mtp", "adaptive": True, "window": "auto", "interface": name}
    assert given == Settings(str(TINY), **expected)


def test_a_model_is_added_once_and_under_any_name(tmp_path, capsys):
    command = ["triton-repo", "--model", str(TINY), "--output", str(tmp_path)]
    assert main(command) == 0
    assert "triton-launch --repo" in capsys.readouterr().out
    assert main([*command, "--name", "other"]) == 0
    assert main(command) == 2
    assert "tensorrt_llm: exists already" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "tensorrt_llm"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere"], "nowhere/config.json: no such file"),
        (["--backend", "foo"], "backend is 'foo', expected one of embedded, engine, trtllm"),
        (["--backend", "engine", "--executor", "foo"], "executor is 'foo', expected one of tensorrt, reference"),
        (["--backend", "engine", "--allow", "*"], "allow: the engine folder says that already"),
        (["--backend", "engine"], "expected the config.json of an engine folder"),
        (["--draft-tokens", "3"], "draft_tokens and adaptive need speculation"),
        (["--speculative", "ngram", "--draft-tokens", "-2"], "draft_tokens is -2, expected 1..15"),
        (["--speculative", "ngram", "--window", "3"], "steps of 4 tokens do not fit into the window of 3"),
        (["--speculative", "tree"], "speculation 'tree' drafts trees, which ReplaySSM cannot verify"),
        (["--context", "-5"], "context is -5, expected at least 1"),
        (["--prefill-chunk", "0"], "prefill_chunk is 0, expected at least 1"),
        (["--max-batch", "0"], "max_batch is 0, expected at least 1"),
        (["--max-waiting", "-1"], "max_waiting is -1, expected at least 0"),
        (["--window", "65"], "window: expected 1..64, got 65"),
        (["--dtype", "int8"], "dtype is 'int8', expected one of float32, bfloat16, float16"),
        (["--device", "tpu"], "device is 'tpu', expected cpu or cuda"),
        (["--device", "meta"], "device is 'meta', expected cpu or cuda"),
        (["--mode", "foo"], "mode is 'foo', expected one of replay, conventional"),
        (
            ["--checkpoint-format", "foo"],
            "checkpoint: expected one of fp32, bf16, fp16, fp16_sr, fp8_sr, nvfp4, got 'foo'",
        ),
        (["--read-copy", "foo"], "read_copy: expected one of none, fp8, nvfp4, nvfp4_amax, e2m2, got 'foo'"),
        (["--allow", "a b"], "allow is 'a b', expected a module, or a glob of modules, without blanks"),
        (["--name", "../evil"], "name is '../evil', expected letters, digits, '_', '-' and '.', the first a letter"),
        (["--name", ".."], "name is '..', expected letters"),
        (["--name", ""], "name is '', expected letters"),
        (["--template", "."], "--template needs --backend trtllm"),
        (["--interface", "openai"], "interface is 'openai', expected one of llmapi, ensemble"),
    ],
)
def test_bad_options_write_nothing(tmp_path, capsys, options, message):
    assert main(["triton-repo", "--model", str(TINY), "--output", str(tmp_path / "repo"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "repo").exists()


def test_a_device_that_only_the_server_has(tmp_path):
    command = ["triton-repo", "--model", str(TINY), "--output", str(tmp_path), "--device", "cuda:7"]
    assert main(command) == 0
    assert 'string_value: "cuda:7"' in (tmp_path / "tensorrt_llm" / "config.pbtxt").read_text()


def test_modules_whose_tensors_count(tmp_path, capsys):
    """A list in the JSON files contradicts a quantised tensor: --allow is written down, and the model loads with it."""
    checkpoint, module = shutil.copytree(TINY, tmp_path / "checkpoint"), "lm_head"
    tensors = load_file(checkpoint / "model.safetensors")
    save_shards(checkpoint, tensors | nvfp4_tensors(f"{module}.weight", tensors[f"{module}.weight"]))
    lists = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {module: {"quant_algo": "FP8"}}}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps({"quantization": lists}))
    command = ["triton-repo", "--model", str(checkpoint), "--output", str(tmp_path / "repo")]
    assert main(command) == 2
    assert "--allow MODULE takes the tensors' word" in capsys.readouterr().err
    assert not (tmp_path / "repo").exists()
    assert main([*command, "--allow", "unknown.*", "--allow", module, "--device", "cpu"]) == 0
    config = parse_config((tmp_path / "repo" / "tensorrt_llm" / "config.pbtxt").read_text(), "config.pbtxt")
    assert config.parameters["allow"].string_value == f"unknown.* {module}"
    settings = Settings.read({key: value.string_value for key, value in config.parameters.items()})
    assert settings.allow == ("unknown.*", module)
    with pytest.warns(UserWarning, match="become float32"):
        assert module + ".weight" in settings.engine().dequantized


def test_configurations_that_do_not_follow_the_schema():
    for text, where in (
        ("nonsense: 1", "1:1"),
        ('name: "a"\nmax_batch_size: many', "2:17"),
        ("input [{ dims: x }]", "1"),
    ):
        with pytest.raises(ValueError, match=f"c.pbtxt: no model configuration: {where}"):
            parse_config(text, "c.pbtxt")


def test_no_server_says_where_it_was_looked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["triton-launch", "--repo", str(tmp_path)]) == 2
    assert "no tritonserver: not in PATH" in capsys.readouterr().err
    assert main(["triton-launch", "--repo", str(tmp_path), "--server", str(tmp_path / "server")]) == 2
    assert "server: not a program" in capsys.readouterr().err
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]
    assert main(["triton-launch", "--repo", str(tmp_path / "none"), *ports]) == 2
    assert "none: no such directory, expected a model repository" in capsys.readouterr().err
    assert main(["triton-launch", "--repo", str(tmp_path), *ports]) == 2
    assert f"{tmp_path}: no folder of a model in it, expected a model repository" in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    assert main(["triton-launch", "--repo", str(tmp_path), *ports]) == 2
    assert "tritonserver ended with 3 before it was ready" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--http-port=-1", "http port is -1, expected 1..65535"),
        ("--grpc-port=0", "grpc port is 0, expected 1..65535"),
        ("--metrics-port=99999", "metrics port is 99999, expected 1..65535"),
        ("--exit-timeout=-4", "--exit-timeout is -4, expected at least 0 (seconds)"),
        ("--start-timeout=0", "--start-timeout is 0, expected at least 1 (seconds)"),
        ("--probe-interval=-1", "--probe-interval is -1, expected at least 1 (seconds)"),
        ("--probe-timeout=0", "--probe-timeout is 0, expected at least 1 (seconds)"),
    ],
)
def test_bad_options_start_nothing(tmp_path, capsys, option, message):
    assert main(["triton-launch", "--repo", str(tmp_path), "--server", "/bin/false", option]) == 2
    assert message in capsys.readouterr().err
