# SPDX-License-Identifier: Apache-2.0
"""The doctor sees what is wrong: a package that broke the contract, an op whose numbers are off."""

import ast
import enum
import importlib.util
import json
import re
import sys
import types

import pytest

from trtllm_replayssm import cli, ops, self_test
from trtllm_replayssm.integrations.trtllm_build import contract, doctor

OURS = "trtllm_replayssm.integrations.trtllm_build"


def entry(name):
    return next(entry for entry in contract.CONTRACT["modules"] if entry["name"] == name)


class Parameter:
    def __init__(self, *shape):
        self._shape = shape


class RmsNorm:
    """As the contract has it."""

    def __init__(self, normalized_shape, num_groups=1, eps=1e-6, elementwise_affine=True, dtype=None):
        self.weight = Parameter(normalized_shape)

    def forward(self, x, normalized_shape=None): ...

    def named_parameters(self):
        return [("weight", self.weight)]


class Older(RmsNorm):
    def __init__(self, normalized_shape, eps=1e-6, dtype=None):
        self.weight = Parameter(normalized_shape)


class Renamed(RmsNorm):
    def named_parameters(self):
        return [("gamma", self.weight)]


class Wider(RmsNorm):
    def named_parameters(self):
        return [("weight", Parameter(1, 16))]


@pytest.mark.parametrize(
    "given, why",
    [
        (RmsNorm, ""),
        (Older, "__init__ has no parameter num_groups"),
        (Renamed, r"parameters \{'gamma': \(16,\)\}, expected \{'weight': \(16,\)\}"),
        (Wider, r"parameters \{'weight': \(1, 16\)\}"),
        (None, "AttributeError: .* has no attribute 'RmsNorm'"),
    ],
)
def test_layers_that_differ_from_the_contract(monkeypatch, given, why):
    module = types.ModuleType("tensorrt_llm.layers")
    if given is not None:
        module.RmsNorm = given
    monkeypatch.setitem(sys.modules, "tensorrt_llm", types.ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm.layers", module)
    monkeypatch.setattr(contract, "CONTRACT", {"modules": [entry("RmsNorm")]})
    (verdict,) = contract.violations()
    assert verdict["name"] == "tensorrt_llm.layers.RmsNorm" and verdict["good"] == (why == "")
    assert re.search(why, verdict["why"])


@pytest.mark.parametrize(
    "name, given, why",
    [
        ("split", lambda tensor, split_size_or_sections, dim=0: None, ""),
        ("split", lambda tensor, sections, dim=0: None, "call has no parameter split_size_or_sections"),
        ("PositionEmbeddingType", types.SimpleNamespace(__members__={"rope_gptj": 1}), "no learned_absolute"),
        ("ACT2FN", {"relu": None}, "no squared-relu"),
        ("ACT2FN", {"relu": None, "squared-relu": None}, ""),
    ],
)
def test_functions_and_names_that_differ(monkeypatch, name, given, why):
    module = types.ModuleType("tensorrt_llm.functional")
    setattr(module, name, given)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", types.ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm.functional", module)
    monkeypatch.setattr(contract, "CONTRACT", {"modules": [entry(name)]})
    assert contract.violations() == [{"name": f"tensorrt_llm.functional.{name}", "good": not why, "why": why}]


@pytest.mark.parametrize(
    "python, cpp, agree",
    [
        ({"gelu": 0, "relu": 1, "identity": 6}, {"Relu": 3, "Relu2": 8}, False),  # releases before experts had relu²
        ({"relu": 3, "relu2": 8}, {"Relu": 3, "Relu2": 8}, True),
        ({"squared-relu": 8}, {"Relu2": 8}, True),
        ({"relu2": 7}, {"Relu2": 8}, False),
        ({"relu2": 7}, None, False),
    ],
)
def test_experts_with_relu2(monkeypatch, python, cpp, agree):
    """Only where the number that Python gives the plugin is the one of C++."""
    for name, attribute, value in (
        ("tensorrt_llm.layers.moe", "activation_str_to_int_map", python),
        ("tensorrt_llm._torch.utils", "ActivationType", cpp and enum.IntEnum("ActivationType", cpp)),
    ):
        for parent in (name.rpartition(".")[0], "tensorrt_llm"):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        if value is not None:
            setattr(sys.modules[name], attribute, value)
    report = doctor._relu2_experts()
    assert report["agree"] == agree
    assert report["tensorrt_llm.layers.moe.activation_str_to_int_map"] == {
        key: value for key, value in python.items() if "relu" in key and key != "relu"
    }
    if cpp is None:
        assert "AttributeError" in report["tensorrt_llm._torch.utils.ActivationType"]


def test_the_model_class_uses_nothing_beyond_the_contract():
    """Names that its modules import from tensorrt_llm."""
    named = {(entry["module"], entry["name"]) for entry in contract.CONTRACT["modules"]}
    imported = set()
    for name in ("model", "network"):
        source = importlib.util.find_spec(f"{OURS}.{name}").loader.get_source(f"{OURS}.{name}")
        for node in ast.walk(ast.parse(source)):
            if getattr(node, "module", None) and node.module.startswith("tensorrt_llm"):
                imported |= {(node.module, alias.name) for alias in node.names}
    assert len(imported) > 20 and imported <= named


def test_the_self_test_passes_and_sees_a_wrong_op(monkeypatch):
    results = self_test.run("cpu")
    assert len(results) == 52 and all(result["good"] for result in results)
    named = {"step", "step of records", "prefill", "conv_step", "restore", "plan_lengths"}
    assert {result["op"] for result in results} > named
    step = ops.step
    monkeypatch.setattr(ops, "step", lambda *args: step(*args) * (1 + 2e-5))
    monkeypatch.setattr(self_test, "FORMATS", [("fp32", "fp32", "none")])
    bad = {result["op"] for result in self_test.run("cpu") if not result["good"]}
    assert bad == {"step", "step of records", "step, drafts"}
    monkeypatch.setattr(ops, "step", lambda *args: 1 / 0)
    (failed,) = self_test.run("cpu")
    assert not failed["good"] and failed["why"] == "ZeroDivisionError: division by zero"


def test_the_report(tmp_path, capsys, monkeypatch):
    """On a machine without TensorRT-LLM it says so, and is not good."""
    monkeypatch.setattr(self_test, "FORMATS", [("fp32", "fp32", "none")])
    assert cli.main(["doctor", "--report", str(tmp_path / "report.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "report.json").read_text())
    assert lines == report["summary"] and len(lines) == 4 and not report["good"]
    assert lines[0].startswith("tensorrt_llm: NOT GOOD: TensorRT-LLM 1.2 is not installed")
    assert lines[3] == "trtllm_serve: NOT GOOD: TensorRT-LLM is not installed"
    assert report["trtllm_serve"]["profile"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert all(result["good"] for result in report["ops"]["results"] if result["device"] == "cpu")
