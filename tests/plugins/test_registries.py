# SPDX-License-Identifier: Apache-2.0
"""The plugin library in real TensorRT registries: TensorRT-RTX 1.7 and lean 11.4, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import graph
import pytest
from registry import NAMESPACE, PACKAGES, PLUGINS, VERSION, in_child, library

from trtllm_replayssm import plugins


@pytest.mark.parametrize("flavor", PACKAGES)
def test_every_plugin_in_both_phases(flavor):
    result, _ = in_child("children:creators", flavor)
    assert sorted(result["listed"]) == sorted([name, VERSION] for name in PLUGINS)
    outputs = {"ReplaySsmPlan": 3, "ReplayCausalConv": 2, "ReplaySsmFlush": 1, "ReplaySsmStep": 2}
    for plugin, made in zip([name for name in PLUGINS for _ in range(2)], result["created"], strict=True):
        expected = [plugin, VERSION, NAMESPACE], list(graph.fields(plugin)), ["PLUGIN_V3ONE_BUILD", 2, outputs[plugin]]
        assert made == [*expected]
    assert result["errors"] == []


@pytest.mark.parametrize("flavor", PACKAGES)
def test_refusals_are_readable(flavor):
    """Through the registry's logger where there is one, which needs the right ABI; else on stderr."""
    (refused, errors, last), stderr = in_child("children:refusal", flavor)
    text = "ReplaySsmFlush 'node': head_dim: expected a multiple of 8 in 8..128, got 12"
    assert refused and last == text
    assert errors == ([text] if flavor == "rtx" else [])
    assert (text in stderr) == (flavor == "lean")


@pytest.mark.parametrize("flavor", PACKAGES)
def test_public_entry_point(flavor, monkeypatch, tmp_path):
    """A34: from another working directory."""
    monkeypatch.chdir(tmp_path)
    (before, after), stderr = in_child("children:public_entry_point", flavor)
    assert before == [*PLUGINS] and after == [] and "Cannot find plugin" not in stderr


class EmptyRegistry:
    """A registry that loads nothing."""

    all_creators = ()

    def load_library(self, path):
        """TensorRT's returns None and logs why."""


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    """A34: plugin, namespace and version; and a library that is not there, with what brings it."""
    with pytest.raises(RuntimeError, match="plugin ReplaySsmPlan, namespace trtllm_replayssm, version 1: not in the"):
        plugins.register(EmptyRegistry())
    monkeypatch.setattr(plugins._core, "__file__", str(tmp_path / "_core.so"))
    with pytest.raises(RuntimeError, match="built without TensorRT's headers; install it again with"):
        plugins.library_path()


def soname(flavor):
    package = PACKAGES[flavor].replace("bindings", "libs")
    name = {"rtx": "libtensorrt_rtx.so.1", "lean": "libnvinfer_lean.so.11"}[flavor]
    for folder in sys.path:
        if (Path(folder) / package / name).exists():
            return str(Path(folder) / package / name)
    raise AssertionError(f"{package} is not installed")


@pytest.mark.parametrize("flavor", PACKAGES)
def test_registration_at_load(flavor):
    """LD_PRELOAD and the variable, no loader call: the creators are there. One line says so."""
    path = soname(flavor)
    environment = {"LD_PRELOAD": library(), "TRTLLM_REPLAYSSM_AUTOREGISTER": path}
    (names, missing), stderr = in_child("children:preloaded", flavor, environment=environment)
    assert names == sorted(PLUGINS) and missing == []
    assert f"[trtllm_replayssm] registered 4 plugins with {path}, 0 were there already" in stderr.splitlines()


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )


def test_foreign_processes_stay_silent():
    """Preloaded without the variable the library does nothing; with a wrong name it says one line and does nothing."""
    silent = run_python("print(1)", LD_PRELOAD=library())
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "1\n", "")
    wrong = run_python("print(1)", LD_PRELOAD=library(), TRTLLM_REPLAYSSM_AUTOREGISTER="libnope.so.1")
    assert (wrong.returncode, wrong.stdout) == (0, "1\n")
    assert "TRTLLM_REPLAYSSM_AUTOREGISTER=libnope.so.1: no plugin registry: libnope.so.1" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1


def test_exports_and_dependencies():
    """Three symbols, and no library but those of the C++ compiler: neither TensorRT, CUDA, torch nor Python."""
    import ctypes

    functions = ctypes.CDLL(library())
    for name in ("getCreators", "setLoggerFinder", "replayssm_plugins_last_error"):
        getattr(functions, name)
    for name in ("replayssm_plan_next", "cudaLaunchKernel", "getPluginRegistry", "_ZTIN8nvinfer19IPluginV3E"):
        assert not hasattr(functions, name), name
    needed = subprocess.run(["readelf", "-d", library()], capture_output=True, text=True, check=True).stdout
    libraries = {line.split("[")[1].split(".so")[0] for line in needed.splitlines() if "(NEEDED)" in line}
    assert libraries <= {
        "libgomp",
        "libstdc++",
        "libm",
        "libgcc_s",
        "libc",
        "ld-linux-x86-64",
        "librt",
        "libdl",
        "libpthread",
    }
