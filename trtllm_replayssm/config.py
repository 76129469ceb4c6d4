# SPDX-License-Identifier: Apache-2.0
"""How the state of a layer is kept: window, formats, activations."""

import warnings
from dataclasses import astuple, dataclass
from functools import cached_property

from . import _core
from .geometry import int32_field


@dataclass(frozen=True)
class ReplayConfig:
    """How ReplaySSM keeps a layer's state.

    Args:
        window: L, most records that a slot holds between steps (1..64). "auto": 16, or twice `max_step_tokens` if that
            is more; `config.window` then holds the number.
        max_step_tokens: T_max, most tokens that a step brings a row (1..min(L, 16)): 1 for standard decoding,
            1 + drafts for speculative verification.
        checkpoint: format of the recurrence state: "fp32", "bf16" or "fp16". ("fp16_sr", "fp8_sr" and "nvfp4" are
            planned and refused.)
        read_copy: format of the copy that steps read: "none": they read the checkpoint. ("fp8" and "nvfp4" are planned
            and refused.)
        activation: "bf16", "fp16" or "fp32": dtype of x, B, C, convolution inputs, records and outputs.
        seed: of stochastic rounding, 0..2**64-1.

    Raises:
        TypeError: a number that is no int, or a format that is no string.
        ValueError: a value out of range or an unknown format, by name.
        NotImplementedError: a known format that this version does not have.

    Warns:
        UserWarning: window < 2 * max_step_tokens (nearly every step flushes), or a "bf16" checkpoint (its 8 bits lose
            small updates; public reports tell of collapsed accuracy).
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
            object.__setattr__(self, "window", max(16, 2 * self.max_step_tokens))
        object.__setattr__(self, "window", int32_field("window", self.window))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed: expected an int, got {self.seed!r} ({type(self.seed).__name__})")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed: expected 0..2**64-1, got {self.seed}")
        self.core  # noqa: B018 - the library checks the values
        if self.window < 2 * self.max_step_tokens:
            warnings.warn(
                f"window {self.window} < 2 * max_step_tokens ({2 * self.max_step_tokens}): nearly every step flushes",
                stacklevel=3,
            )
        if self.checkpoint == "bf16":
            warnings.warn(
                'checkpoint "bf16" drops small updates of the state and can ruin accuracy; prefer "fp32" or "fp16"',
                stacklevel=3,
            )

    @cached_property
    def core(self) -> "_core.Config":
        """The C struct."""
        return _core.Config(
            self.window,
            self.max_step_tokens,
            _code("checkpoint", self.checkpoint, _core.CHECKPOINT_FORMATS),
            _code("read_copy", self.read_copy, _core.READ_COPY_FORMATS),
            _code("activation", self.activation, _core.DTYPES),
            self.seed,
        )

    def __reduce__(self):
        return type(self), astuple(self)


def _code(name: str, value, codes: dict[str, int]) -> int:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {value!r} ({type(value).__name__})")
    if value not in codes:
        raise ValueError(f"{name}: expected one of {', '.join(codes)}, got {value!r}")
    return codes[value]
