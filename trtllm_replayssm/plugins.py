# SPDX-License-Identifier: Apache-2.0
"""The TensorRT plugin library: where it is, and how a registry gets it."""

import ctypes
from pathlib import Path

from . import _core

NAMESPACE = "trtllm_replayssm"
VERSION = "1"
PLUGINS = ("ReplaySsmPlan", "ReplayCausalConv", "ReplaySsmFlush", "ReplaySsmStep")


def library_path() -> Path:
    """libtrtllm_replayssm_plugins.so of this installation.

    Raises:
        RuntimeError: it was built without TensorRT's headers.
    """
    path = Path(_core.__file__).with_name("libtrtllm_replayssm_plugins.so")
    if not path.exists():
        raise RuntimeError(
            f"{path.name}: not in this installation, which was built without TensorRT's headers; install it again with "
            "-C cmake.define.REPLAYSSM_TENSORRT_INCLUDE_DIR=DIR (the package kernel-lens 2.0.1 has them)"
        )
    return path


def register(registry, library: Path | None = None) -> None:
    """Loads the plugin library into a TensorRT plugin registry, unless its plugins are there already.

    Args:
        registry: IPluginRegistry of any TensorRT's Python package, e.g. `tensorrt.get_plugin_registry()`.
        library: None: this installation's; else e.g. that of an engine folder.

    Raises:
        RuntimeError: a plugin cannot be found in the registry afterwards, named with namespace and version.
    """
    library = library or library_path()
    if missing(registry):
        registry.load_library(str(library))
    for plugin in missing(registry):
        raise RuntimeError(
            f"plugin {plugin}, namespace {NAMESPACE}, version {VERSION}: not in the registry after loading "
            f"{library}; TensorRT's log says why"
        )


def missing(registry) -> list[str]:
    """The plugins that a registry does not know."""
    # get_creator would log an error for each.
    known = {(creator.name, creator.plugin_version, creator.plugin_namespace) for creator in registry.all_creators}
    return [plugin for plugin in PLUGINS if (plugin, VERSION, NAMESPACE) not in known]


def last_error() -> str:
    """What a plugin refused last in this thread, "" if nothing: TensorRT's exceptions do not carry it."""
    function = ctypes.CDLL(str(library_path())).replayssm_plugins_last_error
    function.restype = ctypes.c_char_p
    return function().decode()
