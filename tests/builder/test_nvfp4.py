# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Model Optimizer quantised: W4A4 linears in the graph, other quantised weights by value."""

import json
import shutil
from dataclasses import replace

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from trtllm_replayssm.builder.decoder import MODEL, export
from trtllm_replayssm.runtime import CheckpointError

from ..runtime.conftest import TINY
from .checkpoints import fp8_tensors, nvfp4, nvfp4_tensors, values_of
from .test_engine_folders import built, layers, needs_rtx
from .test_evaluation import CONFIG, SideBySide

W4A4 = ("in_proj", "out_proj", "mixer.up_proj", "mixer.down_proj", "q_proj", "k_proj", "v_proj", "o_proj")


def quantize(folder):
    """The shipped checkpoint as Model Optimizer would write it, and one of the values that it then has."""
    packed, plain = (shutil.copytree(TINY, folder / name) for name in ("packed", "plain"))
    raw = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "modelopt"}}))
    tensors, values = load_file(TINY / "model.safetensors"), load_file(TINY / "model.safetensors")
    for name in list(tensors):
        linear = name.removesuffix(".weight")
        if not name.startswith("backbone.layers") and name != "lm_head.weight":
            continue
        if linear.endswith(W4A4) or name == "lm_head.weight":
            scale = tensors[name].float().abs().amax() / 2688
            values[name] = values_of(*nvfp4(tensors[name], scale), scale)
            tensors |= nvfp4_tensors(name, tensors[name])
            if name == "lm_head.weight":  # weight-only
                del tensors["lm_head.input_scale"]
        elif "shared_experts" in name:
            tensors |= fp8_tensors(name, tensors[name])
            values[name] = tensors[name].float() * tensors[f"{name}_scale"]
    tensors["backbone.layers.3.mixer.k_proj.k_scale"] = torch.tensor(0.1)
    save_file(tensors, packed / "model.safetensors")
    save_file({name: value.float() for name, value in values.items()}, plain / "model.safetensors")
    return packed, plain


class QuantizedInput:
    """A linear of the embedded runtime whose input goes through NVFP4."""

    def __init__(self, linear):
        self.linear, self.scale = linear, torch.tensor(8 / 2688)

    def __call__(self, x):
        return self.linear(values_of(*nvfp4(x, self.scale), self.scale))

    def add_to(self, total, x):
        return self(x)


def test_logits(tmp_path):
    """Against the embedded runtime with the values that the weights have, and with quantised inputs. An activation
    whose last bits differ may round to a neighbour, 1/4 to 1/2 away."""
    packed, plain = quantize(tmp_path)
    pair = SideBySide(tmp_path, CONFIG, packed, reference=plain)
    for _, mixer in pair.engine.model.stack.layers:
        for name in ("in_proj", "out_proj", "up", "down", "qkv", "o"):
            if hasattr(mixer, name) and not hasattr(mixer, "router"):
                setattr(mixer, name, QuantizedInput(getattr(mixer, name)))
    pair.begin(0, [20, 2])
    pair.begin(1, [7])
    pair.work(20, CONFIG.step_tokens)
    assert pair.worst < 0.03
    nodes = [node.op_type for node in onnx.load(tmp_path / MODEL, load_external_data=False).graph.node]
    assert nodes.count("TRT_FP4DynamicQuantize") == 3 * 2 + 2 + 4


@needs_rtx
def test_build(tmp_path):
    """A product of four-bit numbers for every W4A4 linear."""
    packed, _ = quantize(tmp_path)
    built(packed, tmp_path / "engine")
    listed = layers(tmp_path / "engine", "model")
    for name in ("0.mixer.in_proj", "0.mixer.out_proj", "1.mixer.up_proj", "3.mixer.v_proj"):
        products = [layer for layer in listed if layer.kind == "gemm" and f"backbone.layers.{name}" in layer.nodes]
        assert products and all(layer.inputs.count("FP4E2M1") >= 2 for layer in products), name


def test_spoilt_scales(tmp_path):
    packed, _ = quantize(tmp_path)
    path, name = packed / "model.safetensors", "backbone.layers.0.mixer.in_proj.weight"
    good = load_file(path)

    def refused(message, **changes):
        tensors = good | {f"{name}{part}": value for part, value in changes.items()}
        save_file({key: value for key, value in tensors.items() if value is not None}, path)
        with pytest.raises(CheckpointError, match=message):
            export(packed, tmp_path, replace(CONFIG, dtype="bfloat16"))

    refused("in_proj.weight_scale_2' is missing", _scale_2=None)
    refused(
        r"in_proj.weight_scale' has shape \[1544, 8\], expected \[1544, 16\]",
        _scale=good[f"{name}_scale"][:, :8].clone(),
    )
    refused("in_proj.weight_scale' has dtype F32, expected one of F8_E4M3", _scale=good[f"{name}_scale"].float())
