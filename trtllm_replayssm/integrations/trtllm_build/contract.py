# SPDX-License-Identifier: Apache-2.0
"""contract.json, what is relied on in TensorRT-LLM, and whether an installed package keeps it."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

CONTRACT: dict = json.loads(Path(__file__).with_name("contract.json").read_text(encoding="utf-8"))


def violations() -> list[dict]:
    """Each module entry of the contract beside the installed package: {"name", "good", "why"}; why is "" where good."""
    return [{"name": f"{entry['module']}.{entry['name']}", **_verdict(entry)} for entry in CONTRACT["modules"]]


def _verdict(entry: dict) -> dict:
    faults = []
    try:
        for fault in _faults(entry):
            faults.append(fault)
    except Exception as error:  # whatever a foreign package raises is a part of its verdict
        faults.append(f"{type(error).__name__}: {error}")
    return {"good": not faults, "why": "; ".join(faults)}


def _faults(entry: dict):
    given = getattr(importlib.import_module(entry["module"]), entry["name"])
    if "init" in entry and entry["kind"] != "base":
        yield from _missing_parameters("__init__", given.__init__, entry["init"])
    if "forward" in entry:
        yield from _missing_parameters("forward", given.forward, entry["forward"])
    if entry["kind"] == "function":
        yield from _missing_parameters("call", given, entry["parameters"])
    for name, parameters in entry.get("methods", {}).items():
        if entry["kind"] == "trtnet":
            continue  # of TensorRT's own network, which has no signature
        method = getattr(given, name, None)
        if method is None:
            yield f"no method {name}"
        else:
            yield from _missing_parameters(name, method, parameters)
    if entry["kind"] in ("enum", "keys"):
        names = given.__members__ if entry["kind"] == "enum" else given
        yield from (f"no {name}" for name in entry["members"] if name not in names)
    if entry["kind"] == "net":
        from tensorrt_llm.plugin import PluginConfig

        fields = getattr(PluginConfig, "model_fields", None) or vars(PluginConfig)
        known = {name.lstrip("_") for name in fields} | set(dir(PluginConfig))
        yield from (f"no option {name}" for name in entry["plugin_config"] if name not in known)
    if "example" in entry:
        yield from _parameter_faults(entry, given(**entry["example"]))


def _missing_parameters(what: str, function, names: list[str]):
    known = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    yield from (f"{what} has no parameter {name}" for name in names if name not in known)


def _parameter_faults(entry: dict, layer):
    """Names and shapes of the parameters that a layer registers: a rank's file must have exactly them."""
    given = {name: tuple(parameter._shape) for name, parameter in layer.named_parameters()}
    expected = parameter_shapes(entry, entry["example"])
    if given != expected:
        yield f"parameters {given}, expected {expected}"


def parameter_shapes(entry: dict, arguments: dict) -> dict[str, tuple[int, ...]]:
    """The parameters of a layer made with these arguments, by the contract's formulas."""
    shapes = {}
    for name, formulas in entry["parameters"].items():
        if arguments.get(entry.get("optional", {}).get(name), True):
            shapes[name] = tuple(evaluate(formula, arguments) for formula in formulas)
    return shapes


def evaluate(formula: str, arguments: dict) -> int:
    """A formula of the contract, over the arguments of a call."""
    return int(eval(formula, {"__builtins__": {}}, arguments))
