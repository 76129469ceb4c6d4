# SPDX-License-Identifier: Apache-2.0
"""How the state of a layer is kept: window, formats, activations."""

import warnings
from dataclasses import astuple, dataclass, fields
from functools import cached_property

from . import _core
from .geometry import int32_field

LONGEST_AUTO = 32  # of the windows that "auto" chooses from


@dataclass(frozen=True)
class ReplayConfig:
    """How ReplaySSM keeps a layer's state.

    Args:
        window: L, most records that a slot holds between steps (1..64). "auto": of 8, 16, 24 and 32 the one whose
            steps cost least (see `window.py`), which takes a geometry to tell: a pool's `config.window`, and
            a SlotLayout's, is the number.
        max_step_tokens: T_max, most tokens that a step brings a row (1..min(L, 16)): 1 for standard decoding,
            1 + drafts for speculative verification.
        checkpoint: format of the state that the recurrence continues from: "fp32", "bf16", "fp16"; "fp16_sr" (rounded
            stochastically); "fp8_sr" (E4M3, an FP32 scale a row of P, rounded stochastically); "nvfp4" (E2M1, an E4M3
            scale a block of 16, an FP32 scale a head: the baseline whose error accumulates).
        read_copy: format of the copy that steps read instead, made with each checkpoint from the same FP32 state:
            "none" (they read the checkpoint); "fp8" (8.3 bits a value at P = 64); "e2m2" (5.5: 5-bit codes, block
            scales of the least error); "nvfp4" (4.6: 4-bit codes, block scales of the least error, column scales);
            "nvfp4_amax" (4.5: plain NVFP4, the scales of the "nvfp4" checkpoint; larger errors, faster flushes). It
            never enters the recurrence, so its error stays with the outputs of one window.
        activation: "bf16", "fp16" or "fp32": dtype of x, B, C, convolution inputs, records and outputs.
        seed: of stochastic rounding, 0..2**64-1.

    Raises:
        TypeError: a number that is no int, or a format that is no string.
        ValueError: a value out of range, an unknown format, or a pair of formats that makes no sense (a copy that is
            no smaller than its checkpoint), by name.

    Warns:
        UserWarning: window < 2 * max_step_tokens (nearly every step flushes), or a "bf16" checkpoint (its 8 bits lose
            small updates; public reports tell of collapsed accuracy: measure the drift before use).
    """

    window: int | str = "auto"
    max_step_tokens: int = 1
    checkpoint: str = "fp32"
    read_copy: str = "none"
    activation: str = "bf16"
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "max_step_tokens", int32_field("max_step_tokens", self.max_step_tokens))
        if isinstance(self.window, str):
            if self.window != "auto":
                raise ValueError(f'window: expected an int or "auto", got {self.window!r}')
        else:
            object.__setattr__(self, "window", int32_field("window", self.window))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed: expected an int, got {self.seed!r} ({type(self.seed).__name__})")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed: expected 0..2**64-1, got {self.seed}")
        self._core(LONGEST_AUTO if self.window == "auto" else self.window)  # the library checks the values
        if self.window != "auto" and self.window < 2 * self.max_step_tokens:
            warnings.warn(
                f"window {self.window} < 2 * max_step_tokens ({2 * self.max_step_tokens}): nearly every step flushes",
                stacklevel=3,
            )
        if self.checkpoint == "bf16":
            warnings.warn(
                'checkpoint "bf16" drops small updates of the state; public reports tell of collapsed accuracy: '
                'measure the drift before use, or take "fp32" or "fp16_sr"',
                stacklevel=3,
            )

    @cached_property
    def core(self) -> "_core.Config":
        """The C struct. ValueError if the window is still "auto"."""
        if self.window == "auto":
            raise ValueError('window: expected a number, got "auto", which takes a geometry to resolve')
        return self._core(self.window)

    def _core(self, window: int) -> "_core.Config":
        return _core.Config(
            window,
            self.max_step_tokens,
            _code("checkpoint", self.checkpoint, _core.CHECKPOINT_FORMATS),
            _code("read_copy", self.read_copy, _core.READ_COPY_FORMATS),
            _code("activation", self.activation, _core.DTYPES),
            self.seed,
        )

    def with_window(self, window: int) -> "ReplayConfig":
        """The same with another window; nothing is warned of twice."""
        with_window = object.__new__(type(self))
        names = (field.name for field in fields(self))
        with_window.__dict__.update({name: getattr(self, name) for name in names} | {"window": window})
        return with_window

    def __reduce__(self):
        return type(self), astuple(self)


def _code(name: str, value, codes: dict[str, int]) -> int:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {value!r} ({type(value).__name__})")
    if value not in codes:
        raise ValueError(f"{name}: expected one of {', '.join(codes)}, got {value!r}")
    return codes[value]
