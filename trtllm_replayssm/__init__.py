# SPDX-License-Identifier: Apache-2.0
"""ReplaySSM decoding of Mamba-2 layers: a state checkpoint, a ring of records, and steps that write no state."""

from importlib import import_module

from . import _core
from .config import ReplayConfig
from .geometry import MambaGeometry
from .layout import SlotLayout

__version__ = _core.version()
__all__ = ["MambaGeometry", "Plan", "ReplayConfig", "SlotLayout", "StatePool", "ops"]

_NEED_TORCH = {"StatePool": ("pool", "StatePool"), "Plan": ("plan", "Plan"), "ops": ("ops", None)}


def __getattr__(name: str):
    """Imports what needs torch on first use (PEP 562), so that sizes and layouts work with numpy alone."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NEED_TORCH[name]
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{__name__}.{name} needs torch: pip install 'trtllm-replayssm[runtime]'") from error
    module = import_module(f".{module}", __name__)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value
