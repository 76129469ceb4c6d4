# SPDX-License-Identifier: Apache-2.0
"""The five families of `nemotron_h` models are taken in, plain and quantised; wrong checkpoints are refused by file and
tensor."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trtllm_replayssm.cli import main
from trtllm_replayssm.runtime import CheckpointError, Engine, ModelConfig
from trtllm_replayssm.runtime.quantization import scale_tensors, seems_swizzled
from trtllm_replayssm.runtime.weights import Weights, expected_tensors, mtp_tensors

from ..runtime.conftest import TINY
from .checkpoints import FAMILIES, nvfp4_tensors, save_shards, values_of, write_family

LAYERS = {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5, "intermediate_size": 128}
IN_PROJ, UP = "backbone.layers.0.mixer.in_proj.weight", "backbone.layers.3.mixer.up_proj.weight"
EXPERT, SHARED = "backbone.layers.1.mixer.experts.5.down_proj", "backbone.layers.1.mixer.shared_experts"


def taken_in(checkpoint, allow=()):
    weights = Weights(checkpoint, ModelConfig.read(checkpoint), allow)
    weights.check_scales()
    return weights


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "quantised"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family, quantized):
    weights = taken_in(write_family(tmp_path, family, shards=3, quantized=quantized))
    assert weights.has_mtp == (family in ("super-120b-a12b", "ultra-550b-a55b"))
    config = ModelConfig.read(tmp_path)
    assert len(config.layers) == FAMILIES[family]["num_hidden_layers"]
    if quantized:
        counts = {kind: config.layers.count(kind) for kind in ("mamba", "mlp", "moe")}
        assert list(weights.quantized.values()).count("FP8") == 2 * counts["mamba"] + 2 * counts["moe"]
        assert list(weights.quantized.values()).count("NVFP4") == 16 * counts["moe"] + counts["mlp"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Short, with every kind of layer and an MTP head, quantised."""
    folder = write_family(tmp_path_factory.mktemp("good"), "super-120b-a12b", quantized=True, **LAYERS)
    taken_in(folder)
    return folder


@pytest.fixture
def spoil(good, tmp_path):
    """spoil(tensors: name -> new value, or None to drop it; config, lists: changed keys) -> the folder, in two shards:
    the tensors of even and of odd places."""

    def copy(tensors=None, config=None, lists=None):
        changed = load_file(good / "model.safetensors") | (tensors or {})
        save_shards(tmp_path, {name: tensor for name, tensor in changed.items() if tensor is not None}, 2)
        raw = json.loads((good / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | (config or {})))
        raw = json.loads((good / "hf_quant_config.json").read_text())
        raw["quantization"] |= lists or {}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(raw))
        shutil.copy(good / "tokenizer.json", tmp_path)
        return tmp_path

    return copy


def tensor(good, name):
    with safe_open(good / "model.safetensors", "pt") as file:
        return file.get_tensor(name)


def changed(value, index, to):
    value = value.clone()
    value.view(torch.uint8 if value.dtype == torch.float8_e4m3fn else value.dtype)[index] = to
    return value


