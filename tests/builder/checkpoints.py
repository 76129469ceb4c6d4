# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of the five families of `nemotron_h` models: the layer patterns, tensor names and key spellings of
the released ones, in narrow layers. As BF16, or as Model Optimizer exports them."""

import json
import shutil
from fnmatch import fnmatchcase

import torch
from safetensors.torch import save_file

from trtllm_replayssm.number_formats import E2M1
from trtllm_replayssm.runtime import ModelConfig

from ..runtime.conftest import TINY, random_tensors

_COMMON = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 64,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "residual_in_fp32": False,
    "use_bias": False,
    "eos_token_id": 2,
    "mamba_num_heads": 8,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "chunk_size": 128,
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_limit": [0.0, float("inf")],
    "num_attention_heads": 8,
    "attention_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
}
_DENSE = {"mamba_head_dim": 80, "num_key_value_heads": 4, "intermediate_size": 128}
_MOE = {
    "mamba_head_dim": 64,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_ULTRA = [7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98]  # attention; Mamba and MoE take turns between


def _ultra_layers():
    turns = (("mamba", "moe")[i % 2] for i in range(108 - len(_ULTRA)))
    return ["attention" if layer in _ULTRA else next(turns) for layer in range(108)]


# config.json by family.
FAMILIES = {
    "nano-4b": _COMMON
    | _DENSE
    | {"hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", "head_dim": 16},
    "nano-v2": _COMMON
    | _DENSE
    | {"hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "attention_head_dim": 16},
    "nano-30b-a3b": _COMMON
    | _MOE
    | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "moe_latent_size": None},
    "super-120b-a12b": _COMMON
    | _MOE
    | {
        "hybrid_override_pattern": _SUPER,
        "moe_latent_size": 32,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
    "ultra-550b-a55b": _COMMON
    | _MOE
    | {
        "layers_block_type": _ultra_layers(),
        "moe_latent_size": 32,
        "num_nextn_predict_layers": 1,
        "mtp_layers_block_type": ["attention", "moe"],
    },
}
for _raw in FAMILIES.values():
    _raw["num_hidden_layers"] = len(_raw.get("layers_block_type") or _raw["hybrid_override_pattern"])

# What NVIDIA quantised in the exports of Super and Ultra, and what it would be in a dense model.
NVFP4 = ("backbone.layers.*.mixer.experts.*_proj.weight", "backbone.layers.*.mixer.up_proj.weight")
FP8 = (
    "backbone.layers.*.mixer.in_proj.weight",
    "backbone.layers.*.mixer.out_proj.weight",
    "backbone.layers.*.mixer.shared_experts.*_proj.weight",
)
_FP32 = ("A_log", "dt_bias", ".D", "e_score_correction_bias")
_MIDDLES = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))


def write_family(folder, family, *, quantized=False, shards=1, seed=0, **changes):
    """A random checkpoint of a family in `folder`, which it returns. changes: to its config.json.

    quantized: experts (in a dense model the up projections) in NVFP4, Mamba projections and shared experts in FP8, with
    Model Optimizer's lists; else BF16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = FAMILIES[family] | changes
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copy(TINY / "tokenizer.json", folder)
    tensors = random_tensors(ModelConfig.read(folder), seed)
    tensors = {name: t if name.endswith(_FP32) else t.bfloat16() for name, t in tensors.items()}
    if quantized:
        tensors, formats = _quantize(tensors)
        _write_lists(folder, raw, tensors, formats)
    save_shards(folder, tensors, shards)
    return folder


def save_shards(folder, tensors, shards=1):
    """Writes a checkpoint's tensors as one file, or as shards with their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[index::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def codes_of(values):
    """E2M1 codes of fp32 values, rounded to nearest, ties to even."""
    magnitude = values.abs()
    low, high = torch.searchsorted(_MIDDLES, magnitude), torch.searchsorted(_MIDDLES, magnitude, right=True)
    return (torch.where(low % 2 == 0, low, high) | (values < 0).int() << 3).to(torch.uint8)


def nvfp4(values, scale):
    """Codes [..., in/16, 16] and block scales of values [..., in], Model Optimizer's rule."""
    blocks = values.float().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / (6 * scale)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    return codes_of(blocks / (scales.float() * scale)[..., None]), scales


def values_of(codes, scales, scale):
    """fp32 [..., in] of what `nvfp4` gave."""
    return (torch.from_numpy(E2M1)[codes.int()] * (scales.float() * scale)[..., None]).flatten(-2)


def nvfp4_tensors(name, weight):
    """The tensors of a W4A4 linear, whose weight has this name."""
    scale = weight.float().abs().amax() / 2688
    codes, scales = nvfp4(weight, scale)
    flat = codes.flatten(1)
    given = name.removesuffix("weight") + "input_scale"
    return {
        name: flat[:, ::2] | flat[:, 1::2] << 4,
        f"{name}_scale": scales,
        f"{name}_scale_2": scale,
        given: torch.tensor(8 / 2688),
    }


def fp8_tensors(name, weight):
    """The tensors of an FP8 linear, whose weight has this name."""
    scale = weight.float().abs().amax() / 448
    given = name.removesuffix("weight") + "input_scale"
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scale, given: torch.tensor(0.1)}


def _quantize(tensors):
    quantized, formats = {}, {}
    for name, tensor in tensors.items():
        for format, patterns, pack in (("NVFP4", NVFP4, nvfp4_tensors), ("FP8", FP8, fp8_tensors)):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                quantized |= pack(name, tensor)
                formats[name.removesuffix(".weight")] = format
                break
        else:
            quantized[name] = tensor
    return quantized, formats


def _write_lists(folder, raw, tensors, formats):
    """hf_quant_config.json, and the same in config.json, as Model Optimizer 0.47 means them."""
    layers = {}
    for name, format in formats.items():
        name = name.split(".experts.")[0] + ".experts" if ".experts." in name else name  # one entry for all of a layer
        layers[name] = {"quant_algo": format} | ({"group_size": 16} if format == "NVFP4" else {})
    linears = [name.removesuffix(".weight") for name, t in tensors.items() if name.endswith(".weight") and t.dim() == 2]
    plain = [name for name in linears if name not in formats and "embeddings" not in name and "mtp." not in name]
    excluded = plain + ["mtp*"] * any("mtp." in name for name in linears)
    lists = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "group_size": 16}
    lists |= {"exclude_modules": excluded, "quantized_layers": layers}
    producer = {"name": "modelopt", "version": "0.47.0"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": lists}))
    in_config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": excluded, "producer": producer}
    in_config["quantized_layers"] = layers
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": in_config}))
