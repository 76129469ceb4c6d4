# SPDX-License-Identifier: Apache-2.0
"""Saved slots: a self-describing blob of bytes.

    magic "REPLAYSM" | uint32 format version | uint32 header length | header (JSON) | 0 up to a multiple of 256
    cursors, 32 bytes a slot | 0 up to a multiple of 256 | slots, [layers, slots, slot_stride] bytes

The header holds what must agree between the pool that wrote the blob and the one that reads it.
"""

import json
import struct
from dataclasses import asdict
from typing import NamedTuple

import torch

from . import _core
from .layout import SlotLayout

_MAGIC = b"REPLAYSM"
_VERSION = 1
_PREFIX = struct.Struct("<8sII")
_ALIGNMENT = 256


class Parts(NamedTuple):
    """Views of a blob."""

    cursors: torch.Tensor  # uint8 [slots, CURSOR_BYTES]
    data: torch.Tensor  # uint8 [num_layers, slots, slot_stride]


def allocate(layout: SlotLayout, num_layers: int, first_head: int, slots: int) -> tuple[torch.Tensor, Parts]:
    """A blob (uint8 [bytes], on the CPU) with its header filled in, and views of the parts to fill."""
    text = json.dumps({**_facts(layout, num_layers, first_head), "slots": slots}).encode()
    header = _PREFIX.pack(_MAGIC, _VERSION, len(text)) + text
    blob = torch.zeros(_end(len(header), layout, num_layers, slots), dtype=torch.uint8)
    blob[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return blob, _views(blob, len(header), layout, num_layers, slots)


def parse(blob: torch.Tensor, layout: SlotLayout, num_layers: int, first_head: int, slots: int) -> Parts:
    """Views of a blob's parts. ValueError names what differs from what this pool and call expect."""
    if not isinstance(blob, torch.Tensor) or blob.dtype != torch.uint8:
        given = blob.dtype if isinstance(blob, torch.Tensor) else type(blob).__name__
        raise TypeError(f"blob: expected a torch.uint8 tensor, got {given}")
    if blob.dim() != 1 or blob.device.type != "cpu":
        raise ValueError(f"blob: expected a 1-D CPU tensor, got shape {tuple(blob.shape)} on {blob.device}")
    blob = blob.contiguous()
    if len(blob) < _PREFIX.size:
        raise ValueError(f"blob: expected at least {_PREFIX.size} bytes, got {len(blob)}")
    magic, version, length = _PREFIX.unpack(bytes(blob[: _PREFIX.size].tolist()))
    if magic != _MAGIC:
        raise ValueError(f"blob: expected saved slots (magic {_MAGIC!r}), got {magic!r}")
    if version != _VERSION:
        raise ValueError(f"blob: expected format version {_VERSION}, got {version}")
    header_bytes = _PREFIX.size + length
    if len(blob) < header_bytes:
        raise ValueError(f"blob: expected a header of {header_bytes} bytes, got {len(blob)} bytes in all")
    try:
        header = dict(json.loads(bytes(blob[_PREFIX.size : header_bytes].tolist())))
    except (ValueError, TypeError):
        raise ValueError("blob: expected a header in JSON, got something else: the blob is damaged") from None
    for name, expected in {**_facts(layout, num_layers, first_head), "slots": slots}.items():
        if header.get(name) != expected:
            raise ValueError(f"blob: expected {name} = {expected}, got {header.get(name)}")
    expected_bytes = _end(header_bytes, layout, num_layers, slots)
    if len(blob) != expected_bytes:
        raise ValueError(f"blob: expected {expected_bytes} bytes, got {len(blob)}")
    return _views(blob, header_bytes, layout, num_layers, slots)


def _facts(layout: SlotLayout, num_layers: int, first_head: int) -> dict:
    return {
        "layout_version": layout.version,
        "slot_stride": layout.slot_stride,
        **asdict(layout.geometry),
        **asdict(layout.config),
        "num_layers": num_layers,
        "first_head": first_head,
    }


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _data_offset(header_bytes: int, slots: int) -> int:
    return _align(_align(header_bytes) + slots * _core.CURSOR_BYTES)


def _end(header_bytes: int, layout: SlotLayout, num_layers: int, slots: int) -> int:
    return _data_offset(header_bytes, slots) + num_layers * slots * layout.slot_stride


def _views(blob: torch.Tensor, header_bytes: int, layout: SlotLayout, num_layers: int, slots: int) -> Parts:
    cursors = _align(header_bytes)
    data = _data_offset(header_bytes, slots)
    return Parts(
        blob[cursors : cursors + slots * _core.CURSOR_BYTES].view(slots, _core.CURSOR_BYTES),
        blob[data:].view(num_layers, slots, layout.slot_stride),
    )
