# SPDX-License-Identifier: Apache-2.0
"""Whether a machine is fit for the engines: TensorRT-LLM as the contract has it, our plugins, the ops' numbers.

Beside that, what the trtllm-serve adapter makes of the installed TensorRT-LLM. The engines do not need it, and it has
other versions to fit: it is told, and does not count.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re

from ... import __version__, _core, plugins
from ..trtllm_serve import probe
from ..trtllm_serve.settings import Settings
from .contract import CONTRACT, violations


def examine() -> dict:
    """The report: "good" (the engines' parts are) and, part by part, what was found; "summary": a line a part."""
    engines = {"tensorrt_llm": _tensorrt_llm(), "plugins": _plugins(), "ops": _ops()}
    parts = {**engines, "trtllm_serve": _trtllm_serve()}
    return {
        "good": all(part["good"] for part in engines.values()),
        "summary": [f"{name}: {'good' if part['good'] else 'NOT GOOD'}: {part['why']}" for name, part in parts.items()],
        "trtllm_replayssm": __version__,
        "cuda_architectures": _core.cuda_architectures().split(),
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        **parts,
    }


def _tensorrt_llm() -> dict:
    from .build_command import check_version

    try:
        version = check_version()
    except ImportError as error:
        return {"good": False, "why": str(error), "version": None, "entries": [], "relu2_experts": None}
    entries = violations()
    bad = [f"{entry['name']} ({entry['why']})" for entry in entries if not entry["good"]]
    why = f"{version}; {'; '.join(bad)}" if bad else f"{version}, all {len(entries)} entries of the contract"
    return {"good": not bad, "why": why, "version": version, "entries": entries, "relu2_experts": _relu2_experts()}


def _relu2_experts() -> dict:
    """Whether experts could have relu²: its number in the tables of activations that the contract names, and whether
    they "agree". The model class has no experts: a package where they agree is the first for which it could get them.
    """
    experts, found, numbers = CONTRACT["experts"], {}, []
    for table in experts["tables"]:
        name = f"{table['module']}.{table['name']}"
        try:
            given = getattr(importlib.import_module(table["module"]), table["name"])
            members = {str(key): int(value) for key, value in dict(getattr(given, "__members__", given)).items()}
            named = {
                key: value for key, value in members.items() if re.sub("[^a-z0-9]", "", key.lower()) in experts["names"]
            }
            found[name] = named
            numbers.append(set(named.values()))
        except Exception as error:  # whatever the package lacks
            found[name] = f"{type(error).__name__}: {error}"
            numbers.append(set())
    return {"agree": len(numbers[0]) == 1 and all(number == numbers[0] for number in numbers), **found}


def _trtllm_serve() -> dict:
    """The adapter's probe of TensorRT-LLM's PyTorch backend, and of the variables that are set here."""
    report = {"good": False, "profile": None}
    try:
        importlib.import_module("tensorrt_llm")
    except ModuleNotFoundError as error:
        if error.name != "tensorrt_llm":
            return {**report, "why": f"tensorrt_llm does not import: {error}"}
        return {**report, "why": "TensorRT-LLM is not installed"}
    except Exception as error:  # whatever its libraries raise
        return {**report, "why": f"tensorrt_llm does not import: {type(error).__name__}: {error}"}
    try:
        profile = report["profile"] = probe.probe().profile
        enabled = Settings.of(os.environ).enabled
        if enabled:
            probe.switches(profile, os.environ)
    except Exception as error:  # Mismatch, ValueError of a variable, or whatever its modules raise
        return {**report, "why": f"{type(error).__name__}: {error}"}
    off = "" if enabled else "; switched off here by TRTLLM_REPLAYSSM=0"
    return {"good": True, "profile": profile, "why": f"profile {profile}: {probe.facts()['profiles'][profile]}{off}"}


def _plugins() -> dict:
    """Whether the library registers with the installed TensorRT."""
    report = {"good": False, "library": None, "tensorrt": None}
    try:
        report["library"] = str(plugins.library_path().name)
        if importlib.util.find_spec("tensorrt") is None:
            return {**report, "why": "no tensorrt is installed; it comes with TensorRT-LLM"}
        trt = importlib.import_module("tensorrt")
        report["tensorrt"] = trt.__version__
        plugins.register(trt.get_plugin_registry())
    except Exception as error:  # of the library's build, or whatever TensorRT raises
        return {**report, "why": f"{type(error).__name__}: {error}"}
    return {**report, "good": True, "why": f"{len(plugins.PLUGINS)} plugins registered with TensorRT {trt.__version__}"}


def _ops() -> dict:
    """The ops on the CPU and on the GPU, if there is one, against the recurrence."""
    report = {"good": False, "gpus": [], "results": []}
    if importlib.util.find_spec("torch") is None:
        return {**report, "why": "not run: needs torch (it comes with TensorRT-LLM, or pip install '.[runtime]')"}
    torch = importlib.import_module("torch")
    self_test = importlib.import_module("trtllm_replayssm.self_test")
    report["gpus"] = [_gpu(torch, index) for index in range(torch.cuda.device_count())]
    results = self_test.run("cpu")
    if report["gpus"] and _core.has_cuda():
        results += self_test.run("cuda")
        where = f"on the CPU and on {report['gpus'][0]['name']}"
    elif report["gpus"]:
        where = "on the CPU only: this build has no CUDA ops"
    else:
        where = "on the CPU only: no GPU that torch can use"
    bad = [result for result in results if not result["good"]]
    right = not bad and report["gpus"] != [] and _core.has_cuda()
    told = "; ".join(f"{r['op']} on {r['device']}, {r['activation']}: {r.get('why', r['error'])}" for r in bad[:4])
    why = f"{len(results) - len(bad)} of {len(results)} results within their limits, {where}" + (
        f"; {told}" if told else ""
    )
    return {**report, "good": right, "why": why, "results": results, "building": _building()}


def _gpu(torch, index: int) -> dict:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
    }


def _building() -> dict:
    """Whether plugins would take this process for a builder and compute nothing."""
    variable = CONTRACT["building"]["variable"]
    return {"variable": variable, "set": os.environ.get(variable, "") not in ("", "0")}
