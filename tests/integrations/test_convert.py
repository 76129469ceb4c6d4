# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM checkpoints: the shares of the ranks make up the original, the runtime's block of memory is a slot, and
what cannot be had is refused by name."""

import json
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtllm_replayssm import ReplayConfig, SlotLayout, cli
from trtllm_replayssm.integrations.trtllm_build.convert import convert
from trtllm_replayssm.integrations.trtllm_build.shards import Parallelism
from trtllm_replayssm.runtime import CheckpointError, ModelConfig
from trtllm_replayssm.runtime.weights import Weights

from ..builder.checkpoints import FAMILIES, fp8_tensors, nvfp4_tensors, values_of, write_family
from ..runtime.conftest import TINY, write_checkpoint
from .conftest import WIDE


def parts(ranks, name):
    return [rank[name] for rank in ranks]


def sections(tensors, sizes):
    """Tensors whose rows are sections of these sizes (all ranks together), put together section by section: every rank
    has an equal share of each. A25."""
    tp, whole = len(tensors), []
    for index, size in enumerate(sizes):
        first = sum(sizes[:index]) // tp
        whole += [tensor[first : first + size // tp] for tensor in tensors]
    return torch.cat(whole)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shares_make_up_the_original(wide, tmp_path, tp):
    """Bit for bit, and nothing else is in the files."""
    config = convert(wide, tmp_path / "out", tp=tp, window=8).config
    ranks = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(tp)]
    original, model = load_file(wide / "model.safetensors"), ModelConfig.read(wide)
    original = {name: tensor.bfloat16() for name, tensor in original.items()}
    inner, group = model.d_inner, model.mamba_groups * model.state_dim
    rebuilt = {
        "backbone.embeddings.weight": ranks[0]["transformer.vocab_embedding.weight"],
        "backbone.norm_f.weight": ranks[0]["transformer.ln_f.weight"],
        "lm_head.weight": torch.cat(parts(ranks, "lm_head.weight")),
    }
    used = {"transformer.vocab_embedding.weight", "transformer.ln_f.weight", "lm_head.weight"}
    for index, kind in enumerate(model.layers):
        source, name = f"backbone.layers.{index}.", f"transformer.layers.{index}."

        def of(part, name=name):
            used.add(name + part)
            return parts(ranks, name + part)

        def same(part):
            tensors = of(part)
            assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
            return tensors[0]

        rebuilt[source + "norm.weight"] = same("input_layernorm.weight")
        if kind == "mamba":
            projected = [inner, inner, group, group, model.mamba_heads]
            rebuilt |= {
                source + "mixer.in_proj.weight": sections(of("mamba.in_proj.weight"), projected),
                source + "mixer.in_proj.bias": sections(of("mamba.in_proj.bias"), projected),
                source + "mixer.conv1d.weight": sections(of("mamba.conv_weight"), [inner, group, group])[:, None],
                source + "mixer.norm.weight": torch.cat(of("mamba.norm.weight")),
                source + "mixer.out_proj.weight": torch.cat(of("mamba.out_proj.weight"), 1),
                source + "mixer.out_proj.bias": same("mamba.out_proj.bias"),
            }
            for vector in ("A_log", "D", "dt_bias"):
                whole = torch.cat(of(f"mamba.{vector}"))
                assert whole.dtype == torch.float32
                rebuilt[f"{source}mixer.{vector}"] = whole.bfloat16()
            zeros = torch.cat(of("mamba.conv_bias"))
            assert zeros.shape == (model.conv_channels,) and not zeros.any()
        elif kind == "attention":
            head, kv = model.head_dim, model.kv_heads
            queries, keys = model.attention_heads // tp * head, max(kv // tp, 1) * head
            qkv = [tensor.split([queries, keys, keys]) for tensor in of("attention.qkv.weight")]
            copies = max(tp // kv, 1)
            for place, projection in enumerate(("q_proj", "k_proj", "v_proj")):
                step = 1 if projection == "q_proj" else copies
                own = [tensors[place] for tensors in qkv]
                assert all(torch.equal(own[rank], own[rank - rank % step]) for rank in range(tp))
                rebuilt[f"{source}mixer.{projection}.weight"] = torch.cat(own[::step])
            rebuilt[source + "mixer.o_proj.weight"] = torch.cat(of("attention.dense.weight"), 1)
        else:
            rebuilt |= {
                source + "mixer.up_proj.weight": torch.cat(of("mlp.fc.weight")),
                source + "mixer.up_proj.bias": torch.cat(of("mlp.fc.bias")),
                source + "mixer.down_proj.weight": torch.cat(of("mlp.proj.weight"), 1),
                source + "mixer.down_proj.bias": same("mlp.proj.bias"),
            }
    assert rebuilt.keys() == original.keys()
    for name, tensor in rebuilt.items():
        assert torch.equal(tensor, original[name]), name
    assert all(rank.keys() == used for rank in ranks)
    assert config["mapping"] == {"world_size": tp, "tp_size": tp, "pp_size": 1}


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("checkpoint_format, read_copy", [("fp32", "none"), ("fp16_sr", "nvfp4")])
def test_the_runtimes_block_is_a_slot(wide, tmp_path, tp, checkpoint_format, read_copy):
    """By the formula of TensorRT-LLM's RnnStateManager; its pool of convolution states holds one element a slot."""
    formats = dict(checkpoint_format=checkpoint_format, read_copy=read_copy)
    given = json.loads(json.dumps(convert(wide, tmp_path / "out", tp=tp, window=24, **formats).config))
    assert given == json.loads((tmp_path / "out" / "config.json").read_text())
    block = 4 * (given["rnn_hidden_size"] // given["rnn_head_size"]) * given["state_size"] * given["rnn_head_size"]
    model = ModelConfig.read(wide)
    rank = model.geometry.__class__(16 // tp, 16, 8 // tp, model.state_dim, model.conv_kernel)
    replay = ReplayConfig(window=24, checkpoint=checkpoint_format, read_copy=read_copy)
    assert block == SlotLayout(rank, replay).slot_stride == given["replayssm"]["rank_slot_bytes"]
    assert (given["conv_kernel"] - 1) * given["rnn_conv_dim_size"] == 1
    assert given["architecture"] == "RecurrentGemmaForCausalLM"
    assert given["layer_types"] == ["recurrent", "linear", "recurrent", "attention", "recurrent", "linear"]
    assert given["replayssm"]["geometry"]["num_heads"] == 16 and given["replayssm"]["window"] == 24


def test_states_are_kept_as_the_checkpoint_recommends(tmp_path):
    """What `quantize` writes; arguments come first."""
    checkpoint = write_checkpoint(tmp_path / "source", WIDE | {"replayssm": {"window": 24, "checkpoint": "fp16"}})
    config = convert(checkpoint, tmp_path / "out").config["replayssm"]
    assert [config[key] for key in ("window", "checkpoint_format", "read_copy")] == [24, "fp16", "none"]
    config = convert(checkpoint, tmp_path / "other", window=16, read_copy="fp8").config["replayssm"]
    assert [config[key] for key in ("window", "checkpoint_format", "read_copy")] == [16, "fp16", "fp8"]


def test_a_pure_model_has_the_other_name(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "pure", WIDE | {"hybrid_override_pattern": "M-M"})
    assert convert(checkpoint, tmp_path / "out").config["architecture"] == "MambaForCausalLM"


@pytest.mark.parametrize("layers, pp", [(6, 1), (6, 4), (7, 3), (5, 5)])
def test_stages_are_those_of_tensor_split(layers, pp):
    """As tensorrt_llm.mapping cuts them."""
    expected = [part.tolist() for part in torch.tensor_split(torch.arange(layers), pp)]
    assert [list(Parallelism(1, pp).stage_layers(layers, stage)) for stage in range(pp)] == expected


def test_a_stage_may_have_no_mamba_layer(tmp_path):
    """ "MM*-" on three stages: M M, *, -. Ranks are numbered stage by stage. A08."""
    checkpoint = write_checkpoint(tmp_path / "source", WIDE | {"hybrid_override_pattern": "MM*-"})
    converted = convert(checkpoint, tmp_path / "out", tp=2, pp=3)
    ranks = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(6)]
    kinds = [{name.split(".")[3] for name in rank if ".layers." in name} - {"input_layernorm"} for rank in ranks]
    assert kinds == [{"mamba"}, {"mamba"}, {"attention"}, {"attention"}, {"mlp"}, {"mlp"}]
    ends = ("transformer.vocab_embedding.weight", "lm_head.weight")
    assert [[end in rank for end in ends] for rank in ranks] == [[True, False]] * 2 + [[False, False]] * 2 + [
        [False, True]
    ] * 2
    assert "transformer.layers.1.mamba.A_log" in ranks[0] and "transformer.layers.0.attention.qkv.weight" in ranks[2]
    assert [path.stat().st_size for path in sorted((tmp_path / "out").glob("rank*"))] == list(converted.bytes)


@pytest.mark.parametrize(
    "changes, arguments, message",
    [
        ({}, {"tp": 3}, "tp: expected a divisor of the vocabulary 1024, got 3"),
        ({"n_groups": 2}, {"tp": 4}, "tp: expected a divisor of the 2 Mamba groups, got 4: the gated norm sums over"),
        ({"num_attention_heads": 6}, {"tp": 4}, "tp: expected a divisor of the attention heads 6, got 4"),
        ({"num_key_value_heads": 3, "num_attention_heads": 24}, {"tp": 2}, "a multiple of the 3 key heads, got 2"),
        ({"intermediate_size": 36}, {"tp": 8}, "tp: expected a divisor of the intermediate size 36, got 8"),
        ({}, {"pp": 7}, "pp: expected at most the 6 layers, got 7"),
        ({}, {"tp": 0}, "tp: expected at least 1, got 0"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, changes, arguments, message):
    checkpoint = write_checkpoint(tmp_path / "source", WIDE | changes)
    with pytest.raises(ValueError, match=message):
        convert(checkpoint, tmp_path / "out", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_moe_and_broken_checkpoints_are_refused(wide, tmp_path):
    with pytest.raises(CheckpointError, match=r"layer 5 is MoE: .*trtllm-serve"):
        convert(TINY, tmp_path / "out")
    broken = shutil.copytree(wide, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["backbone.layers.0.mixer.in_proj.weight"] = tensors["backbone.layers.0.mixer.in_proj.weight"][:-1]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor 'backbone.layers.0.mixer.in_proj.w.*' has"):
        convert(broken, tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out: is there already"):
        convert(wide, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "out"]


def test_nothing_is_left_of_a_conversion_that_fails(wide, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("trtllm_replayssm.runtime.weights.Weights.slice", fail)
    with pytest.raises(OSError, match="no space left"):
        convert(wide, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family):
    """Dense ones are converted, those with experts refused."""
    checkpoint = write_family(tmp_path / "source", family, shards=3)
    if not family.startswith("nano-") or family == "nano-30b-a3b":
        with pytest.raises(CheckpointError, match=r"layer \d+ is MoE"):
            convert(checkpoint, tmp_path / "out", tp=2)
        return
    config = convert(checkpoint, tmp_path / "out", tp=8, window=16).config
    raw = FAMILIES[family]
    pattern = raw["hybrid_override_pattern"]
    assert config["layer_types"].count("recurrent") == pattern.count("M") and len(config["layer_types"]) == len(pattern)
    assert config["replayssm"]["geometry"]["head_dim"] == 80
    ranks = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(8)]
    first = pattern.index("*")
    assert ranks[3][f"transformer.layers.{first}.attention.qkv.weight"].shape == ((1 + 2) * 16, 64)
    assert len({frozenset(rank) for rank in ranks}) == 1


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_quantised_linears_are_cut_and_not_changed(tmp_path, tp):
    """NVFP4 and FP8 beside each other, in TensorRT-LLM's names; lists of its own modules in quant_cfg.json."""
    layers = {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3}
    checkpoint = write_family(tmp_path / "source", "nano-4b", quantized=True, **layers)
    source = load_file(checkpoint / "model.safetensors")
    config = convert(checkpoint, tmp_path / "out", tp=tp).config
    assert config["quantization"] == {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    lists = json.loads((tmp_path / "out" / "quant_cfg.json").read_text())
    assert lists["quantized_layers"] == {
        "transformer.layers.0.mamba.in_proj": {"quant_algo": "FP8"},
        "transformer.layers.0.mamba.out_proj": {"quant_algo": "FP8"},
        "transformer.layers.1.mlp.fc": {"quant_algo": "NVFP4", "group_size": 16},
    }
    ranks = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(tp)]
    up, down = "backbone.layers.1.mixer.up_proj.", "backbone.layers.0.mixer.out_proj."
    fc, out = "transformer.layers.1.mlp.fc.", "transformer.layers.0.mamba.out_proj."
    bits = lambda tensors, axis: torch.cat([tensor.view(torch.uint8) for tensor in tensors], axis)  # noqa: E731
    assert torch.equal(bits(parts(ranks, fc + "weight"), 0), source[up + "weight"])
    scales = bits(parts(ranks, fc + "weights_scaling_factor"), 0)
    assert torch.equal(scales, source[up + "weight_scale"].view(torch.uint8))
    assert torch.equal(bits(parts(ranks, out + "weight"), 1), source[down + "weight"].view(torch.uint8))
    for rank in ranks:
        for name, given in (
            (fc + "weights_scaling_factor_2", up + "weight_scale_2"),
            (fc + "activation_scaling_factor", up + "input_scale"),
            (out + "weights_scaling_factor", down + "weight_scale"),
            (out + "activation_scaling_factor", down + "input_scale"),
        ):
            assert rank[name].dtype == torch.float32 and rank[name].shape == (1,)
            assert torch.equal(rank[name][0], source[given])


def requantised(folder, names, pack=nvfp4_tensors, **changes):
    """A checkpoint of three layers in which these linears are quantised, and no lists."""
    layers = {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3} | changes
    checkpoint = write_family(folder, "nano-4b", **layers)
    tensors = load_file(checkpoint / "model.safetensors")
    for name in names:
        tensors |= pack(name, tensors[name])
    save_file(tensors, checkpoint / "model.safetensors")
    return checkpoint, tensors


def test_one_format_is_told_by_what_is_left_out(tmp_path):
    checkpoint, _ = requantised(tmp_path / "source", ["backbone.layers.1.mixer.down_proj.weight"])
    config = convert(checkpoint, tmp_path / "out", tp=2).config
    left = ["0.mamba.in_proj", "0.mamba.out_proj", "1.mlp.fc", "2.attention.qkv", "2.attention.dense"]
    assert config["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": [f"transformer.layers.{module}" for module in left] + ["lm_head"],
    }
    assert not (tmp_path / "out" / "quant_cfg.json").exists()


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 2)])
def test_what_no_layer_can_be_is_dequantised(tmp_path, tp, pp):
    """Embeddings, and linears of which only the weight is quantised: their values, cut as others are."""
    attention = [f"backbone.layers.2.mixer.{name}_proj.weight" for name in "qkv"]
    nvfp4 = ["backbone.embeddings.weight", "backbone.layers.1.mixer.down_proj.weight", *attention[:2]]
    checkpoint, tensors = requantised(tmp_path / "source", nvfp4)
    tensors |= fp8_tensors("lm_head.weight", tensors["lm_head.weight"])
    for name in [*nvfp4[1:], "lm_head.weight"]:  # the embedding's is of no use, but does not make it a linear
        del tensors[name.removesuffix("weight") + "input_scale"]
    save_file(tensors, checkpoint / "model.safetensors")
    converted = convert(checkpoint, tmp_path / "out", tp=tp, pp=pp)
    assert converted.dequantized == (*nvfp4[:2], *attention[:2], "lm_head.weight")
    assert converted.config["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": None}
    ranks = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(tp * pp)]
    first, last = ranks[:tp], ranks[-tp:]  # layers 0 and 1, then 2
    place = f"transformer.layers.{2 if pp == 1 else 0}.attention.qkv.weight"
    down = "transformer.layers.1.mlp.proj.weight"
    queries, keys = 8 * 16 // tp, 4 * 16 // tp
    qkv = [list(tensor.split([queries, keys, keys])) for tensor in parts(last, place)]
    assert not any("scal" in name for rank in ranks for name in rank)
    for name, given in (
        ("backbone.embeddings.weight", first[-1]["transformer.vocab_embedding.weight"]),
        ("lm_head.weight", torch.cat(parts(last, "lm_head.weight"))),
        (
            "backbone.layers.1.mixer.down_proj.weight",
            torch.cat(parts(first, down), 1),
        ),
        *((name, torch.cat([rank[index] for rank in qkv])) for index, name in enumerate(attention)),
    ):
        stored = tensors[name]
        if name in nvfp4:
            codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1).unflatten(1, (-1, 16))
            stored = values_of(codes, tensors[name + "_scale"], tensors[name + "_scale_2"])
        elif name == "lm_head.weight":
            stored = stored.float() * tensors[name + "_scale"]
        assert given.dtype == torch.bfloat16 and torch.equal(given, stored.bfloat16()), name


def test_scales_of_the_kv_cache_are_told_as_left_out(tmp_path):
    """Where they are read, too: of the layers' own, not those of linears."""
    checkpoint, tensors = requantised(tmp_path / "source", [])
    attention = "backbone.layers.2.mixer."
    tensors |= {f"{attention}{name}_proj.{name}_scale": torch.tensor(0.5) for name in "kv"}
    save_file(tensors, checkpoint / "model.safetensors")
    converted = convert(checkpoint, tmp_path / "out")
    assert converted.dropped == ("2 scales of an FP8 KV cache (the KV cache has the model's dtype)",)
    assert converted.config["quantization"]["kv_cache_quant_algo"] is None
    tensors[attention + "k_proj.k_scale"] = torch.tensor(float("nan"))
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="k_scale' is spoilt"):
        convert(checkpoint, tmp_path / "spoilt")


