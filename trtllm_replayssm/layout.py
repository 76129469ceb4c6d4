# SPDX-License-Identifier: Apache-2.0
"""How a slot lies in memory, as the C library defines it."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from . import _core
from .config import ReplayConfig
from .geometry import MambaGeometry
from .number_formats import bf16_values, e2m2_values, fp8_values, nvfp4_values
from .window import resolve

# "bf16": numpy has no such type. "bytes": codes and scales of a head, taken apart by `unpack`.
_NUMPY = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "bytes": np.dtype(np.uint8),
}
_PLAIN = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp16_sr": "fp16"}


class Section(NamedTuple):
    """A section of a slot: bytes from the slot's start (-1: it lies elsewhere), row-major shape, element format
    ("fp32", "bf16", "fp16", or "bytes": chunks of codes and scales).
    """

    offset: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str


class SlotLayout:
    """The sections of one slot of one layer.

    Args:
        geometry: sizes of a layer.
        config: window and formats.
        external: sections that are not part of the slot's blob: "checkpoint", if an engine's own states are the
            checkpoints ("fp32", "bf16", "fp16", "fp16_sr" only); "conv_ring", if an engine runs the convolution itself.

    Attributes:
        config: with a number for its window.
        sections: name -> Section, in memory order: checkpoint [H, P, N], or [H, chunk] if its format has codes and
            scales; read_copy [H, chunk], if there is one; x_ring [G, R, H/G, P], b_ring [G, R, N],
            delta_ring [G, R, H/G], conv_ring [conv_rows, conv_channels] (channels x | B | C).
        external: the code of the external sections.
        slot_stride: bytes of a slot.
        ring_rows: R = window + max_step_tokens. Record r of a slot lies in row r mod R.
        conv_rows: K - 1 + max_step_tokens. Raw convolution input r lies in row r mod conv_rows.
        record_bytes: bytes of one record (delta, x, B) of all heads and groups.
        version: of the layout.
    """

    def __init__(self, geometry: MambaGeometry, config: ReplayConfig, external: Iterable[str] = ()):
        config = resolve(geometry, config)
        self.external = external_code(external)
        core = _core.Layout(geometry.core, config.core, self.external)
        self.geometry = geometry
        self.config = config
        self.version: int = core.version
        self.ring_rows: int = core.ring_rows
        self.conv_rows: int = core.conv_rows
        self.slot_stride: int = core.slot_stride
        heads, groups = geometry.num_heads, geometry.num_groups
        if config.checkpoint in _PLAIN:
            checkpoint = ((heads, geometry.head_dim, geometry.state_dim), _PLAIN[config.checkpoint])
        else:
            checkpoint = ((heads, core.checkpoint_head_bytes), "bytes")
        shapes = {
            "checkpoint": checkpoint,
            "read_copy": ((heads, core.read_copy_head_bytes), "bytes"),
            "x_ring": ((groups, core.ring_rows, heads // groups, geometry.head_dim), config.activation),
            "b_ring": ((groups, core.ring_rows, geometry.state_dim), config.activation),
            "delta_ring": ((groups, core.ring_rows, heads // groups), "fp32"),
            "conv_ring": ((core.conv_rows, core.conv_channels), config.activation),
        }
        if config.read_copy == "none":
            del shapes["read_copy"]
        self.sections = {name: Section(*getattr(core, name), *shape) for name, shape in shapes.items()}
        for name, section in self.sections.items():
            if section.bytes != math.prod(section.shape) * _NUMPY[section.dtype].itemsize:
                raise RuntimeError(f"section {name} has {section.bytes} bytes, expected those of {section.shape}")
        rings = (self.sections[name] for name in ("x_ring", "b_ring", "delta_ring"))
        self.record_bytes = sum(ring.bytes for ring in rings) // self.ring_rows

    def unpack(self, blob) -> dict[str, np.ndarray]:
        """Views of a slot's sections and their parts.

        Args:
            blob: uint8 [..., slot_stride], an array (or CPU tensor) of slots, contiguous in its last dimension.

        Returns:
            name -> array [..., *shape] that shares memory with `blob`; external sections are left out. numpy has no
            bfloat16: a "bf16" section comes as uint16, the upper halves of float32 bits. A checkpoint or read copy of
            codes and scales comes in parts (NAME is "checkpoint" or "read_copy"), E4M3 and E2M1 as uint8 codes:
            "fp8", "fp8_sr": NAME.codes [H, P, N], NAME.row_scales fp32 [H, P];
            "nvfp4", "nvfp4_amax": NAME.codes [H, P, N/2], the even column in the low four bits, NAME.block_scales
            [H, P, N/16], NAME.head_scale fp32 [H], and of a read copy "nvfp4" NAME.column_scales [H, N];
            "e2m2": the upper four bits of codes, scales as above, NAME.low_bits uint16 [H, P, N/16], the first of 16
            columns in bit 0.
        """
        blob = np.asarray(blob)
        if blob.dtype != np.uint8:
            raise TypeError(f"blob: expected uint8, got {blob.dtype}")
        if blob.ndim == 0 or blob.shape[-1] != self.slot_stride or blob.strides[-1] != 1:
            raise ValueError(f"blob: expected contiguous slots [..., {self.slot_stride}], got shape {blob.shape}")
        arrays = {}
        for name, s in self.sections.items():
            if s.offset < 0:
                continue
            section = blob[..., s.offset : s.offset + s.bytes].view(_NUMPY[s.dtype]).reshape(*blob.shape[:-1], *s.shape)
            if s.dtype == "bytes":
                arrays.update({f"{name}.{part}": array for part, array in self._parts(name, section)})
            else:
                arrays[name] = section
        return arrays

    def state(self, blob, name: str = "checkpoint") -> np.ndarray:
        """The state that a slot's "checkpoint" or "read_copy" holds, as float32 [..., H, P, N], a copy.

        Args:
            blob: as for `unpack`.
            name: which of the two.

        Raises:
            ValueError: "read_copy" without one, or another name.
        """
        if name not in ("checkpoint", "read_copy") or name not in self.sections:
            raise ValueError(f'name: expected "checkpoint" or, with a read copy, "read_copy", got {name!r}')
        if self.sections[name].offset < 0:
            raise ValueError(f"name: expected a section of the blob, got {name!r}, which lies elsewhere")
        arrays = self.unpack(blob)
        if name in arrays:
            plain = arrays[name]
            return bf16_values(plain) if plain.dtype == np.uint16 else plain.astype(np.float32)
        if f"{name}.row_scales" in arrays:
            return fp8_values(arrays[f"{name}.codes"], arrays[f"{name}.row_scales"])
        parts = {part.removeprefix(f"{name}."): array for part, array in arrays.items() if part.startswith(f"{name}.")}
        return e2m2_values(**parts) if "low_bits" in parts else nvfp4_values(**parts)

    def _parts(self, name: str, chunks: np.ndarray):
        """Names and views of the parts of a section's chunks [..., H, chunk]."""
        P, N = self.geometry.head_dim, self.geometry.state_dim
        kind = getattr(self.config, name)
        if kind in ("fp8", "fp8_sr"):
            parts = {"codes": ((P, N), np.uint8), "row_scales": ((P,), np.float32)}
        else:
            parts = {"codes": ((P, N // 2), np.uint8)}
            if kind == "e2m2":
                parts["low_bits"] = ((P, N // 16), np.uint16)
            parts["block_scales"] = ((P, N // 16), np.uint8)
            if (name, kind) == ("read_copy", "nvfp4"):
                parts["column_scales"] = ((N,), np.uint8)
            parts["head_scale"] = ((), np.float32)
        offset = 0
        for part, (shape, dtype) in parts.items():
            size = math.prod(shape) * np.dtype(dtype).itemsize
            yield part, chunks[..., offset : offset + size].view(dtype).reshape(*chunks.shape[:-1], *shape)
            offset += size
        if -(-offset // 16) * 16 != chunks.shape[-1]:
            raise RuntimeError(f"section {name} has chunks of {chunks.shape[-1]} bytes, expected {offset}")

    def traffic_bytes(self, counts: dict[str, int]) -> dict[str, int]:
        """Bytes that one layer moved, by the counts that `StatePool.stats` gives.

        Steps that do not flush read the read copy, if there is one; whoever writes a state writes both.
        """
        checkpoint = self.sections["checkpoint"].bytes
        copy = self.sections["read_copy"].bytes if "read_copy" in self.sections else None
        by_steps = checkpoint if copy is None else copy
        step_reads = counts["step_reads"]
        return {
            "state_bytes_read": (counts["state_reads"] - step_reads) * checkpoint + step_reads * by_steps,
            "state_bytes_written": counts["state_writes"] * (checkpoint + (copy or 0)),
            "record_bytes_read": counts["record_reads"] * self.record_bytes,
            "record_bytes_written": counts["record_writes"] * self.record_bytes,
        }


def external_code(names: Iterable[str]) -> int:
    """The library's code of external sections. ValueError for a name that is none."""
    code = 0
    for name in names:
        if name not in _core.EXTERNAL_SECTIONS:
            raise ValueError(f"external: expected any of {', '.join(_core.EXTERNAL_SECTIONS)}, got {name!r}")
        code |= _core.EXTERNAL_SECTIONS[name]
    return code
