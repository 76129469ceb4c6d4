# SPDX-License-Identifier: Apache-2.0
"""Quantising on a GPU, and Model Optimizer's simulation there: it computes with the numbers that our reader makes of
the export, weight by weight and in what the model predicts."""

import re

import pytest
import torch
from safetensors.torch import load_file

from trtllm_replayssm import ReplayConfig
from trtllm_replayssm.builder.model_optimizer import RECIPES, Calibration, Recipe, calibrated
from trtllm_replayssm.builder.quantize import quantize
from trtllm_replayssm.runtime import Engine, ModelConfig
from trtllm_replayssm.runtime.texts import read_rows
from trtllm_replayssm.runtime.tokenizer import Tokenizer
from trtllm_replayssm.runtime.weights import Weights

from ..runtime.conftest import TINY, relative_error

pytest.importorskip("modelopt", reason="needs Model Optimizer: .[quantize]")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: Model Optimizer simulates NVFP4 nowhere else"
    ),
    pytest.mark.filterwarnings("ignore:.*weights become"),
]

STATE = ReplayConfig(window=16)
CPU = torch.device("cpu")
EVERYTHING = Recipe("NVFP4_DEFAULT_CFG")  # q, k and v, too
# Mean relative error of NVFP4 weights. Scales of least error are better than the largest value's.
NVFP4_ERROR = {"nemotron3": 0.095, "nemotron3-mse": 0.0815, "nemotron3-4o6": 0.087, "aggressive": 0.095, "all": 0.095}


def simulated_weights(model):
    """Name, as the checkpoint has it, weight and quantiser of every weight that is quantised."""
    for place, module in model.named_modules():
        place = re.sub(r"^model\.", "backbone.", place)
        for attribute, quantizer in module.named_children():
            if attribute == "weight_quantizer" and quantizer.is_enabled:
                yield f"{place}.weight", module.weight, quantizer
            if attribute.endswith("_weight_quantizers"):
                projection = attribute.removesuffix("_weight_quantizers")
                for expert, one in enumerate(quantizer):
                    if one.is_enabled:
                        yield f"{place}.{expert}.{projection}.weight", getattr(module, projection)[expert], one