def test_what_quantize_makes_is_converted(tmp_path, capsys):
    """docs/deploy-trtllm-build.md's way: NVIDIA's recipe for Nano-4B by the real Model Optimizer, on its layers."""
    checkpoint = write_family(tmp_path / "nano-4b", "nano-4b")
    text = tmp_path / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 8)
    made, out = tmp_path / "made", tmp_path / "out"
    calibration = ["--calib", str(text), "--rows", "1", "--tokens", "16", "--no-kl"]
    quantize = ["quantize", "--checkpoint", str(checkpoint), "--format", "nvfp4", "--recipe", "nemotron3-nano-4b"]
    assert cli.main([*quantize, "--output", str(made), *calibration]) == 0
    capsys.readouterr()
    assert cli.main(["convert", "--checkpoint", str(made), "--output", str(out), "--tp", "2"]) == 0
    assert "any more, bfloat16 now: backbone.embeddings.weight, lm_head.weight (Tensor" in capsys.readouterr().out
    lists = json.loads((out / "quant_cfg.json").read_text())["quantized_layers"]
    given = Counter(entry["quant_algo"] for entry in lists.values())
    # 21 Mamba layers of two linears, 17 MLPs, 4 attention layers of two; nine down projections are FP8
    assert given == {"NVFP4": 21 * 2 + 17 * 2 - 9 + 4 * 2, "FP8": 9}
    weights = Weights(made, ModelConfig.read(made))
    for rank in range(2):
        tensors = load_file(out / f"rank{rank}.safetensors")
        half = slice(rank * 512, (rank + 1) * 512)
        for name, source, rows in (
            ("transformer.vocab_embedding.weight", "backbone.embeddings.weight", slice(None)),
            ("lm_head.weight", "lm_head.weight", half),
        ):
            assert torch.equal(tensors[name], weights.read(source, torch.bfloat16, torch.device("cpu"))[rows])


