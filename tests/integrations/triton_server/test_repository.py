# SPDX-License-Identifier: Apache-2.0
"""What `triton-repo` writes: configurations that follow Triton's schema."""

import json

import pytest

from trtllm_replayssm.cli import main
from trtllm_replayssm.integrations.triton_server.interface import INTERFACES
from trtllm_replayssm.integrations.triton_server.repository import parse_config
from trtllm_replayssm.integrations.triton_server.settings import Settings

from .serving import TINY


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
        (["--backend", "engine"], "expected the config.json of an engine folder"),
        (["--draft-tokens", "3"], "draft_tokens and adaptive need speculation"),
        (["--template", "."], "--template needs --backend trtllm"),
        (["--interface", "openai"], "interface is 'openai', expected one of llmapi, ensemble"),
    ],
)
def test_bad_options_write_nothing(tmp_path, capsys, options, message):
    assert main(["triton-repo", "--model", str(TINY), "--output", str(tmp_path / "repo"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "repo").exists()


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
    assert main(["triton-launch", "--repo", str(tmp_path / "none"), "--http-port", "0"]) == 2
    assert "none: no such directory, expected a model repository" in capsys.readouterr().err
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    assert main(["triton-launch", "--repo", str(tmp_path), *ports]) == 2
    assert "tritonserver ended with 3 before it was ready" in capsys.readouterr().err
