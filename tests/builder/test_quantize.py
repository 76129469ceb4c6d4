# SPDX-License-Identifier: Apache-2.0
"""Quantising with the real Model Optimizer, on the CPU."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtllm_replayssm import ReplayConfig, SlotLayout
from trtllm_replayssm.builder import model_optimizer, rounding
from trtllm_replayssm.builder.layer_plan import STATE_KEY
from trtllm_replayssm.builder.model_optimizer import QuantizationError, repaired
from trtllm_replayssm.builder.quantize import REPORT, quantize
from trtllm_replayssm.cli import main
from trtllm_replayssm.runtime import CheckpointError, Engine, ModelConfig, SamplingParams
from trtllm_replayssm.runtime.quantization import read_lists
from trtllm_replayssm.runtime.texts import read_rows
from trtllm_replayssm.runtime.tokenizer import Tokenizer
from trtllm_replayssm.runtime.weights import Weights

from ..runtime.conftest import TINY
from ..runtime.prompts import PROMPTS
from .checkpoints import write_family

pytestmark = pytest.mark.filterwarnings("ignore:.*weights become float32")

STATE = ReplayConfig(window=16, read_copy="nvfp4")
CPU = torch.device("cpu")
FORMATS = {
    "nemotron3": {"in_proj": "FP8", "out_proj": "FP8", "shared_experts": "FP8", "experts": "NVFP4"},
    "aggressive": {name: "NVFP4" for name in ("in_proj", "out_proj", "shared_experts", "experts", "mlp")},
}


def taken_in(folder):
    weights = Weights(folder, ModelConfig.read(folder))
    weights.check_scales()
    return weights


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """[8, 64] tokens of what the shipped model says."""
    texts = Engine(TINY, device="cpu").generate(PROMPTS[:4], SamplingParams(max_tokens=200))
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(text.text for text in texts))
    return read_rows(Tokenizer(TINY), [file], 8, 64)


@pytest.mark.parametrize("recipe", FORMATS)
def test_recipes(recipe, rows, tmp_path):
    """The shipped checkpoint. One test, since making it takes most of the time."""
    folder = tmp_path / "made"
    report = quantize(TINY, folder, rows, recipe, state=STATE, text="test")
    check_formats(recipe, folder, report)
    check_values(folder)
    check_errors_and_predictions(recipe, folder, report)
    check_kl(folder, report, rows)
    check_text(folder)
    check_folder(folder)


def check_formats(recipe, folder, report):
    weights = taken_in(folder)
    expected = {}
    for name in weights.names:
        if name.startswith("backbone.layers"):
            place = name.replace("layers.1.mixer.", "layers.1.mlp.")  # the only one without experts
            kind = next((kind for kind in FORMATS[recipe] if f".{kind}." in place), None)
            if kind and "norm" not in name:
                expected[name] = FORMATS[recipe][kind]
    assert weights.quantized == expected
    assert {error.name: error.format for error in report.errors} == expected
    attention = "backbone.layers.3.mixer."
    kv_scales = [attention + "k_proj.k_scale", attention + "v_proj.v_scale"] if recipe == "nemotron3" else []
    assert weights.kv_scales == kv_scales
    assert sum(report.bytes.values()) < 0.75 * sum(report.source_bytes.values())
    assert json.loads((folder / REPORT).read_text())["bytes"] == report.bytes


def check_values(folder):
    """Those of Model Optimizer's own reader, tensor by tensor, to the bit."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weights, stored = taken_in(folder), load_file(folder / "model.safetensors")
    compared = 0
    for name, format in weights.quantized.items():
        ours = weights.read(name, torch.float32, CPU)
        if format == "NVFP4":
            packed = NVFP4QTensor(ours.shape, torch.float32, stored[name])
            scales = dict(scale=stored[f"{name}_scale"], double_scale=stored[f"{name}_scale_2"])
            theirs = packed.dequantize(dtype=torch.float32, block_sizes={-1: 16}, **scales)
            compared += 1
        else:
            theirs = stored[name].float() * stored[f"{name}_scale"]
        assert torch.equal(ours, theirs), name
    assert compared >= 8


def check_errors_and_predictions(recipe, folder, report):
    """The number formats' own errors, and what they do to the model."""
    source = Weights(TINY, ModelConfig.read(TINY))
    weights = taken_in(folder)
    for error in report.errors:
        before, after = (one.read(error.name, torch.float64, CPU) for one in (source, weights))
        assert error.relative == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
        assert error.cosine == pytest.approx(float((after * before).sum() / after.norm() / before.norm()), abs=1e-6)
        assert error.relative == pytest.approx({"NVFP4": 0.095, "FP8": 0.0266}[error.format], rel=0.03)
    divergence = report.divergence
    assert divergence.tokens == 8 * 64
    assert 0 < divergence.kl < {"nemotron3": 0.02, "aggressive": 0.06}[recipe]
    assert divergence.same_top > 0.9
    assert abs(divergence.loss - divergence.source_loss) < 0.05