E4M3_NAN, E4M3_NEGATIVE = 0x7F, 0xB8
TENSORS = [
    ("backbone.layers.0.mixer.A_log", lambda t: None, "{} is missing, expected shape [8]"),
    (f"{EXPERT}.weight", lambda t: None, "{} is missing, expected shape [32, 48]"),
    (f"{SHARED}.up_proj.weight", lambda t: None, "{} is missing"),
    ("backbone.layers.1.mixer.fc1_latent_proj.weight", lambda t: None, "{} is missing, expected shape [32, 64]"),
    ("backbone.layers.1.mixer.gate.e_score_correction_bias", lambda t: None, "{} is missing, expected shape [8]"),
    ("mtp.layers.0.eh_proj.weight", lambda t: None, "{} is missing, expected shape [64, 128]"),
    ("mtp.layers.1.final_layernorm.weight", lambda t: None, "{} is missing, expected shape [64]"),
    ("backbone.layers.2.mixer.q_proj.weight", lambda t: t.T.contiguous(), "{} has shape [64, 128], expected [128, 64]"),
    ("backbone.layers.0.mixer.conv1d.weight", lambda t: t[:, 0].contiguous(), "{} has shape [2560, 4]"),
    ("backbone.layers.4.mixer.D", lambda t: t[:4].contiguous(), "{} has shape [4], expected [8]"),
    ("backbone.layers.4.mixer.dt_bias", lambda t: t.to(torch.int32), "{} has dtype I32, expected one of F32"),
    ("backbone.layers.0.mixer.norm.weight", lambda t: t.to(torch.float8_e4m3fn), "{} has dtype F8_E4M3"),
    (f"{UP}_scale", lambda t: None, "{} is missing, expected shape [128, 4]"),
    (f"{UP}_scale_2", lambda t: None, "{} is missing, expected shape []"),
    (f"{UP}_scale", lambda t: t[:, ::2].contiguous(), "{} has shape [128, 2], expected [128, 4]: it is half as large"),
    (f"{UP}_scale", lambda t: t.T.contiguous(), "{} has shape [4, 128], expected [128, 4]: it is transposed"),
    (
        f"{EXPERT}.weight_scale",
        lambda t: torch.ones(128, 4).to(t.dtype),
        "{} has shape [128, 4], expected [32, 3]: it is padded to tiles of 128 x 4, as swizzled scales are",
    ),
    (f"{UP}_scale", lambda t: t.float(), "{} has dtype F32, expected one of F8_E4M3"),
    (f"{UP}_scale", lambda t: changed(t, (3, 1), 0), "scale {} is spoilt: 1 of its 512 values is zero"),
    (f"{UP}_scale", lambda t: changed(t, 5, E4M3_NAN), "scale {} is spoilt: 4 of its 512 values are NaN"),
    (f"{UP}_scale", lambda t: changed(t, (0, 0), E4M3_NEGATIVE), "scale {} is spoilt: 1 of its 512 values is negative"),
    (f"{UP}_scale_2", lambda t: t * 0, "scale {} is spoilt: 1 of its 1 values is zero"),
    (f"{IN_PROJ}_scale", lambda t: t * torch.inf, "scale {} is spoilt: 1 of its 1 values is infinite"),
    (f"{EXPERT}.input_scale", lambda t: t * torch.nan, "scale {} is spoilt: 1 of its 1 values is NaN"),
    ("backbone.layers.2.mixer.v_proj.v_scale", lambda t: torch.tensor(0.0), "scale {} is spoilt: 1 of its 1 values is"),
    ("backbone.layers.2.mixer.q_proj.k_scale", lambda t: torch.tensor(1.0), "{} is unknown"),
    ("lm_head.weight_scale", lambda t: torch.tensor(1.0), "{} is unknown; 'lm_head.weight' is BF16, which has no such"),
    ("backbone.layers.0.mixer.extra", lambda t: torch.zeros(1), "{} is unknown; config.json does not account for it"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), TENSORS)
def test_wrong_tensors(good, spoil, name, change, message):
    with safe_open(good / "model.safetensors", "pt") as file:
        value = change(file.get_tensor(name) if name in file.keys() else None)
    folder = spoil({name: value})
    with pytest.raises(CheckpointError, match=re.escape(message.format(repr(name)))) as error:
        taken_in(folder)
    assert str(error.value).startswith(str(folder))
    if value is not None:  # a missing tensor is in no file
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert str(error.value).startswith(str(folder / index["weight_map"][name]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_groups": 4}, r"tensor '.*0.mixer.in_proj.weight' has shape \[3080, 64\], expected \[2056, 64\]"),
        ({"mamba_num_heads": 16}, r"tensor '.*0.mixer.in_proj.weight' has shape \[3080, 64\], expected \[4112, 64\]"),
        ({"num_key_value_heads": 4}, r"tensor '.*2.mixer.k_proj.weight' has shape \[32, 64\], expected \[64, 64\]"),
        ({"n_routed_experts": 9}, r"tensor '.*1.mixer.experts.8.up_proj.weight' is missing"),
        ({"n_routed_experts": 7}, r"tensor '.*1.mixer.experts.7.down_proj..*' is unknown"),
        ({"moe_latent_size": None}, r"tensor '.*1.mixer.fc._latent_proj.weight' is unknown"),
        ({"num_nextn_predict_layers": 0}, r"tensor 'mtp\..*' is unknown"),
        ({"hybrid_override_pattern": "ME*EM"}, r"tensor '.*layers.3.mixer.gate.weight' is missing"),
        ({"hybrid_override_pattern": "MEA-M"}, r"unknown layer letter 'A' at position 2"),
        ({"num_hidden_layers": 6}, "num_hidden_layers is 6, but the layer pattern has 5 layers"),
    ],
)  # fmt: skip
def test_config_that_does_not_fit(spoil, config, message):
    with pytest.raises(CheckpointError, match=message):
        taken_in(spoil(config=config))


# ---- what the lists say ----------------------------------------------------------------------------------------------


def layers_of(good, **changes):
    layers = json.loads((good / "hf_quant_config.json").read_text())["quantization"]["quantized_layers"]
    return {"quantized_layers": layers | changes}


