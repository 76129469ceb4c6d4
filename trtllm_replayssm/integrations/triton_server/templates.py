# SPDX-License-Identifier: Apache-2.0
"""Repositories in which TensorRT-LLM runs the model: its own Triton templates, filled in, with ReplaySSM in front.

The templates come with TensorRT-LLM (`triton_backend/all_models`; /app/all_models in NVIDIA's container) and must be of
its version, so they are taken from there. Two kinds: `llmapi`, the PyTorch flow, which reads a checkpoint; and
`inflight_batcher_llm`, which runs an engine of `trtllm-build` by the C++ backend (TensorRT-LLM 1.2.x, later removed).
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from ... import plugins
from .repository import new_model, parse_config, write_config

CONTAINER = Path("/app/all_models")
_CACHE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_MODEL = """\
# Written by `trtllm-replayssm triton-repo`. TensorRT-LLM's own model is template.py.
from template import TritonPythonModel as Template


class TritonPythonModel(Template):
    def _init_engine(self):
        # Registers our model class. Right before LLM(...) is made, when the template has chosen this instance's GPUs;
        # before that TensorRT-LLM must not be imported.
        import trtllm_replayssm.integrations.trtllm_serve.model  # noqa: F401

        super()._init_engine()
"""


@dataclass(frozen=True)
class Written:
    """models: in the repository. launch: the command that serves it."""

    models: tuple[str, ...]
    launch: str


def write(
    repository: Path,
    model: Path,
    template: Path | None = None,
    *,
    tokenizer: Path | None = None,
    max_batch: int | None = None,
    context: int | None = None,
    checkpoint_format: str | None = None,
    draft_tokens: int | None = None,
    tensor_parallel: int | None = None,
) -> Written:
    """Writes what serves `model`: an engine of trtllm-build, where there is a rank0.engine, or else a checkpoint.

    template: the folder `all_models`. tokenizer: directory of an engine's tokenizer. The rest is of a checkpoint, None
    for TensorRT-LLM's defaults; draft_tokens: MTP with so many, None for none.

    Raises:
        FileNotFoundError: a file of the model or the template is missing, by name.
        ValueError: an option is out of range or does not go with the model, or the template is not understood.
        FileExistsError: there is such a model in the repository already.
    """
    numbers = dict(max_batch=max_batch, context=context, draft_tokens=draft_tokens, tensor_parallel=tensor_parallel)
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}, expected at least 1")
    all_models = template or CONTAINER
    if not all_models.is_dir():
        raise FileNotFoundError(
            f"{all_models}: no such directory; expected TensorRT-LLM's templates, its triton_backend/all_models"
        )
    if not (model / "config.json").exists():
        raise FileNotFoundError(f"{model / 'config.json'}: no such file; expected a checkpoint or an engine directory")
    if not (model / "rank0.engine").exists():
        if tokenizer is not None:
            raise ValueError("tokenizer: a checkpoint has its own")
        arguments = _llm_arguments(model, max_batch, context, checkpoint_format, draft_tokens, tensor_parallel)
        return _write_llmapi(repository, all_models / "llmapi" / "tensorrt_llm", arguments)
    for name, value in (numbers | {"checkpoint_format": checkpoint_format}).items():
        if value is not None:
            raise ValueError(f"{name}: the engine says that already")
    if tokenizer is None or not tokenizer.is_dir():
        raise ValueError(f"tokenizer is {tokenizer}, expected a directory: an engine has none")
    return _write_engine(repository, all_models / "inflight_batcher_llm", model, tokenizer)


# ---- the PyTorch flow ------------------------------------------------------------------------------------------------


def _llm_arguments(
    model: Path,
    max_batch: int | None,
    context: int | None,
    checkpoint_format: str | None,
    draft_tokens: int | None,
    tensor_parallel: int | None,
) -> dict:
    """What LLM() is given."""
    cache = {"enable_block_reuse": False}  # a block of keys says nothing of the state behind it
    if checkpoint_format is not None:
        if checkpoint_format not in _CACHE_DTYPES:
            raise ValueError(f"checkpoint_format is {checkpoint_format!r}, expected one of {', '.join(_CACHE_DTYPES)}")
        cache["mamba_ssm_cache_dtype"] = _CACHE_DTYPES[checkpoint_format]
    arguments = {
        "model": str(model),
        "backend": "pytorch",
        "tensor_parallel_size": tensor_parallel or 1,
        "max_batch_size": max_batch,
        "max_seq_len": context,
        "kv_cache_config": cache,
    }
    if draft_tokens is not None:
        # Releases read the one or the other.
        lengths = {"max_draft_len": draft_tokens, "num_nextn_predict_layers": draft_tokens}
        arguments["speculative_config"] = {"decoding_type": "MTP", **lengths}
    return {name: value for name, value in arguments.items() if value is not None}


def _write_llmapi(repository: Path, template: Path, arguments: dict) -> Written:
    source = _read(template / "1" / "model.py")
    if not _defines_init_engine(source):
        raise ValueError(
            f"{template / '1' / 'model.py'}: expected a class TritonPythonModel with a method _init_engine, as in "
            "TensorRT-LLM 1.2 and 1.3"
        )
    config = parse_config(_read(template / "config.pbtxt"), str(template / "config.pbtxt"))
    # model.yaml says so too, but is asked only when the server may complete configurations, which launchers forbid.
    config.model_transaction_policy.decoupled = True
    with new_model(repository, config.name) as folder:
        write_config(folder, config)
        version = folder / "1"
        version.mkdir()
        (version / "template.py").write_text(source)
        (version / "helpers.py").write_text(_read(template / "1" / "helpers.py"))
        (version / "model.py").write_text(_MODEL)
        settings = {**arguments, "triton_config": {"max_batch_size": 0, "decoupled": True}}
        # JSON is YAML too.
        (version / "model.yaml").write_text(json.dumps(settings, indent=2) + "\n")
    return Written((config.name,), _launch(repository, arguments["tensor_parallel_size"]))


def _defines_init_engine(source: str) -> bool:
    return any(
        isinstance(member, ast.FunctionDef) and member.name == "_init_engine"
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "TritonPythonModel"
        for member in node.body
    )


# ---- engines ---------------------------------------------------------------------------------------------------------


def _write_engine(repository: Path, template: Path, engine: Path, tokenizer: Path) -> Written:
    """The five models of the chain, in the order in which they depend on each other."""
    built = json.loads(_read(engine / "config.json"))
    try:
        batch = int(built["build_config"]["max_batch_size"])
        ranks = int(built["pretrained_config"]["mapping"]["world_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{engine / 'config.json'}: not of an engine of trtllm-build: {error!r}") from None
    values = {
        "triton_backend": "tensorrtllm",
        "triton_max_batch_size": batch,
        "decoupled_mode": "true",
        "batching_strategy": "inflight_fused_batching",
        "engine_dir": engine,
        "tokenizer_dir": tokenizer,
        "max_queue_delay_microseconds": 0,
        "max_queue_size": 0,
        "logits_datatype": "TYPE_FP32",
        "encoder_input_features_data_type": "TYPE_FP16",
        "prompt_embedding_table_data_type": "TYPE_FP16",
        "exclude_input_in_output": "true",
        "enable_kv_cache_reuse": "false",  # a block of keys says nothing of the state behind it
        "preprocessing_instance_count": 1,
        "postprocessing_instance_count": 1,
        "bls_instance_count": 1,
        "accumulate_tokens": "false",
        "tensorrt_llm_model_name": "tensorrt_llm",
        "skip_special_tokens": "true",
    }
    preload = plugins.library_path()
    names = ("preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls", "ensemble")
    sources = {name: template / name / "config.pbtxt" for name in names}
    configs = {name: parse_config(_filled(_read(path), values), str(path)) for name, path in sources.items()}
    for name, config in configs.items():
        with new_model(repository, name) as folder:
            # What the template leaves open, TensorRT-LLM takes for "use the default".
            write_config(folder, config)
            if (template / name / "1").is_dir():
                shutil.copytree(template / name / "1", folder / "1")
            else:
                (folder / "1").mkdir()  # Triton wants a version
    return Written(names, f"LD_PRELOAD={shlex.quote(str(preload))} {_launch(repository, ranks)}")


def _filled(text: str, values: dict) -> str:
    """Placeholders ${name} replaced; unknown ones stay."""
    known = {name: str(value).replace("\\", "\\\\").replace('"', '\\"') for name, value in values.items()}
    return re.sub(r"\$\{(\w+)\}", lambda match: known.get(match[1], match[0]), text)


# ---- shared ----------------------------------------------------------------------------------------------------------


def _launch(repository: Path, ranks: int) -> str:
    """TensorRT-LLM's own launcher, beside its templates in the container. It listens on every network interface."""
    return (
        f"python3 /app/scripts/launch_triton_server.py --world_size {ranks} --model_repo {shlex.quote(str(repository))}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; expected TensorRT-LLM's templates") from None