def check_kl(folder, report, rows):
    engines = [Engine(one, device="cpu") for one in (TINY, folder)]
    p, q = (torch.cat([engine.logits(row.tolist()) for row in rows]).double().log_softmax(-1) for engine in engines)
    assert report.divergence.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


def check_text(folder):
    """It is still readable: what it writes is likely by the source model (a uniform guess costs 6.9)."""
    text = Engine(folder, device="cpu").generate(PROMPTS[:2], SamplingParams(max_tokens=80))
    source = Engine(TINY, device="cpu")
    for sequence in text:
        tokens = sequence.prompt + sequence.tokens
        logarithms = source.logits(tokens).log_softmax(-1)
        first = len(sequence.prompt)
        losses = -logarithms[first - 1 : -1].gather(1, torch.tensor(tokens[first:])[:, None])
        assert float(losses.mean()) < 1.5


def check_folder(folder):
    """The source's config and tokenizer, the state layout, MTP and FP32 tensors to the bit, lists without garbage."""
    raw, source = (json.loads((one / "config.json").read_text()) for one in (folder, TINY))
    added = {key: value for key, value in raw.items() if key not in source}
    assert {key: raw[key] for key in source} == source and set(added) == {"quantization_config", STATE_KEY}
    state = raw[STATE_KEY]
    assert (state["checkpoint"], state["read_copy"], state["window"]) == ("fp32", "nvfp4", 16)
    assert state["slot_bytes"] == SlotLayout(ModelConfig.read(TINY).geometry, STATE).slot_stride
    assert (folder / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert not (folder / "train.py").exists()
    before, after = load_file(TINY / "model.safetensors"), load_file(folder / "model.safetensors")
    kept = [name for name in before if name.startswith("mtp.") or before[name].dtype == torch.float32]
    assert len(kept) > 20 and all(before[name].dtype == after[name].dtype for name in kept)
    assert all(torch.equal(before[name], after[name]) for name in kept)
    for file in ("config.json", "hf_quant_config.json"):
        assert "sentinel" not in (folder / file).read_text() and "\\u0000" not in (folder / file).read_text()
    assert len(read_lists(folder)) == 2  # which Weights compared with the tensors


def test_globs_name_one_layer():
    """Model Optimizer's "layers.3*" means 30 to 39, too."""
    given = {
        "exclude_modules": [
            "lm_head.\x00backbone.pt_name_sentinel",
            "backbone.layers.3.\x00backbone.pt_name_sentinel*",
        ],
        "quantized_layers": {"backbone.layers.30.mixer.in_proj.\x00a.pt_name_sentinel": {"quant_algo": "FP8"}},
    }
    assert repaired(given) == {
        "exclude_modules": ["lm_head", "backbone.layers.3.*"],
        "quantized_layers": {"backbone.layers.30.mixer.in_proj": {"quant_algo": "FP8"}},
    }


SHORT = {"hybrid_override_pattern": "ME*M", "num_hidden_layers": 4}
TOKENS = torch.arange(4 * 16).reshape(4, 16)


def test_latent_experts_and_weights_that_are_all_zero(tmp_path):
    """Without care, their scales would be 0 and their values NaN."""
    folder = write_family(tmp_path / "source", "super-120b-a12b", **SHORT)
    tensors = load_file(folder / "model.safetensors")
    dead = [
        "backbone.layers.0.mixer.in_proj.weight",
        "backbone.layers.1.mixer.experts.2.up_proj.weight",
        "backbone.layers.1.mixer.shared_experts.down_proj.weight",
    ]
    save_file(tensors | {name: torch.zeros_like(tensors[name]) for name in dead}, folder / "model.safetensors")
    report = quantize(folder, tmp_path / "made", TOKENS, state=STATE, text="test")
    weights = taken_in(tmp_path / "made")
    assert weights.has_mtp and len(weights.quantized) == 2 * 2 + 2 + 16
    for name in dead:
        assert not weights.read(name, torch.float32, CPU).any()
    assert all(error.relative < 0.12 for error in report.errors)
    assert report.divergence.kl < 0.1


class Interrupted(Exception):
    pass


def test_interrupted_calibration_continues(tmp_path, monkeypatch):
    folder = write_family(tmp_path / "source", "nano-30b-a3b", **SHORT)
    monkeypatch.setattr(model_optimizer, "_BATCH", 1)
    calibrated = []

    def progress(phase, done, total):
        if phase == "calibrating" and done < total:
            calibrated.append(done)
            if calibrated == [0, 1, 2]:
                raise Interrupted

    arguments = dict(state=STATE, text="test", compare=False)
    assert quantize(folder, tmp_path / "whole", TOKENS, **arguments).divergence is None
    with pytest.raises(Interrupted):
        quantize(folder, tmp_path / "made", TOKENS, progress=progress, **arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "whole", ".made.calibration"}
    calibrated.append("again")
    quantize(folder, tmp_path / "made", TOKENS, progress=progress, **arguments)
    assert calibrated == [0, 1, 2, "again", 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"source", "whole", "made"}
    for name in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_refusals(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    packed = write_family(tmp_path / "packed", "nano-30b-a3b", quantized=True, **SHORT)
    dense = write_family(tmp_path / "dense", "nano-4b", num_hidden_layers=3, hybrid_override_pattern="M-M")
    for checkpoint, recipe, kind, message in (
        (TINY, "best", ValueError, "recipe: expected one of nemotron3, nemotron3-mse, nemotron3-4o6, nemotron3"),
        (TINY, "nemotron3-mse", ValueError, "recipe 'nemotron3-mse' calibrates by 'mse', which .* on a GPU only"),
        (TINY, "nemotron3-4o6", ValueError, "recipe 'nemotron3-4o6' calibrates by 'mse', which .* on a GPU only"),
        (TINY, "nemotron3-nano-4b", ValueError, "names layers of a model of 42, but .* has 6: take 'aggressive'"),
        (packed, "nemotron3", CheckpointError, "is quantised already: 'backbone.layers.0.mixer.in_proj.weight' is"),
        (dense, "nemotron3", ValueError, "recipe 'nemotron3' makes routed experts NVFP4, but .* has no layers"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            quantize(checkpoint, tmp_path / "made", TOKENS, recipe, state=STATE, text="test")
    with pytest.raises(FileExistsError, match="is there already"):
        quantize(TINY, packed, TOKENS, state=STATE, text="test")
    assert not (tmp_path / "made").exists()


def test_changed_tensors_are_found(monkeypatch, tmp_path):
    """An export that loses a bit of what is not quantised gets no name."""
    monkeypatch.setattr(model_optimizer, "_restore", lambda *_: None)  # FP32 tensors become BF16
    with pytest.raises(QuantizationError, match="'backbone.layers.0.mixer.A_log' is not quantised, but differs"):
        quantize(TINY, tmp_path / "made", TOKENS, state=STATE, text="test")
    assert not (tmp_path / "made").exists()


def test_command(tmp_path, capsys):
    """Without a text, on what the model says."""
    arguments = ["quantize", "--checkpoint", str(TINY), "--format", "nvfp4", "--rows", "2", "--tokens", "32"]
    assert main([*arguments, "--output", str(tmp_path / "made")]) == 0
    text = capsys.readouterr().out
    assert "calibrated on 2 texts of 32 tokens, generated by the model" in text
    assert "layers.5.experts.up_proj             NVFP4        4" in text
    assert main([*arguments, "--output", str(tmp_path / "made"), "--calib", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    code = "import sys; sys.modules['modelopt'] = None; import trtllm_replayssm.cli as cli; cli.main(sys.argv[1:])"
    arguments += ["--output", str(tmp_path / "other"), "--calib", str(TINY / "README.md")]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert "quantising needs modelopt: pip install 'trtllm-replayssm[quantize]'" in result.stderr


def test_values_that_are_not_finite(tmp_path):
    folder = write_family(tmp_path / "source", "nano-30b-a3b", **SHORT)
    tensors, name = load_file(folder / "model.safetensors"), "backbone.layers.0.mixer.in_proj.weight"
    save_file(tensors | {name: tensors[name] * torch.inf}, folder / "model.safetensors")
    with pytest.raises(QuantizationError, match="Model Optimizer refuses to calibrate: detected inf values"):
        quantize(folder, tmp_path / "made", TOKENS, state=STATE, text="test")


def test_no_memory_to_compare(tmp_path, monkeypatch):
    """What was calibrated is not lost."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rounding, "_compared", full)
    with pytest.warns(UserWarning, match="predictions are not compared: CUDA out of memory"):
        assert rounding.divergence(TINY, tmp_path, TOKENS, lambda *_: None) is None