def test_quantised_linears_that_cannot_be_had(tmp_path):
    attention = [f"backbone.layers.2.mixer.{name}_proj.weight" for name in "qkv"]
    checkpoint, tensors = requantised(tmp_path / "qkv", attention)
    with pytest.raises(CheckpointError, match="weight_scale_2.* become one linear with one such scale, but differ"):
        convert(checkpoint, tmp_path / "out")
    for name in attention:
        tensors[name + "_scale_2"] = tensors[attention[0] + "_scale_2"].clone()
    save_file(tensors, checkpoint / "model.safetensors")
    convert(checkpoint, tmp_path / "same")
    checkpoint, _ = requantised(tmp_path / "some", attention[:1], fp8_tensors)
    with pytest.raises(CheckpointError, match="become one linear, but not all are of one format"):
        convert(checkpoint, tmp_path / "out")
    down = ["backbone.layers.1.mixer.down_proj.weight"]
    checkpoint, tensors = requantised(tmp_path / "columns", down)
    with pytest.raises(CheckpointError, match="expected pp 1, got 2"):
        convert(checkpoint, tmp_path / "out", pp=2)
    checkpoint, tensors = requantised(tmp_path / "inputs", attention, fp8_tensors)
    del tensors["backbone.layers.2.mixer.k_proj.input_scale"]
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="k_proj.input_scale' is missing, but of other parts of the same linear"):
        convert(checkpoint, tmp_path / "out")
    checkpoint, _ = requantised(tmp_path / "narrow", down, intermediate_size=96)
    with pytest.raises(CheckpointError, match="columns 0..11 of a rank, expected whole blocks of 16"):
        convert(checkpoint, tmp_path / "out", tp=8)
    assert not (tmp_path / "out").exists()
