# SPDX-License-Identifier: Apache-2.0
"""What the codes of stored states mean (cpp/src/formats.h makes them)."""

import numpy as np


def _e4m3() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    magnitude[code & 0x7F == 0x7F] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3()  # value of each of the 256 codes
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E2M2 = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7]
E2M2 = np.array([*_E2M2, *(-value for value in _E2M2)], np.float32)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 given as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp8_values(codes: np.ndarray, row_scales: np.ndarray) -> np.ndarray:
    """float32 [..., P, N] of E4M3 codes [..., P, N] and row scales [..., P]."""
    return E4M3[codes] * row_scales[..., None]


def nvfp4_values(
    codes: np.ndarray, block_scales: np.ndarray, head_scale: np.ndarray, column_scales: np.ndarray | None = None
) -> np.ndarray:
    """float32 [..., P, N] of pairs of E2M1 codes [..., P, N/2], E4M3 codes of blocks [..., P, N/16] and, if any, of
    columns [..., N], and head scales [...].
    """
    values = _blocks(E2M1[_nibbles(codes)], block_scales, head_scale)
    return values if column_scales is None else values * E4M3[column_scales][..., None, :]


def e2m2_values(
    codes: np.ndarray, low_bits: np.ndarray, block_scales: np.ndarray, head_scale: np.ndarray
) -> np.ndarray:
    """float32 [..., P, N] of the upper four bits of E2M2 codes [..., P, N/2], their lowest bits uint16 [..., P, N/16],
    E4M3 codes of blocks [..., P, N/16] and head scales [...].
    """
    upper = _nibbles(codes)
    low = (low_bits[..., None] >> np.arange(16) & 1).reshape(upper.shape)
    return _blocks(E2M2[upper << 1 | low], block_scales, head_scale)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)


def _blocks(values: np.ndarray, block_scales: np.ndarray, head_scale: np.ndarray) -> np.ndarray:
    steps = E4M3[block_scales] * head_scale[..., None, None]
    return (values.reshape(*steps.shape, 16) * steps[..., None]).reshape(values.shape)
