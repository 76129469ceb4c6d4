# SPDX-License-Identifier: Apache-2.0
"""Repositories for TensorRT-LLM, from doubles of its templates: names and placeholders as it has them, nothing else."""

import json
import sys
import types

import pytest

from trtllm_replayssm import plugins
from trtllm_replayssm.cli import main
from trtllm_replayssm.integrations.triton_server import templates
from trtllm_replayssm.integrations.triton_server.repository import parse_config

from .serving import TINY

LLMAPI = """
name: "tensorrt_llm"
backend: "python"
instance_group [{ count: 1 kind : KIND_CPU }]
input [{ name: "text_input" data_type: TYPE_STRING dims: [ -1 ] },
       { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [-1] }]
"""
LLMAPI_MODEL = """
class TritonPythonModel:
    def initialize(self, args):
        order.append("initialize")
        self._init_engine()

    def _init_engine(self):
        order.append("LLM")
"""
ENGINE = {
    "tensorrt_llm": """
name: "tensorrt_llm"
backend: "${triton_backend}"
max_batch_size: ${triton_max_batch_size}
model_transaction_policy { decoupled: ${decoupled_mode} }
dynamic_batching {
  preferred_batch_size: [ ${triton_max_batch_size} ]
  max_queue_delay_microseconds: ${max_queue_delay_microseconds}
  default_queue_policy: { max_queue_size: ${max_queue_size} }
}
input [{ name: "encoder_input_features" data_type: ${encoder_input_features_data_type} dims: [ -1, -1 ] },
       { name: "prompt_embedding_table" data_type: ${prompt_embedding_table_data_type} dims: [ -1, -1 ] }]
output [{ name: "context_logits" data_type: ${logits_datatype} dims: [ -1, -1 ] }]
parameters: { key: "gpt_model_type" value: { string_value: "${batching_strategy}" } }
parameters: { key: "gpt_model_path" value: { string_value: "${engine_dir}" } }
parameters: { key: "tokenizer_dir" value: { string_value: "${tokenizer_dir}" } }
parameters: { key: "enable_kv_cache_reuse" value: { string_value: "${enable_kv_cache_reuse}" } }
parameters: { key: "guided_decoding_backend" value: { string_value: "${guided_decoding_backend}" } }
""",
    "preprocessing": """
name: "preprocessing"
backend: "python"
max_batch_size: ${triton_max_batch_size}
parameters { key: "tokenizer_dir" value: { string_value: "${tokenizer_dir}" } }
instance_group [{ count: ${preprocessing_instance_count} kind: KIND_CPU }]
""",
    "postprocessing": """
name: "postprocessing"
backend: "python"
max_batch_size: ${triton_max_batch_size}
parameters { key: "skip_special_tokens" value: { string_value: "${skip_special_tokens}" } }
instance_group [{ count: ${postprocessing_instance_count} kind: KIND_CPU }]
""",
    "tensorrt_llm_bls": """
name: "tensorrt_llm_bls"
backend: "python"
max_batch_size: ${triton_max_batch_size}
model_transaction_policy { decoupled: ${decoupled_mode} }
output [{ name: "context_logits" data_type: ${logits_datatype} dims: [ -1, -1 ] }]
parameters: { key: "accumulate_tokens" value: { string_value: "${accumulate_tokens}" } }
parameters: { key: "tensorrt_llm_model_name" value: { string_value: "${tensorrt_llm_model_name}" } }
parameters: { key: "tensorrt_llm_draft_model_name" value: { string_value: "${tensorrt_llm_draft_model_name}" } }
instance_group [{ count: ${bls_instance_count} kind : KIND_CPU }]
""",
    "ensemble": """
name: "ensemble"
platform: "ensemble"
max_batch_size: ${triton_max_batch_size}
ensemble_scheduling { step [{ model_name: "preprocessing" model_version: -1 }] }
""",
}


