# SPDX-License-Identifier: Apache-2.0
"""The model class of trtllm-build, driven by a tensorrt_llm made of the contract, and its network at work."""

import importlib
import json
import pickle
import random
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from trtllm_replayssm.integrations.trtllm_build.command import model_file
from trtllm_replayssm.integrations.trtllm_build.convert import convert
from trtllm_replayssm.plugins import PLUGINS
from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.mamba_mixer import MambaMixer

from ..runtime.conftest import write_checkpoint
from .conftest import WIDE
from .network_run import NetworkRun, plugin_graph
from .recorder import DTYPES, ENTRIES, RUNTIME_INPUTS, Mapping, Recorder

SIZES = dict(max_batch_size=4, max_input_len=96, max_seq_len=256, max_num_tokens=192)
MODEL = "trtllm_replayssm.integrations.trtllm_build.model"


def config_of(folder, rank):
    """What PretrainedConfig makes of config.json: its own attributes, and every other key as it is."""
    raw = json.loads((folder / "config.json").read_text())
    mapping, own = raw.pop("mapping"), raw.pop("quantization")
    assert own == {"quant_algo": None, "kv_cache_quant_algo": None}
    known = set(ENTRIES["PretrainedModel"]["config"]) | {"mapping", "quant_mode", "kv_dtype"}
    config = types.SimpleNamespace(**raw, quant_mode="none", kv_dtype=raw["dtype"])
    config.mapping = Mapping(**mapping, rank=rank)
    assert known <= set(vars(config))
    return config


class Recorded:
    """A model class's network. options: of prepare_inputs, and of plugin_config."""

    def __init__(self, monkeypatch, folder, rank=0, plugin_config=None, **options):
        self.recorder = Recorder(plugin_config or {})
        self.recorder.install(monkeypatch)
        self.model = importlib.import_module(MODEL).ReplayNemotronHForCausalLM(config_of(folder, rank))
        inputs = self.model.prepare_inputs(**(SIZES | options))
        self.model(**inputs)

    def plugins(self, name):
        return [node for node in self.recorder.nodes if node.what == name]