def share_attention_scales(model):
    """The export has one scale for q, k and v of a layer: the largest. Returns the names of those that it changes."""
    layers = {}
    for name, _, quantizer in simulated_weights(model):
        if re.search(r"\.[qkv]_proj\.weight$", name):
            layers.setdefault(name.rpartition(".mixer.")[0], {})[name] = quantizer
    changed = []
    for layer in layers.values():
        largest = torch.stack([quantizer.amax for quantizer in layer.values()]).amax(0)
        for name, quantizer in layer.items():
            if not torch.equal(quantizer.amax, largest):
                changed.append(name)
                quantizer.amax = largest
    return changed


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch):
    """In which transformers would convolve."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("recipe", NVFP4_ERROR)
def test_simulation_and_export(recipe, tmp_path, monkeypatch):
    import modelopt.torch.quantization as mtq

    monkeypatch.setitem(RECIPES, "all", EVERYTHING)
    rows = read_rows(Tokenizer(TINY), [TINY / "README.md"], 8, 64)
    report = quantize(TINY, tmp_path / "made", rows, recipe, state=STATE, text="test")
    errors = [error.relative for error in report.errors if error.format == "NVFP4"]
    assert sum(errors) / len(errors) == pytest.approx(NVFP4_ERROR[recipe], rel=0.02)
    assert 0 < report.divergence.kl < 0.1

    source = Weights(TINY, ModelConfig.read(TINY))
    calibration = Calibration(tmp_path / "simulated", TINY, recipe, rows)
    model = calibrated(TINY, source, recipe, rows, calibration, lambda *_: None).float()
    export = Weights(tmp_path / "made", ModelConfig.read(tmp_path / "made"))
    excepted = share_attention_scales(model) if recipe == "all" else []
    assert bool(excepted) == (recipe == "all")
    compared = set()
    with torch.no_grad():
        for name, weight, quantizer in simulated_weights(model):
            format, read = export.quantized[name], export.read(name, torch.float32, weight.device)
            check_rounding(name, format, weight, quantizer(weight), read)
            # What lies between two values is out of the way: from here on, both have the same numbers.
            weight.copy_(read)
            torch.testing.assert_close(quantizer(weight), read, rtol=1e-6, atol=0, msg=name)
            compared.add(name)
        assert compared == export.quantized.keys()
        mtq.disable_quantizer(model, lambda name: "weight_quantizer" not in name)
        engine = Engine(tmp_path / "made", device="cuda", dtype="float32", max_batch=1)
        for row in rows[:4]:
            expected = model(row[None].to(model.device), use_cache=False).logits[0].float().cpu()
            assert relative_error(engine.logits(row.tolist()).cpu(), expected) < 1e-3


def check_rounding(name, format, weight, one, other):
    """Two quantisations of a weight are equal, but for values in the middle between two codes, of which BF16 has many.

    Model Optimizer's kernels divide with errors in the last place; for FP8 it exports what was divided in BF16, which
    costs 1 % of the error.
    """
    differing = float((one - other).abs().gt(1e-6 * other.abs()).double().mean())
    assert differing < {"NVFP4": 0.01, "FP8": 0.05}[format], f"{name}: {differing}"
    errors = [float((values - weight).double().norm()) for values in (one, other)]
    assert errors[0] == pytest.approx(errors[1], rel={"NVFP4": 1e-3, "FP8": 0.02}[format]), name


@pytest.mark.parametrize("recipe", ["nemotron3", "aggressive"])
def test_the_cpu_makes_the_same(recipe, tmp_path, monkeypatch):
    """But for scales of activations, which a forward pass measures, and for last places of scales: torch divides by
    numbers on a GPU as if it multiplied."""
    rows = read_rows(Tokenizer(TINY), [TINY / "README.md"], 8, 64)
    arguments = dict(state=STATE, text="test", compare=False)
    quantize(TINY, tmp_path / "gpu", rows, recipe, **arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    quantize(TINY, tmp_path / "cpu", rows, recipe, **arguments)
    source, one, other = (
        Weights(folder, ModelConfig.read(folder)) for folder in (TINY, tmp_path / "gpu", tmp_path / "cpu")
    )
    assert one.quantized == other.quantized
    for name, format in one.quantized.items():
        check_rounding(name, format, *(weights.read(name, torch.float32, CPU) for weights in (source, one, other)))
    stored = [load_file(tmp_path / device / "model.safetensors") for device in ("gpu", "cpu")]
    assert stored[0].keys() == stored[1].keys()
    scales = [name for name in stored[0] if name.endswith("scale") and stored[0][name].dtype == torch.float32]
    assert len(scales) > 15
    for name in scales:
        torch.testing.assert_close(stored[0][name], stored[1][name], rtol=0.02, atol=0, msg=name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_interrupted_calibration_on_two_gpus(tmp_path, monkeypatch):
    """Each has some of the layers, and their quantisers' largest values."""
    rows = read_rows(Tokenizer(TINY), [TINY / "README.md"], 8, 64)
    arguments = dict(state=STATE, text="test", compare=False)
    used, save = set(), Calibration.save

    def saving(calibration, model, done):
        used.update(parameter.device for parameter in model.parameters())
        save(calibration, model, done)
        if calibration.interrupting:
            raise InterruptedError

    monkeypatch.setattr(Calibration, "save", saving)
    monkeypatch.setattr(Calibration, "interrupting", False, raising=False)
    quantize(TINY, tmp_path / "whole", rows, **arguments)
    assert used == {torch.device("cuda", 0), torch.device("cuda", 1)}
    monkeypatch.setattr(Calibration, "interrupting", True)
    with pytest.raises(InterruptedError):
        quantize(TINY, tmp_path / "made", rows, **arguments)
    monkeypatch.setattr(Calibration, "interrupting", False)
    quantize(TINY, tmp_path / "made", rows, **arguments)
    for name in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
