# SPDX-License-Identifier: Apache-2.0
"""The variables that steer ReplaySSM under trtllm-serve. Workers get no others than TRTLLM*.

TRTLLM_REPLAYSSM                      1 (default): on; 0: off, TensorRT-LLM stays untouched
TRTLLM_REPLAYSSM_ON_MISMATCH          refuse (default): a TensorRT-LLM or a setting that does not fit is an error;
                                      fallback: a warning, and the stock decoding
TRTLLM_REPLAYSSM_WINDOW               auto (default) or 1..64: most records a slot holds between steps
TRTLLM_REPLAYSSM_READ_COPY            none (default), fp8, nvfp4, nvfp4_amax, e2m2: what steps read instead of the
                                      state
TRTLLM_REPLAYSSM_STOCHASTIC_ROUNDING  auto (default): as mamba_ssm_stochastic_rounding says; 0, 1. For float16 states
TRTLLM_REPLAYSSM_SEED                 of stochastic rounding, 0 (default) to 2**64-1
TRTLLM_REPLAYSSM_CHECK                steps between looks at the error word (default 1000); 0: never
TRTLLM_REPLAYSSM_SHADOW               every so many steps the stock kernel runs too, and the difference is logged;
                                      0 (default): never. Steps inside CUDA graphs have no shadow
"""

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "TRTLLM_REPLAYSSM"


def _choice(*values):
    def parse(name, text):
        if text not in values:
            raise ValueError(f"{name}: expected {', '.join(values[:-1])} or {values[-1]}, got {text!r}")
        return text

    return parse


def _count(low, high, *words):
    def parse(name, text):
        if text in words:
            return text
        if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
            expected = " or ".join((*words, f"{low}..{high}"))
            raise ValueError(f"{name}: expected {expected}, got {text!r}")
        return int(text)

    return parse


_PARSERS = {
    "": _choice("0", "1"),
    "_ON_MISMATCH": _choice("refuse", "fallback"),
    "_WINDOW": _count(1, 64, "auto"),
    "_READ_COPY": _choice("none", "fp8", "nvfp4", "nvfp4_amax", "e2m2"),
    "_STOCHASTIC_ROUNDING": _choice("auto", "0", "1"),
    "_SEED": _count(0, 2**64 - 1),
    "_CHECK": _count(0, 10**9),
    "_SHADOW": _count(0, 10**9),
}
_READ_ELSEWHERE = (  # the other variables of our prefix: no business of the adapter, and no typing errors
    "_PLUGIN",  # integrations/trtllm_build/registration.py
    "_AUTOREGISTER",  # the plugin library
    "_NVCC",  # pyproject.toml
)


@dataclass(frozen=True)
class Settings:
    """What the module docstring tells of."""

    enabled: bool = True
    fall_back: bool = False
    window: int | str = "auto"
    read_copy: str = "none"
    stochastic_rounding: str = "auto"
    seed: int = 0
    check: int = 1000
    shadow: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Settings":
        """From variables. Where TRTLLM_REPLAYSSM is 0, nothing else is looked at.

        Raises:
            ValueError: a value that a variable does not take, or a variable of our prefix that there is not.
        """
        if environment.get(PREFIX) == "0":
            return cls(enabled=False)
        values = {}
        for name, text in environment.items():
            if not name.startswith(PREFIX):
                continue
            key = name.removeprefix(PREFIX)
            if key in _READ_ELSEWHERE:
                continue
            if key not in _PARSERS:
                known = ", ".join(PREFIX + key for key in _PARSERS)
                raise ValueError(f"{name}: no such variable, expected one of {known}")
            values[key] = _PARSERS[key](name, text)
        return cls(
            fall_back=values.get("_ON_MISMATCH", "refuse") == "fallback",
            **{
                key.removeprefix("_").lower(): value for key, value in values.items() if key not in ("", "_ON_MISMATCH")
            },
        )