@pytest.mark.parametrize("tp, pp", [(1, 1), (4, 1), (2, 3)])
def test_parameters_are_the_tensors_of_the_checkpoint(monkeypatch, wide, tmp_path, tp, pp):
    """Of every rank, by name, shape and dtype: TensorRT-LLM demands each parameter in the file."""
    convert(wide, tmp_path / "out", tp=tp, pp=pp)
    for rank in range(tp * pp):
        model = Recorded(monkeypatch, tmp_path / "out", rank).model
        tensors = load_file(tmp_path / "out" / f"rank{rank}.safetensors")
        expected = {name: (tuple(tensor.shape), str(tensor.dtype)[6:]) for name, tensor in tensors.items()}
        assert {name: (made.shape, made.dtype) for name, made in model.named_parameters()} == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_every_input_of_the_engine_is_one_that_the_runtime_binds(monkeypatch, wide, tmp_path, rank):
    convert(wide, tmp_path / "out", tp=2, window=24)
    recorded = Recorded(monkeypatch, tmp_path / "out", rank)
    recorder = recorded.recorder
    expected = {f"rnn_state_ptr_{layer}" for layer in (0, 2, 4)} | {
        "input_ids",
        "last_token_ids",
        "host_request_types",
        "host_context_lengths",
        "context_lengths",
        "sequence_length",
        "slot_mapping",
    }
    assert set(recorder.inputs) == expected
    for name, tensor in recorder.inputs.items():
        known = RUNTIME_INPUTS["rnn_state_ptr_{layer}" if name.startswith("rnn_state") else name]
        assert tensor.trt_tensor.dtype == DTYPES[known["dtype"]], name
        shape = [size if isinstance(size, int) else -1 for size in known["shape"]]
        assert list(tensor.trt_tensor.shape) == shape, name
    assert set(recorder.outputs) == {"logits", "replayssm_status"}
    # One rank of two: 8 of 16 heads of 16, 4 of 8 groups of 64.
    inner, channels, heads, columns = 128, 128 + 2 * 256, 8, 2 * 128 + 2 * 256 + 8
    act, f32, i32, i64 = "bfloat16", "float32", "int32", "int64"
    plan = [(i32, (-1,))]
    row, order, state, table = (i32, (-1,)), (i32, (1,)), (i64, (1,)), (i32, (32,))
    vector = (f32, (heads,))
    signatures = {
        "ReplaySsmPlan": ([row] * 5, [*plan, table]),
        "ReplayCausalConv": (
            [*plan, table, (act, (-1, columns)), (act, (channels, 4)), (act, (channels,)), row, row, state],
            [(act, (-1, channels)), order],
        ),
        "ReplaySsmFlush": ([*plan, table, vector, order, state], [order]),
        "ReplaySsmStep": (
            [*plan, table, (act, (-1, channels)), (act, (-1, columns)), vector, vector, vector, row, row, order, state],
            [(act, (-1, inner))],
        ),
    }
    for plugin in PLUGINS:
        nodes = recorded.plugins(plugin)
        assert len(nodes) == (1 if plugin == "ReplaySsmPlan" else 3)
        for node in nodes:
            given = [
                [(tensor.dtype, tensor.shape) for tensor in tensors] for tensors in (node.given["inputs"], node.outputs)
            ]
            assert given == [*signatures[plugin]], plugin
    names = ["slot_mapping", "host_request_types", "context_lengths", "sequence_length", "last_token_ids"]
    assert recorded.plugins("ReplaySsmPlan")[0].given["inputs"] == [recorder.inputs[name].trt_tensor for name in names]
    for node, layer in zip(recorded.plugins("ReplaySsmStep"), (0, 2, 4), strict=True):
        assert node.given["inputs"][-1] is recorder.inputs[f"rnn_state_ptr_{layer}"].trt_tensor
        fields = node.given["fields"]
        assert (fields["layer"], fields["num_layers"], fields["num_slots"]) == (layer // 2, 3, 8)
        assert (fields["first_head"], fields["window"], fields["plan_mode"]) == (8 * rank, 24, "lengths")
        assert (fields["dt_offset"], fields["dt_min"], fields["dt_max"]) == (inner + channels, 0.0, float("inf"))
    assert recorded.plugins("ReplayCausalConv")[0].given["fields"]["in_offset"] == inner


def test_a_stage_without_mamba_layers_has_no_plugins(monkeypatch, tmp_path):
    """And one without attention layers binds the lengths itself. A08."""
    checkpoint = write_checkpoint(tmp_path / "source", WIDE | {"hybrid_override_pattern": "MM*-"})
    convert(checkpoint, tmp_path / "out", pp=3)
    stages = [Recorded(monkeypatch, tmp_path / "out", rank) for rank in range(3)]
    assert [len(stage.plugins("ReplaySsmStep")) for stage in stages] == [2, 0, 0]
    assert [len(stage.plugins("ReplaySsmPlan")) for stage in stages] == [1, 0, 0]
    assert [set(stage.recorder.outputs) for stage in stages] == [
        {"hidden_states_output", "replayssm_status"},
        {"hidden_states_output"},
        {"logits"},
    ]
    assert [{"input_ids", "hidden_states_input"} & set(stage.recorder.inputs) for stage in stages] == [
        {"input_ids"},
        {"hidden_states_input"},
        {"hidden_states_input"},
    ]
    assert "slot_mapping" not in stages[1].recorder.inputs and stages[1].model.attention_layers == 1
    moves = [[node.what for node in stage.recorder.nodes if node.what in ("send", "recv")] for stage in stages]
    assert moves == [["send"], ["recv", "send"], ["recv"]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_beam_width": 2}, "max_beam_width: expected 1, got 2 .*beam search"),
        ({"max_draft_len": 3}, "max_draft_len: expected 0, got 3 .*speculative decoding"),
        ({"speculative_decoding_draft_tokens_external": True}, "speculative decoding"),
        ({"max_num_tokens": 95}, "max_num_tokens: expected at least max_input_len 96, got 95 .*Chunked Context"),
        ({"prompt_embedding_table_size": 8}, "prompt tuning: expected 0, got 8"),
        ({"lora_target_modules": ["attn_qkv"]}, "LoRA: expected none"),
        ({"plugin_config": {"use_paged_context_fmha": True}}, "use_paged_context_fmha: expected disable.*KV blocks"),
        ({"plugin_config": {"paged_state": False}}, "paged_state: expected enable, got False"),
        ({"plugin_config": {"remove_input_padding": False}}, "remove_input_padding: expected enable"),
        ({"plugin_config": {"mamba_conv1d_plugin": None}}, "mamba_conv1d_plugin: expected enable, got None"),
        ({"plugin_config": {"gpt_attention_plugin": None}}, "gpt_attention_plugin: expected enable"),
    ],
)
def test_what_the_runtime_refuses_is_refused_at_build(monkeypatch, wide, tmp_path, options, message):
    convert(wide, tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        Recorded(monkeypatch, tmp_path / "out", **options)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda config: config.pop("replayssm"), "key 'replayssm' is missing"),
        (lambda config: config["replayssm"].update(layout_version=1), "replayssm.layout_version is 1, expected"),
        (lambda config: config.update(state_size=config["state_size"] - 1), "expected .* convert the checkpoint again"),
        (lambda config: config["replayssm"].update(window=25), "convert the checkpoint again"),
        (lambda config: config["replayssm"]["layers"].__setitem__(1, "moe"), "layer 1 is 'moe'"),
    ],
)
def test_a_foreign_checkpoint_is_refused(monkeypatch, wide, tmp_path, change, message):
    convert(wide, tmp_path / "out", window=24)
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        Recorded(monkeypatch, tmp_path / "out")


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_the_model_file_gives_a_class_that_worker_processes_find(monkeypatch):
    """trtllm-build loads the file under the name `models`, which a spawned worker cannot import."""
    Recorder().install(monkeypatch)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    loaded = SourceFileLoader("models", str(model_file())).load_module()
    monkeypatch.delitem(sys.modules, "models", raising=False)
    made = loaded.ReplayNemotronHForCausalLM
    assert made.__module__ == MODEL and pickle.loads(pickle.dumps(made)) is made