@pytest.fixture
def all_models(tmp_path):
    folder = tmp_path / "all_models"
    llmapi = folder / "llmapi" / "tensorrt_llm"
    (llmapi / "1").mkdir(parents=True)
    (llmapi / "config.pbtxt").write_text(LLMAPI)
    (llmapi / "1" / "model.py").write_text(LLMAPI_MODEL)
    (llmapi / "1" / "helpers.py").write_text("# helps\n")
    for name, config in ENGINE.items():
        model = folder / "inflight_batcher_llm" / name
        model.mkdir(parents=True)
        (model / "config.pbtxt").write_text(config)
        if name not in ("ensemble",):
            (model / "1").mkdir()
            (model / "1" / "model.py").write_text(f"# {name}\n")
    return folder


@pytest.fixture
def engine(tmp_path):
    folder = tmp_path / "engine of mine"
    folder.mkdir()
    (folder / "rank0.engine").write_bytes(b"plan")
    config = {"build_config": {"max_batch_size": 48}, "pretrained_config": {"mapping": {"world_size": 2}}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def library(tmp_path, monkeypatch):
    path = tmp_path / "libtrtllm_replayssm_plugins.so"
    monkeypatch.setattr(plugins, "library_path", lambda: path)
    return path


def test_checkpoint(tmp_path, all_models, monkeypatch):
    written = templates.write(
        tmp_path / "repo", TINY, all_models, max_batch=16, context=2048, checkpoint_format="fp16", draft_tokens=3
    )
    model = tmp_path / "repo" / "tensorrt_llm"
    config = parse_config((model / "config.pbtxt").read_text(), "config.pbtxt")
    assert config.model_transaction_policy.decoupled and config.name == "tensorrt_llm"
    assert [each.name for each in config.input] == ["text_input", "streaming"]
    assert json.loads((model / "1" / "model.yaml").read_text()) == {
        "model": str(TINY),
        "backend": "pytorch",
        "tensor_parallel_size": 1,
        "max_batch_size": 16,
        "max_seq_len": 2048,
        "kv_cache_config": {"enable_block_reuse": False, "mamba_ssm_cache_dtype": "float16"},
        "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3, "num_nextn_predict_layers": 3},
        "triton_config": {"max_batch_size": 0, "decoupled": True},
    }
    assert written.launch == (
        f"python3 /app/scripts/launch_triton_server.py --world_size 1 --model_repo {tmp_path / 'repo'}"
    )
    assert (model / "1" / "helpers.py").read_text() == "# helps\n"


def test_our_class_is_registered_between_the_choice_of_gpus_and_the_engine(tmp_path, all_models, monkeypatch):
    templates.write(tmp_path / "repo", TINY, all_models)
    version = tmp_path / "repo" / "tensorrt_llm" / "1"
    order = []
    template = types.ModuleType("template")
    template.order = order
    exec((version / "template.py").read_text(), template.__dict__)

    class Finder:
        """Notes the import, and stands in for the module, which needs TensorRT-LLM."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.startswith("trtllm_replayssm.integrations.trtllm_serve"):
                from importlib.machinery import ModuleSpec

                return ModuleSpec(name, Finder, is_package=True)

        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            if module.__name__.endswith(".model"):
                order.append("ours")

    monkeypatch.setitem(sys.modules, "template", template)
    for name in ("trtllm_replayssm.integrations.trtllm_serve", "trtllm_replayssm.integrations.trtllm_serve.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    namespace = {}
    exec((version / "model.py").read_text(), namespace)
    namespace["TritonPythonModel"]().initialize({})
    assert order == ["initialize", "ours", "LLM"]


def test_engine(tmp_path, all_models, engine, library):
    written = templates.write(tmp_path / "repo", engine, all_models, tokenizer=TINY)
    configs = {
        name: parse_config((tmp_path / "repo" / name / "config.pbtxt").read_text(), name) for name in written.models
    }
    assert set(configs) == set(ENGINE)
    assert {config.max_batch_size for config in configs.values()} == {48}
    chief = configs["tensorrt_llm"]
    assert chief.backend == "tensorrtllm" and chief.model_transaction_policy.decoupled
    assert chief.dynamic_batching.preferred_batch_size == [48]
    parameters = {name: value.string_value for name, value in chief.parameters.items()}
    assert parameters == {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(engine),
        "tokenizer_dir": str(TINY),
        "enable_kv_cache_reuse": "false",
        "guided_decoding_backend": "${guided_decoding_backend}",  # TensorRT-LLM's sign for its default
    }
    assert configs["tensorrt_llm_bls"].parameters["tensorrt_llm_model_name"].string_value == "tensorrt_llm"
    assert (tmp_path / "repo" / "preprocessing" / "1" / "model.py").read_text() == "# preprocessing\n"
    assert (tmp_path / "repo" / "ensemble" / "1").is_dir()
    assert written.launch.startswith(
        f"LD_PRELOAD={library} python3 /app/scripts/launch_triton_server.py --world_size 2"
    )


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, all_models, engine, library):
    repository = tmp_path / "repo"
    for error, message, arguments in (
        (
            FileNotFoundError,
            "nowhere: no such directory; expected TensorRT-LLM's templates",
            (TINY, tmp_path / "nowhere"),
        ),
        (FileNotFoundError, "config.json: no such file", (tmp_path, all_models)),
        (ValueError, "tokenizer is None, expected a directory", (engine, all_models)),
    ):
        with pytest.raises(error, match=message):
            templates.write(repository, *arguments)
    with pytest.raises(ValueError, match="max_batch: the engine says that already"):
        templates.write(repository, engine, all_models, tokenizer=TINY, max_batch=4)
    with pytest.raises(ValueError, match="checkpoint_format is 'nvfp4', expected one of fp32, bf16, fp16"):
        templates.write(repository, TINY, all_models, checkpoint_format="nvfp4")
    for name in ("max_batch", "context", "draft_tokens", "tensor_parallel"):
        with pytest.raises(ValueError, match=f"^{name} is 0, expected at least 1$"):
            templates.write(repository, TINY, all_models, **{name: 0})
    with pytest.raises(ValueError, match="tokenizer: a checkpoint has its own"):
        templates.write(repository, TINY, all_models, tokenizer=TINY)
    (all_models / "llmapi" / "tensorrt_llm" / "1" / "helpers.py").unlink()
    with pytest.raises(FileNotFoundError, match="helpers.py: no such file"):
        templates.write(repository, TINY, all_models)
    (all_models / "llmapi" / "tensorrt_llm" / "1" / "model.py").write_text("class TritonPythonModel: pass\n")
    with pytest.raises(ValueError, match="expected a class TritonPythonModel with a method _init_engine"):
        templates.write(repository, TINY, all_models)
    last = all_models / "inflight_batcher_llm" / "ensemble" / "config.pbtxt"
    last.write_text(last.read_text().replace("${triton_max_batch_size}", "${unheard_of}"))
    with pytest.raises(ValueError, match="ensemble.config.pbtxt: no model configuration: 4:17"):
        templates.write(repository, engine, all_models, tokenizer=TINY)
    assert not repository.exists() or list(repository.iterdir()) == []


def test_command(tmp_path, all_models, capsys):
    command = ["triton-repo", "--backend", "trtllm", "--model", str(TINY), "--template", str(all_models)]
    command += ["--output", str(tmp_path / "repo")]
    assert main([*command, "--speculative", "mtp", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == ["tensorrt_llm"]
    yaml = json.loads((tmp_path / "repo" / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert yaml["speculative_config"]["max_draft_len"] == 3
    for options, message in (
        (["--window", "8"], "--window: not with --backend trtllm"),
        (["--speculative", "ngram"], "--speculative is 'ngram', expected mtp"),
        (["--draft-tokens", "3"], "--draft-tokens needs --speculative mtp"),
        (["--speculative", "mtp", "--draft-tokens", "-2"], "draft_tokens is -2, expected at least 1"),
        (["--allow", "lm_head"], "--allow: not with --backend trtllm"),
        ([], "tensorrt_llm: exists already"),
    ):
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err
