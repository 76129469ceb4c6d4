# SPDX-License-Identifier: Apache-2.0
"""Registers the plugin library in every Python process that imports tensorrt_llm.

An engine is deserialised in worker processes that know nothing of this package. What reaches them are environment
variables whose names begin with TRTLLM; so trtllm_replayssm.pth, which Python reads at its start, imports this module
where TRTLLM_REPLAYSSM_PLUGIN is set, and this module waits for tensorrt_llm: its import loads TensorRT, after which the
library is put into the registry. Nothing is loaded before.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys

VARIABLE = "TRTLLM_REPLAYSSM_PLUGIN"
PACKAGE = "tensorrt_llm"


def register() -> None:
    """Raises RuntimeError if a plugin cannot be found afterwards."""
    plugins = importlib.import_module("trtllm_replayssm.plugins")
    plugins.register(importlib.import_module("tensorrt").get_plugin_registry())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds tensorrt_llm where it is, and registers when it has been imported. Looks for nothing else."""

    def find_spec(self, name, path=None, target=None):
        if name != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module):
            run(module)
            register()

        spec.loader.exec_module = run_and_register
        return spec


def install() -> None:
    """Raises ValueError if the variable is neither 0 nor 1."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}: expected 0 or 1, got {value!r}")
    if value == "0":
        return
    if PACKAGE in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Finder())


install()