def test_tensorrt_builds_the_plugins_of_the_network(monkeypatch, wide, tmp_path):
    """TensorRT-RTX, without a GPU: the plugins take their fields, types and shapes, and no copy comes between."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "plugins"))
    registry = importlib.import_module("registry")
    if registry.MISSING:
        pytest.skip(f"without {registry.MISSING}")
    convert(wide, tmp_path / "out", tp=2, window=24)
    nodes = [node for node in Recorded(monkeypatch, tmp_path / "out", rank=1).recorder.nodes if node.what in PLUGINS]
    (tmp_path / "plugins.onnx").write_bytes(plugin_graph(nodes).SerializeToString())
    result, _ = registry.in_child("graph:file_report", str(tmp_path / "plugins.onnx"))
    assert result["built"] and not [text for kind, text in result["log"] if kind in ("ERROR", "INTERNAL_ERROR")]
    kinds = [kind for kind, _, _ in result["layers"]]
    assert kinds.count("custom_layer") == 2 * len(nodes)  # two profiles
    assert set(kinds) <= {"custom_layer", "shape_call"}


class Blob:
    """The runtime's memory of the recurrent layers, never zeroed, and who sits in which slot."""

    def __init__(self, layers, slots, slot_bytes):
        self.memory = np.full((len(layers), slots, slot_bytes), 0xFF, np.uint8)
        self.pointers = {
            f"rnn_state_ptr_{layer}": np.array([self.memory[index].ctypes.data], np.int64)
            for index, layer in enumerate(layers)
        }


class Request:
    def __init__(self, prompt, steps):
        self.prompt, self.steps, self.tokens, self.slot = prompt, steps, [], None
        self.mamba = {}  # layer -> what the mixer gave for each token


