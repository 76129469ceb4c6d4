# SPDX-License-Identifier: Apache-2.0
"""Per-row arguments (slots, token counts, accepted): host values are checked at once, device values used as is."""

from collections.abc import Iterable
from operator import index

import torch


def host_rows(name: str, values, low: int, high: int) -> list[int]:
    """`values` (an int, a sequence of ints or a tensor) as a list of ints in low..high. A CUDA tensor synchronises."""
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    if not isinstance(values, Iterable):
        values = [values]
    try:
        rows = [index(value) for value in values]
    except TypeError:
        rows = None
    if rows is None or any(isinstance(value, bool) for value in values):
        raise TypeError(f"{name}: expected ints, got {values!r}")
    for row, value in enumerate(rows):
        if not low <= value <= high:
            raise ValueError(f"{name}[{row}]: expected {low}..{high}, got {value}")
    return rows


def distinct_slots(name: str, rows: list[int]) -> list[int]:
    """`rows` if no slot is named twice; -1 may repeat."""
    first = {}
    for row, slot in enumerate(rows):
        if slot >= 0 and first.setdefault(slot, row) != row:
            raise ValueError(f"{name}[{row}]: expected distinct slots, got {slot} again (first in row {first[slot]})")
    return rows


def upload(name: str, rows: list[int], device: torch.device, dtype=torch.int32) -> torch.Tensor:
    """`rows` as a tensor on `device`, for which the host does not wait. Refused while a CUDA graph is captured, which
    would keep the values of now."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{name}: expected an {dtype} tensor on {device} during CUDA graph capture, got host values")
    values = torch.tensor(rows, dtype=dtype, pin_memory=device.type == "cuda")
    return values.to(device, non_blocking=True)


def device_rows(name: str, values: torch.Tensor, device: torch.device, dtype=torch.int32) -> torch.Tensor:
    """`values` checked to be a contiguous [rows] tensor of `dtype` on `device`."""
    if values.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {values.dtype}")
    if values.dim() != 1 or not values.is_contiguous():
        shape, strides = tuple(values.shape), values.stride()
        raise ValueError(f"{name}: expected a contiguous [rows] tensor, got shape {shape}, strides {strides}")
    if values.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {values.device}")
    return values
