# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that cannot be loaded are refused by name; both spellings of the format are understood."""

import json
import math
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtllm_replayssm.runtime import CheckpointError, Engine, ModelConfig, SamplingParams
from trtllm_replayssm.runtime.weights import Weights, mtp_tensors

from .conftest import SMALL, TINY, write_checkpoint


@pytest.fixture
def checkpoint(small, tmp_path):
    """A copy of the small checkpoint, to be spoilt."""
    return shutil.copytree(small, tmp_path / "checkpoint")


def refused(checkpoint, message):
    with pytest.raises(CheckpointError, match=message):
        Engine(checkpoint, device="cpu")


def edit_tensors(checkpoint, change):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(checkpoint, **changes):
    raw = json.loads((checkpoint / "config.json").read_text()) | changes
    (checkpoint / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


NAME = "backbone.layers.0.mixer.A_log"


def test_missing_tensor(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.pop(NAME))
    refused(checkpoint, rf"tensor '{NAME}' is missing, expected shape \[4\]")


def test_extra_tensor(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update({"backbone.layers.0.mixer.extra": torch.zeros(1)}))
    refused(checkpoint, r"model.safetensors: tensor 'backbone.layers.0.mixer.extra' is unknown")


def test_misshapen_tensor(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update({NAME: torch.zeros(5)}))
    refused(checkpoint, rf"model.safetensors: tensor '{NAME}' has shape \[5\], expected \[4\]")


def test_quantised_tensor(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update({NAME: torch.zeros(4, dtype=torch.uint8)}))
    refused(checkpoint, rf"tensor '{NAME}' has dtype U8, expected one of F32, BF16, F16")


@pytest.mark.parametrize("kept", [0, 7, 200, -1])
def test_truncated_file(checkpoint, kept):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(checkpoint, "model.safetensors: not a complete safetensors file")


def test_pickle_is_never_loaded(checkpoint, tmp_path):
    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "exploded"), "w")

    path = checkpoint / "model.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    refused(checkpoint, "model.safetensors: not a complete safetensors file")
    path.rename(checkpoint / "pytorch_model.bin")
    refused(checkpoint, r"holds pickled weights \(pytorch_model.bin\), which are never loaded")
    assert not (tmp_path / "exploded").exists()


def test_no_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "neither model.safetensors nor model.safetensors.index.json is there")