def batch(requests, blob, context):
    """The tensors that TensorRT-LLM's runtime binds for these requests, in their order."""
    tokens = [request.prompt if context else request.tokens[-1:] for request in requests]
    prompts = np.array([len(request.prompt) for request in requests], np.int32)
    generated = np.array([len(request.tokens) for request in requests], np.int32)
    return {
        "input_ids": np.array(sum(tokens, []), np.int32),
        "last_token_ids": np.cumsum([len(ids) for ids in tokens]).astype(np.int32),
        "host_request_types": np.full(len(requests), 0 if context else 1, np.int32),
        "host_context_lengths": prompts,
        "context_lengths": prompts,
        "sequence_length": prompts + generated,
        "slot_mapping": np.array([request.slot for request in requests], np.int32),
        **blob.pointers,
    }


@pytest.fixture
def embedded(dense_tiny, monkeypatch):
    """The embedded runtime's greedy tokens and Mamba outputs of one prompt: (tokens, layer -> [tokens, hidden])."""
    outputs, call = {}, MambaMixer.__call__

    def recording(mixer, x, *rest):
        made = call(mixer, x, *rest)
        outputs.setdefault(mixer.layer, []).append(made.float().numpy().copy())
        return made

    monkeypatch.setattr(MambaMixer, "__call__", recording)

    def run(prompt, steps, window):
        outputs.clear()
        engine = Engine(dense_tiny, device="cpu", dtype="float32", window=window, max_batch=1)
        outputs.clear()
        sequence = engine.add_request(prompt, SamplingParams(max_tokens=steps + 1))
        while sequence.finish_reason is None:
            engine.step()
        return sequence.prompt, sequence.tokens, {layer: np.concatenate(parts) for layer, parts in outputs.items()}

    return run


def test_64_decode_steps_are_those_of_the_embedded_runtime(monkeypatch, dense_tiny, tmp_path, embedded):
    """Six requests take turns in three slots of memory that is dirty and never cleared; the order of a batch changes at
    every step. A01, A10, A11."""
    window = 7
    config = convert(dense_tiny, tmp_path / "out", window=window).config
    recorded = Recorded(monkeypatch, tmp_path / "out")
    weights = {name: tensor.numpy() for name, tensor in load_file(tmp_path / "out" / "rank0.safetensors").items()}
    run = NetworkRun(recorded.recorder, recorded.model, weights)
    blob = Blob((0, 2, 4), 3, config["replayssm"]["rank_slot_bytes"])
    outputs = [node.outputs[0] for node in recorded.recorder.nodes if node.what == "RowLinear"]
    assert len(outputs) == 3
    texts = ["In the beginning God created", "And", "Blessed are they that", "The LORD spake unto Moses, saying,"]
    wanted = [(texts[0], 64), (texts[1], 20), (texts[2], 33), (texts[3], 40), (texts[1], 64), ("I", 9)]
    expected = [embedded(text, steps, window) for text, steps in wanted]
    waiting = [Request(prompt, steps) for (prompt, _, _), (_, steps) in zip(expected, wanted, strict=True)]
    everyone, live, free, rng = list(waiting), [], [2, 0, 1], random.Random(0)
    enqueued = 0
    while waiting or live:
        begin = [waiting.pop(0) for _ in range(min(len(waiting), len(free), 2))]
        for request in begin:
            request.slot = free.pop(0)
        now = begin or rng.sample(live, len(live))
        feeds = batch(now, blob, bool(begin))
        made = run(feeds)
        assert not made["replayssm_status"].any()
        for layer, tensor in enumerate(outputs):
            parts = np.split(run.value(tensor), feeds["last_token_ids"][:-1])
            for request, part in zip(now, parts, strict=True):
                request.mamba.setdefault(layer, []).append(part)
        for request, logits in zip(now, made["logits"], strict=True):
            request.tokens.append(int(logits.argmax()))
        live = [request for request in live + begin if len(request.tokens) <= request.steps]
        free += [request.slot for request in now if len(request.tokens) > request.steps]
        rng.shuffle(free)
        enqueued += 1
    assert enqueued > 64
    for request, (_, tokens, mamba) in zip(everyone, expected, strict=True):
        assert request.tokens == tokens
        for layer in range(3):
            given, right = np.concatenate(request.mamba[layer]), mamba[layer]
            assert len(given) == len(request.prompt) + request.steps
            error = np.linalg.norm(given - right, axis=-1) / np.linalg.norm(right, axis=-1)
            assert error.max() < 2e-5
