# SPDX-License-Identifier: Apache-2.0
"""The sizes of one Mamba-2 layer."""

from dataclasses import astuple, dataclass
from functools import cached_property
from operator import index

from . import _core


def int32_field(name: str, value) -> int:
    """`value` as an int that fits 32 bits. TypeError and ValueError name the argument."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    value = index(value)
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{name}: expected a 32-bit integer, got {value}")
    return value


@dataclass(frozen=True)
class MambaGeometry:
    """Sizes of one Mamba-2 layer (of one tensor-parallel rank).

    Args:
        num_heads: H, value heads.
        head_dim: P, values a head; a multiple of 8 in 8..128.
        num_groups: G, groups of B and C; divides H. Head h belongs to group h // (H / G).
        state_dim: N, 64 or 128.
        conv_kernel: K, taps of the causal convolution; 2..8.

    Raises:
        TypeError: a size that is no int.
        ValueError, NotImplementedError: a size outside these ranges, by name.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int = 4

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "num_groups", "state_dim", "conv_kernel"):
            object.__setattr__(self, name, int32_field(name, getattr(self, name)))
        self.core  # noqa: B018 - the library checks the sizes

    @cached_property
    def core(self) -> "_core.Geometry":
        """The C struct."""
        return _core.Geometry(*astuple(self))

    def __reduce__(self):
        return type(self), astuple(self)

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x [H*P] | B [G*N] | C [G*N]."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim
