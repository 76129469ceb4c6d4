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


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 given as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp8_values(codes: np.ndarray, row_scales: np.ndarray) -> np.ndarray:
    """float32 [..., P, N] of E4M3 codes [..., P, N] and row scales [..., P]."""
    return E4M3[codes] * row_scales[..., None]


def nvfp4_values(codes: np.ndarray, block_scales: np.ndarray, head_scale: np.ndarray) -> np.ndarray:
    """float32 [..., P, N] of pairs of E2M1 codes [..., P, N/2], E4M3 codes [..., P, N/16] and head scales [...]."""
    steps = E4M3[block_scales] * head_scale[..., None, None]
    values = E2M1[np.stack([codes & 15, codes >> 4], -1)]
    return (values.reshape(*steps.shape, 16) * steps[..., None]).reshape(*codes.shape[:-1], -1)
