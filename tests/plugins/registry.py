# SPDX-License-Identifier: Apache-2.0
"""TensorRT's Python packages, which work without a GPU: TensorRT-RTX (registry, parser, builder) and lean (registry).

A plugin fault can end the process, and a second registry in a process takes the first one's logger away. So what needs
a registry runs in a child process: `in_child("module:function", argument)`."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from trtllm_replayssm import plugins
from trtllm_replayssm.builder.tensorrt_package import rtx_bindings

NAMESPACE, VERSION = "trtllm_replayssm", "1"
PLUGINS = ("ReplaySsmPlan", "ReplayCausalConv", "ReplaySsmFlush", "ReplaySsmStep")
PACKAGES = {"rtx": "tensorrt_rtx_bindings", "lean": "tensorrt_lean_bindings"}
_NEEDED = ("onnx", "tensorrt_rtx_bindings", "tensorrt_rtx_libs", "tensorrt_lean_bindings", "tensorrt_lean_libs")
MISSING = [package for package in _NEEDED if importlib.util.find_spec(package) is None]


def library() -> str:
    """The plugin library of this installation."""
    return str(plugins.library_path())


def bindings(flavor: str):
    """Imports TensorRT's Python module."""
    return rtx_bindings() if flavor == "rtx" else importlib.import_module(PACKAGES[flavor])


_alive = []  # a builder unloads its plugin library when it goes, with the code of plugins that Python still holds


class Registry:
    """A loaded plugin library in the registry of one TensorRT, and what was logged. Lasts as long as the process."""

    def __init__(self, flavor: str):
        _alive.append(self)
        self.trt = trt = bindings(flavor)
        rows = self.log = []

        class Logger(trt.ILogger):
            def __init__(self):
                trt.ILogger.__init__(self)

            def log(self, severity, message):
                rows.append((severity.name, message))

        self.logger = Logger()
        if flavor == "rtx":
            self.builder = trt.Builder(self.logger)
            self.registry = self.builder.get_plugin_registry()
        else:
            self.registry = trt.get_plugin_registry()
        self.handle = self.registry.load_library(library())
        assert self.handle is not None, self.log

    def creator(self, plugin):
        return self.registry.get_creator(plugin, VERSION, NAMESPACE)

    def create(self, plugin, values, phase):
        """A plugin of these fields, None if it was refused."""
        import numpy as np

        trt = self.trt
        kinds = {str: trt.PluginFieldType.CHAR, float: trt.PluginFieldType.FLOAT32, int: trt.PluginFieldType.INT32}
        arrays = [
            np.frombuffer(value.encode() + b"\0", np.int8)
            if isinstance(value, str)
            else np.array([value], np.float32 if isinstance(value, float) else np.int32)
            for value in values.values()
        ]  # the fields only point to them
        named = zip(values.items(), arrays, strict=True)
        fields = [trt.PluginField(name, array, kinds[type(value)]) for (name, value), array in named]
        return self.creator(plugin).create_plugin("node", trt.PluginFieldCollection(fields), phase)

    def errors(self):
        return [message for severity, message in self.log if severity in ("ERROR", "INTERNAL_ERROR")]


def in_child(function: str, *arguments, environment=None):
    """Runs "module:function" on JSON arguments in a fresh process: (result, stderr). Fails if that crashes."""
    code = (
        "import importlib, json, os, sys; module, name = sys.argv[1].split(':'); "
        "result = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2])); "
        "print('\\n' + json.dumps(result), flush=True); os._exit(0)"
    )
    environment = {**os.environ, **(environment or {}), "PYTHONPATH": str(Path(__file__).parent)}
    with tempfile.TemporaryDirectory() as temporary:  # a process that ends so cleans nothing up
        child = subprocess.run(
            [sys.executable, "-c", code, function, json.dumps(arguments)],
            capture_output=True,
            text=True,
            env={**environment, "TMPDIR": temporary},
            timeout=240,
        )
    assert child.returncode == 0, f"exit {child.returncode}\n{child.stdout}\n{child.stderr}"
    return json.loads(child.stdout.splitlines()[-1]), child.stderr
