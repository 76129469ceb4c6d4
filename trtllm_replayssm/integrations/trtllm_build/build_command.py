# SPDX-License-Identifier: Apache-2.0
"""The command line of `trtllm-build` for a checkpoint that convert.py wrote, and the version that it needs."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

from .checkpoint import HYBRID, MODEL_CLASS, read_block
from .contract import CONTRACT

# What the command line sets itself, and may not be set otherwise: what the runtime needs of recurrent models.
_OWN = {
    "--model_cls_file": None,
    "--model_cls_name": MODEL_CLASS,
    "--checkpoint_dir": None,
    "--output_dir": None,
    "--paged_state": "enable",
    "--remove_input_padding": "enable",
    "--mamba_conv1d_plugin": "auto",
    "--max_beam_width": "1",
    "--workers": "1",
}
_REFUSED = {
    "--speculative_decoding_mode": "RNN based model doesn't support speculative decoding",
    "--max_draft_len": "RNN based model doesn't support speculative decoding",
    "--max_prompt_embedding_table_size": "the model class has no prompt tuning",
    "--lora_dir": "the model class has no LoRA",
}
_TOKENS, _PROMPT = "--max_num_tokens", "--max_input_len"


def compose(checkpoint: Path, output: Path, more: list[str]) -> list[str]:
    """The arguments of trtllm-build.

    Args:
        more: further options of trtllm-build, as given.

    Raises:
        ValueError: the folder is no checkpoint of `convert`, or an option cannot be had with recurrent layers, and why.
    """
    from .command import model_file

    config = _read_config(checkpoint)
    values = {**_OWN, "--model_cls_file": str(model_file())}
    values |= {"--checkpoint_dir": str(checkpoint), "--output_dir": str(output)}
    if config["architecture"] == HYBRID:
        values |= {"--gpt_attention_plugin": "auto", "--use_paged_context_fmha": "disable"}
    given = {}
    for index, option in enumerate(more):
        if option.startswith("--"):
            name, _, value = option.partition("=")
            following = more[index + 1] if index + 1 < len(more) and not more[index + 1].startswith("--") else ""
            given[name] = value or following
    checked = [*values, *_REFUSED, _TOKENS, _PROMPT]
    for name, value in given.items():
        # trtllm-build would take a beginning of an option's name for the option.
        if name not in checked and (meant := [option for option in checked if option.startswith(name)]):
            raise ValueError(f"{name}: expected an option's whole name, as {meant[0]}")
        if name in _REFUSED:
            raise ValueError(f"{name}: not with recurrent layers ({_REFUSED[name]})")
        if name in values and value != values[name]:
            raise ValueError(f"{name}: expected {values[name]}, which is given already, got {value}")
    most, longest = _number(given, _TOKENS), _number(given, _PROMPT)
    if longest is not None and (most is None or most < longest):
        got = "it is missing" if most is None else f"got {most}"
        raise ValueError(
            f"{_TOKENS}: expected at least {_PROMPT} {longest}, {got}: a prompt is one piece (RNN based model doesn't "
            "support Chunked Context)"
        )
    command = ["trtllm-build"]
    for name, value in values.items():
        if name not in given:
            command += [name, value]
    return command + more


def check_version() -> str:
    """The installed TensorRT-LLM's version.

    Raises:
        ImportError: there is none, or not one of the versions that the contract is of.
    """
    expected = CONTRACT["versions"]
    try:
        version = importlib.metadata.version(CONTRACT["package"])
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"TensorRT-LLM {expected} is not installed: it comes with NVIDIA's containers (docs/deploy-trtllm-build.md)"
        ) from None
    if version.split(".")[:2] != expected.split("."):
        raise ImportError(f"TensorRT-LLM {version} is installed, expected {expected}.x, the last with trtllm-build")
    return version


def _read_config(checkpoint: Path) -> dict:
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        read_block(SimpleNamespace(**config))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path}: no checkpoint of `trtllm-replayssm convert`: {error}") from None
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    return config


def _number(given: dict[str, str], name: str) -> int | None:
    if name not in given:
        return None
    if not given[name].isdecimal() or int(given[name]) < 1:
        raise ValueError(f"{name}: expected a number of tokens, at least 1, got {given[name]!r}")
    return int(given[name])