def shard(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model.safetensors").unlink()
    return index


def test_sharded_checkpoint_is_the_same_model(small, checkpoint):
    shard(checkpoint)
    params = SamplingParams(max_tokens=12, stop_tokens=())
    texts = [Engine(folder, device="cpu").generate(["And"], params)[0].tokens for folder in (small, checkpoint)]
    assert texts[0] == texts[1]


def test_broken_shards(checkpoint):
    index = shard(checkpoint)
    (checkpoint / "b.safetensors").rename(checkpoint / "c.safetensors")
    refused(checkpoint, "b.safetensors: no such file, but the index lists it")
    save_file({NAME: torch.zeros(4), "lm_head.weight": torch.zeros(1)}, checkpoint / "b.safetensors")
    refused(checkpoint, "is in a.safetensors too|is missing")
    index["weight_map"][NAME] = "../elsewhere.safetensors"
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(checkpoint, "shard '../elsewhere.safetensors' is not a plain file name")
    (checkpoint / "model.safetensors.index.json").write_text("[1]")
    refused(checkpoint, "index.json: not a safetensors index")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M-MX*M"}, r"unknown layer letter 'X' at position 3, known are M \* - E"),
        ({"hybrid_override_pattern": "M|M"}, r"unknown layer letter '\|'"),
        ({"layers_block_type": ["linear_attention", "conv"]}, "layers_block_type names the unknown layer 'conv'"),
        ({"hybrid_override_pattern": None}, "neither 'layers_block_type' nor 'hybrid_override_pattern' is present"),
        ({"hybrid_override_pattern": "-*"}, r"no Mamba layer \('M'\)"),
        ({"model_type": "llama"}, "model_type is 'llama', expected 'nemotron_h'"),
        ({"mamba_num_heads": None}, "key 'mamba_num_heads' is missing"),
        ({"num_key_value_heads": None}, "key 'num_key_value_heads' is missing"),
        ({"intermediate_size": None}, "key 'intermediate_size' is missing"),
        ({"n_routed_experts": None}, "key 'n_routed_experts' is missing"),
        ({"hidden_size": "72"}, "hidden_size is '72', expected int"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a positive number"),
        ({"hidden_size": True}, "hidden_size is True, expected int"),
        ({"n_groups": 3}, "mamba_num_heads 4 is no multiple of n_groups 3"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, but only 6 can be chosen"),
        ({"n_group": 4}, "6 experts in n_group 4 of which topk_group 1 are chosen do not fit"),
        ({"n_group": 6, "topk_group": 2}, "n_group 6 leaves less than 2 of 6 experts a group"),
        ({"time_step_limit": [0.1]}, r"time_step_limit is \[0.1\], expected \[low, high\]"),
        ({"time_step_limit": [0.2, 0.1]}, "expected .low, high. with 0 <= low <= high"),
        ({"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit"),
        ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act is 'gelu', supported is 'relu2'"),
        ({"mamba_hidden_act": "relu"}, "mamba_hidden_act is 'relu', supported is 'silu'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"sliding_window": 128}, "sliding_window = 128 is not supported"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "says that 'lm_head' is NVFP4, but .* is F32"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5, but the layer pattern has 6 layers"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2, supported is 1"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1, but neither"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_configs_that_are_not_understood(checkpoint, changes, message):
    edit_config(checkpoint, **changes)
    refused(checkpoint, "config.json: .*" + message)


def test_config_file_itself(checkpoint, tmp_path):
    refused(tmp_path / "nowhere", "config.json: no such file")
    (checkpoint / "config.json").write_text("{")
    refused(checkpoint, "config.json: not readable as JSON")
    (checkpoint / "config.json").write_text("[]")
    refused(checkpoint, "config.json: holds a list")


def test_tokenizer_file(checkpoint):
    (checkpoint / "tokenizer.json").write_text("{}")
    refused(checkpoint, "tokenizer.json: not a tokenizer")
    (checkpoint / "tokenizer.json").unlink()
    refused(checkpoint, "tokenizer.json: no such file")


def test_unsupported_sizes_are_named(tmp_path):
    with pytest.raises((ValueError, NotImplementedError), match="head_dim"):
        Engine(write_checkpoint(tmp_path, SMALL | {"mamba_head_dim": 12}), device="cpu")


def test_both_spellings_are_one_config(tmp_path):
    by_letters = SMALL | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "torch_dtype": "float32"}
    del by_letters["dtype"]
    words = ["linear_attention", "mlp", "linear_attention", "moe", "full_attention", "linear_attention"]
    by_words = SMALL | {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}
    del by_words["hybrid_override_pattern"]
    configs = []
    for raw in (by_letters, by_words | {"layers_block_type": words}, by_words | {"layer_types": words}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        configs.append(ModelConfig.read(tmp_path))
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].time_step_limit == (0.0, math.inf)
    assert configs[0].layers == ("mamba", "mlp", "mamba", "moe", "attention", "mamba")
    assert configs[0].mtp_layers == ("attention", "moe")


def test_time_step_limit_forms(tmp_path):
    for value, expected in (
        ([0.0, math.inf], (0.0, math.inf)),  # Python writes a bare Infinity
        ([0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0.001, 0.1], (0.001, 0.1)),
        (None, (0.0, math.inf)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(SMALL | {"time_step_limit": value}))
        assert ModelConfig.read(tmp_path).time_step_limit == expected


def test_tied_embeddings(tmp_path):
    """tie_word_embeddings: there is no lm_head, the embeddings serve as one."""
    untied, tied = (write_checkpoint(tmp_path / name, SMALL) for name in ("untied", "tied"))
    edit_tensors(
        untied, lambda tensors: tensors.update({"lm_head.weight": tensors["backbone.embeddings.weight"].clone()})
    )
    edit_tensors(tied, lambda tensors: tensors.pop("lm_head.weight"))
    edit_config(tied, tie_word_embeddings=True)
    one, other = (Engine(folder, device="cpu").logits([5, 6, 7]) for folder in (untied, tied))
    assert torch.equal(one, other)


MTP = SMALL | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}


def test_mtp_head_is_complete_or_absent(tmp_path):
    checkpoint = write_checkpoint(tmp_path, MTP)
    config = ModelConfig.read(checkpoint)
    names = mtp_tensors(config)
    assert names["mtp.layers.0.eh_proj.weight"] == (72, 144)
    assert "mtp.layers.1.final_layernorm.weight" in names and "mtp.layers.1.enorm.weight" not in names
    assert Weights(checkpoint, config).has_mtp
    whole = Engine(checkpoint, device="cpu").generate(["And"], SamplingParams(max_tokens=5))[0].tokens

    edit_tensors(checkpoint, lambda tensors: tensors.update({"mtp.layers.0.eh_proj.weight": torch.zeros(72, 72)}))
    refused(checkpoint, r"tensor 'mtp.layers.0.eh_proj.weight' has shape \[72, 72\], expected \[72, 144\]")
    edit_tensors(checkpoint, lambda tensors: tensors.pop("mtp.layers.0.eh_proj.weight"))
    refused(checkpoint, "tensor 'mtp.layers.0.eh_proj.weight' is missing")
    edit_tensors(checkpoint, lambda tensors: [tensors.pop(name) for name in names if name in tensors])
    assert not Weights(checkpoint, config).has_mtp
    assert Engine(checkpoint, device="cpu").generate(["And"], SamplingParams(max_tokens=5))[0].tokens == whole


def test_mtp_tensors_that_the_config_does_not_mention(tmp_path):
    checkpoint = write_checkpoint(tmp_path, MTP)
    edit_config(checkpoint, num_nextn_predict_layers=0)
    refused(checkpoint, r"tensor 'mtp\..*' is unknown")


def test_shipped_checkpoint():
    config = ModelConfig.read(TINY)
    weights = Weights(TINY, config)
    assert weights.has_mtp
    assert (config.mamba_head_dim, config.state_dim) == (64, 128)
    assert set(config.layers) == {"mamba", "attention", "mlp", "moe"}
