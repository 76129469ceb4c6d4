# SPDX-License-Identifier: Apache-2.0
"""How a slot lies in memory, as the C library defines it."""

import math
from typing import NamedTuple

import numpy as np

from . import _core
from .config import ReplayConfig
from .geometry import MambaGeometry

_NUMPY = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}


class Section(NamedTuple):
    """A section of a slot: bytes from the slot's start, row-major shape, element format ("fp32", "bf16", "fp16")."""

    offset: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str


class SlotLayout:
    """The sections of one slot of one layer.

    Attributes:
        sections: name -> Section, in memory order: checkpoint [H, P, N], x_ring [H, R, P], b_ring [G, R, N],
            delta_ring [H, R], conv_ring [conv_rows, conv_channels] (channels x | B | C).
        slot_stride: bytes of a slot.
        ring_rows: R = window + max_step_tokens. Record r of a slot lies in row r mod R.
        conv_rows: K - 1 + max_step_tokens. Raw convolution input r lies in row r mod conv_rows.
        record_bytes: bytes of one record (delta, x, B) of all heads and groups.
        version: of the layout.
    """

    def __init__(self, geometry: MambaGeometry, config: ReplayConfig):
        core = _core.Layout(geometry.core, config.core)
        self.geometry = geometry
        self.config = config
        self.version: int = core.version
        self.ring_rows: int = core.ring_rows
        self.conv_rows: int = core.conv_rows
        self.slot_stride: int = core.slot_stride
        heads, groups = geometry.num_heads, geometry.num_groups
        shapes = {
            "checkpoint": ((heads, geometry.head_dim, geometry.state_dim), config.checkpoint),
            "x_ring": ((heads, core.ring_rows, geometry.head_dim), config.activation),
            "b_ring": ((groups, core.ring_rows, geometry.state_dim), config.activation),
            "delta_ring": ((heads, core.ring_rows), "fp32"),
            "conv_ring": ((core.conv_rows, core.conv_channels), config.activation),
        }
        self.sections = {name: Section(*getattr(core, name), *shape) for name, shape in shapes.items()}
        for name, section in self.sections.items():
            if section.bytes != math.prod(section.shape) * _NUMPY[section.dtype].itemsize:
                raise RuntimeError(f"section {name} has {section.bytes} bytes, expected those of {section.shape}")
        rings = (self.sections[name] for name in ("x_ring", "b_ring", "delta_ring"))
        self.record_bytes = sum(ring.bytes for ring in rings) // self.ring_rows

    def unpack(self, blob) -> dict[str, np.ndarray]:
        """Views of a slot's sections.

        Args:
            blob: uint8 [..., slot_stride], an array (or CPU tensor) of slots, contiguous in its last dimension.

        Returns:
            name -> array [..., *shape] that shares memory with `blob`. numpy has no bfloat16: a "bf16" section comes as
            uint16, the upper halves of float32 bits.
        """
        blob = np.asarray(blob)
        if blob.dtype != np.uint8:
            raise TypeError(f"blob: expected uint8, got {blob.dtype}")
        if blob.ndim == 0 or blob.shape[-1] != self.slot_stride or blob.strides[-1] != 1:
            raise ValueError(f"blob: expected contiguous slots [..., {self.slot_stride}], got shape {blob.shape}")
        return {
            name: blob[..., s.offset : s.offset + s.bytes].view(_NUMPY[s.dtype]).reshape(*blob.shape[:-1], *s.shape)
            for name, s in self.sections.items()
        }