def test_lists_that_contradict(good, spoil, capsys):
    lm_head = tensor(good, "lm_head.weight")
    everything = {"quant_algo": "NVFP4", "quantized_layers": {}}
    cases = [
        # A32: listed as not quantised, with scales.
        (nvfp4_tensors("lm_head.weight", lm_head), {}, "'lm_head' is plain, but 'lm_head.weight' in .* is U8"),
        # A33: silently BF16; and another format than asked for.
        ({}, layers_of(good, lm_head={"quant_algo": "NVFP4"}), "'lm_head' is NVFP4, but .* is BF16"),
        ({}, layers_of(good, **{IN_PROJ[:-7]: {"quant_algo": "NVFP4"}}), "in_proj' is NVFP4, but .* is F8_E4M3 .FP8."),
        # A31: a format for all, and lists that are empty, or exclude everything.
        ({}, everything | {"exclude_modules": []}, "'lm_head' is NVFP4, but .* is BF16"),
        ({}, everything | {"exclude_modules": ["*"]}, "in_proj' is plain, but .* is F8"),
        ({}, {"quantized_layers": {}}, "quant_algo is 'MIXED_PRECISION', but quantized_layers names no module"),
        ({}, {"quant_algo": "INT4_AWQ"}, "quant_algo is 'INT4_AWQ', known are NVFP4"),
        ({}, {"group_size": 32}, "group_size is 32, expected 16"),
    ]  # fmt: skip
    for tensors, lists, message in cases:
        folder = spoil(tensors, lists=lists)
        with pytest.raises(CheckpointError, match=f"hf_quant_config.json: .*{message}"):
            taken_in(folder)
    folder = spoil(nvfp4_tensors("lm_head.weight", lm_head))
    with pytest.raises(CheckpointError, match="hf_quant_config.json: .* .and 1 more.; --allow MODULE"):
        taken_in(folder)  # config.json says the same
    assert taken_in(folder, ["lm_*"]).quantized["lm_head.weight"] == "NVFP4"
    arguments = ["generate", "--checkpoint", str(folder), "--prompt", "In", "--max-tokens", "1"]
    assert main(arguments) == 2
    assert "says that 'lm_head' is plain" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="6 FP8 and 18 NVFP4 weights become float32"):
        assert main([*arguments, "--allow", "lm_head"]) == 0


def test_spellings_of_lists(good, spoil):
    """Sentinels of Model Optimizer 0.47, dots at the ends of names, globs, and names of parents."""
    formats = layers_of(good)["quantized_layers"]
    odd = {f"{name}.\x00backbone.pt_name_sentinel": format for name, format in formats.items()}
    assert taken_in(spoil(lists={"quantized_layers": odd})).quantized
    plain = {name: None for name in load_file(good / "model.safetensors") if "scale" in name}
    with safe_open(good / "model.safetensors", "pt") as file:
        for name in file.keys():
            if name.removesuffix(".weight") + ".weight_scale" in plain:
                rows, columns = file.get_slice(name).get_shape()
                columns *= 2 if file.get_slice(name).get_dtype() == "U8" else 1
                plain[name] = torch.zeros(rows, columns, dtype=torch.bfloat16)
        plain |= nvfp4_tensors(UP, torch.ones(128, 64))
    excluded = ["lm_head.\x00backbone.pt_name_sentinel", "backbone.layers.0.mixer.in_proj.", "backbone.layers.0.*"]
    excluded += ["backbone.layers.1", "backbone.layers.2*", "*.down_proj", "backbone.layers.4.mixer.*_proj", "mtp*"]
    lists = {"quant_algo": "NVFP4", "quantized_layers": {}, "exclude_modules": excluded}
    folder = spoil(plain, {"quantization_config": {"quant_method": "modelopt"}}, lists)
    assert list(taken_in(folder).quantized) == [UP]


def swizzled(scales):
    rows, columns = scales.shape
    tiles = scales.view(torch.uint8).reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns).view(scales.dtype)


def test_routers_that_no_list_names(good, spoil):
    """As in the released Nano-30B-A3B-NVFP4, whose list of exceptions leaves out routers and embeddings."""
    lists = json.loads((good / "hf_quant_config.json").read_text())["quantization"]
    tensors = load_file(good / "model.safetensors")
    fp8 = [f"{name}.weight" for name, entry in lists["quantized_layers"].items() if entry["quant_algo"] == "FP8"]
    changes = {}
    for name in fp8:
        changes |= {f"{name}_scale": None, name.removesuffix("weight") + "input_scale": None}
        changes[name] = tensors[name].bfloat16()
    excluded = [name for name in lists["exclude_modules"] if not name.endswith(".gate")]
    excluded += [name.removesuffix(".weight") for name in fp8]
    lists = {"quant_algo": "NVFP4", "quantized_layers": {}, "exclude_modules": excluded}
    nested = {"quantization_config": {"producer": {"name": "modelopt"}, "quantization": lists}}
    assert set(taken_in(spoil(changes, nested, lists)).quantized.values()) == {"NVFP4"}
    gate = "backbone.layers.1.mixer.gate"
    wrong = {"quantized_layers": {gate: {"quant_algo": "NVFP4"}}}
    with pytest.raises(CheckpointError, match=f"says that '{gate}' is NVFP4, but '{gate}.weight' in .* is BF16"):
        taken_in(spoil(changes, nested, lists | wrong))
    other = {"quantization_config": {"quant_method": "compressed-tensors"}}
    with pytest.raises(CheckpointError, match="config.json: quant_method is 'compressed-tensors', expected 'modelopt'"):
        taken_in(spoil(changes, other, lists))


# ---- the released checkpoints ----------------------------------------------------------------------------------------

NANO_30B = FAMILIES["nano-30b-a3b"] | {
    "hidden_size": 2688,
    "vocab_size": 131072,
    "mamba_num_heads": 64,
    "num_attention_heads": 32,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
SUPER = FAMILIES["super-120b-a12b"] | {
    "hidden_size": 4096,
    "vocab_size": 131072,
    "mamba_num_heads": 128,
    "num_attention_heads": 32,
    "head_dim": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
}
# Layers of Super that NVIDIA left in BF16, and those where it did not.
SUPER_BF16 = {
    "in_proj": {22, 24, 33, 35, 38, 42, 44, 46, 64, 75, 77, 80},
    "out_proj": {6, 15, 20, 22, 24, 27, 29, 31, 33, 35, 46},
    "shared_experts.up_proj": {41},
    "shared_experts.down_proj": {8, 76},
}
SUPER_FP8 = {"fc1_latent_proj": {1, 3, 5}, "fc2_latent_proj": {3}, "o_proj": {69, 78}}


def nano_format(name, layer, module):
    """Mamba layers just before attention are BF16, as attention is."""
    if name.startswith("lm_head") or module in ("q_proj", "k_proj", "v_proj", "o_proj"):
        return None
    return None if module in ("in_proj", "out_proj") and layer in (4, 11, 18, 25, 32, 41) else "NVFP4"


def super_format(name, layer, module):
    if not name.startswith("backbone") or layer in SUPER_BF16.get(module, ()):
        return None
    if module.startswith("experts") or (layer, module) == (1, "shared_experts.down_proj"):
        return "NVFP4"
    return "FP8" if module in SUPER_BF16 or layer in SUPER_FP8.get(module, ()) else None


@pytest.mark.parametrize(
    ("raw", "format_of", "kv_scales", "fp32", "tensors", "stored"),
    [
        (NANO_30B, nano_format, 0, (".gate.weight", "_correction_bias"), 24_147, 19_339_781_632),
        (SUPER, super_format, 16, ("_correction_bias",), 165_860, 80_297_329_824),
    ],
    ids=["nano-30b-a3b", "super-120b-a12b"],
)
def test_released_checkpoints(tmp_path, raw, format_of, kv_scales, fp32, tensors, stored):
    """Our names and shapes make the number of tensors and of bytes in the headers of NVIDIA's NVFP4 releases."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.read(tmp_path)
    count, total = kv_scales, 4 * kv_scales
    for name, shape in (expected_tensors(config) | mtp_tensors(config)).items():
        found = re.match(r".*layers\.(\d+)\.mixer\.(.*)\.weight", name)
        linear = found and len(shape) == 2 and not name.endswith(".gate.weight") or name == "lm_head.weight"
        format = format_of(name, int(found[1]) if found else -1, found[2] if found else "") if linear else None
        count += 1
        if format is None:
            total += math.prod(shape) * (4 if name.endswith(fp32) else 2)
            continue
        total += math.prod(shape) // (2 if format == "NVFP4" else 1) + 4  # with the scale of its inputs
        scales = scale_tensors(name, format, shape).values()
        count += 1 + len(scales)
        total += sum(math.prod(size) * (1 if dtypes == ("F8_E4M3",) else 4) for size, dtypes in scales)
    assert (count, total) == (tensors, stored)


def test_swizzled_scales_of_the_right_shape(tmp_path):
    """Rows of different sizes tell the order."""
    config = {"hybrid_override_pattern": "M-", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 128}
    folder = write_family(tmp_path, "nano-4b", quantized=True, **config)
    tensors, name = load_file(folder / "model.safetensors"), "backbone.layers.1.mixer.up_proj.weight"
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 256, generator=random) * torch.randn(128, 1, generator=random).exp()
    tensors |= nvfp4_tensors(name, weight)
    save_shards(folder, tensors)
    right = taken_in(folder).nvfp4(name).block_scales
    save_shards(folder, tensors | {f"{name}_scale": swizzled(right).clone()})
    with pytest.raises(CheckpointError, match=f"model.safetensors: scale '{name}_scale' seems to be swizzled"):
        taken_in(folder)
    assert torch.equal(taken_in(folder, ["*.1.mixer.up_proj"]).nvfp4(name).block_scales, swizzled(right))


def test_right_scales_do_not_seem_swizzled():
    """Of every linear of the trained model that has whole tiles; swizzled, the four whose rows differ most show it."""
    shown = 0
    for name, weight in load_file(TINY / "model.safetensors").items():
        if weight.dim() == 2 and weight.shape[0] % 128 == 0 and weight.shape[1] % 64 == 0:
            scales = nvfp4_tensors(name, weight)[f"{name}_scale"]
            assert not seems_swizzled(scales), name
            shown += seems_swizzled(swizzled(scales))
    assert shown == 4


# ---- values ----------------------------------------------------------------------------------------------------------


def test_values(good):
    """Every quantised weight, read by definition."""
    tensors = load_file(good / "model.safetensors")
    weights = taken_in(good)
    for name, kind in weights.quantized.items():
        stored, scale = tensors[name], tensors[f"{name}_scale"]
        if kind == "NVFP4":
            codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1).unflatten(-1, (-1, 16))
            expected = values_of(codes, scale, tensors[f"{name}_scale_2"])
        else:
            expected = stored.float() * scale
        assert torch.equal(weights.read(name, torch.float32, torch.device("cpu")), expected)
        assert torch.equal(weights.read(name, torch.bfloat16, torch.device("cpu")), expected.bfloat16())


READING = """
total = 0
for name in weights.names:
    total += weights.read(name, torch.float32, torch.device("cpu")).nbytes
assert total > 3e8
"""
CONVERTING = """
from pathlib import Path
from trtllm_replayssm.integrations.trtllm_build.convert import convert
assert sum(convert(sys.argv[1], Path(sys.argv[1]).with_name("converted"), tp=2).bytes) > 3e8
"""


@pytest.mark.parametrize("work", [READING, CONVERTING], ids=["reading", "converting"])
def test_memory(tmp_path, big, work):
    """A checkpoint of many shards is read, and converted, within its largest tensor and a constant."""
    code = f"""
import sys, torch
from trtllm_replayssm.runtime import ModelConfig
from trtllm_replayssm.runtime import weights as module
module._MOST_MAPPED = 2**25
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
weights = module.Weights(sys.argv[1], ModelConfig.read(sys.argv[1]))
before = peak()
{work}
print(peak() - before)
"""
    # Large blocks go back to the system when they are freed, instead of into the pool of the C library.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    run = dict(capture_output=True, text=True, env=environment, timeout=120)
    result = subprocess.run([sys.executable, "-c", code, big], **run)
    assert result.returncode == 0, result.stderr
    largest = 2 * 8192 * 1024 + 4 * 8192 * 1024  # as stored and in fp32
    assert int(result.stdout) * 1024 < largest + 2**26


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """More than 300 MB in 20 shards."""
    config = {"num_hidden_layers": 16, "hybrid_override_pattern": "M-" * 8}
    folder = tmp_path_factory.mktemp("big") / "source"
    write_family(folder, "nano-v2", shards=20, **config, hidden_size=1024, intermediate_size=8192)
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 3e8
    return folder


def test_quantised_checkpoint_runs(tmp_path):
    """As the plain one of the same values, and says which layers it dequantises."""
    folder = write_family(tmp_path / "packed", "super-120b-a12b", quantized=True, **LAYERS)
    weights = taken_in(folder)
    values = {name: weights.read(name, torch.float32, torch.device("cpu")) for name in weights.names}
    plain = write_family(tmp_path / "plain", "super-120b-a12b", **LAYERS)
    save_shards(plain, values)
    expected = Engine(plain, device="cpu").logits([5, 6, 7, 8])
    with pytest.warns(
        UserWarning, match=r"6 FP8 and 17 NVFP4 weights become float32.*backbone.layers.0, backbone.layers"
    ):
        engine = Engine(folder, device="cpu")
    assert torch.equal(engine.logits([5, 6, 7, 8]), expected)
    assert engine.dequantized == weights.quantized
