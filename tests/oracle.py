# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 recurrence and its causal convolution, token by token in numpy: what every op is compared with.

In float64 this is the oracle. In float32 it is the conventional recurrence whose own error bounds ours. It shares no
code with the ops and keeps no checkpoint, records or ring.
"""

import numpy as np


def recur(state, x, B, C, dt, A_log, D, dt_bias, dt_limit=(0.0, np.inf), dtype=np.float64):
    """Runs T tokens of a sequence (or of several at once, in leading dimensions).

    state [..., H, P, N]; x [..., T, H, P]; B, C [..., T, G, N]; dt [..., T, H]; A_log, D, dt_bias [H].
    Returns y [..., T, H, P] and the states [T + 1, ..., H, P, N] before the first and after each token.
    """
    state, x, B, C, dt, A_log, D, dt_bias = (np.asarray(a, dtype) for a in (state, x, B, C, dt, A_log, D, dt_bias))
    heads_per_group = x.shape[-2] // B.shape[-2]
    A = -np.exp(A_log)
    states, outputs = [state], []
    for t in range(x.shape[-3]):
        delta = np.clip(softplus(dt[..., t, :] + dt_bias), dtype(dt_limit[0]), dtype(dt_limit[1]))
        x_t = x[..., t, :, :]
        B_t = np.repeat(B[..., t, :, :], heads_per_group, axis=-2)
        C_t = np.repeat(C[..., t, :, :], heads_per_group, axis=-2)
        decay = np.exp(A * delta)
        state = decay[..., None, None] * state + (delta[..., None] * x_t)[..., None] * B_t[..., None, :]
        outputs.append((state @ C_t[..., None])[..., 0] + D[:, None] * x_t)
        states.append(state)
    return np.stack(outputs, axis=-3) if outputs else x, np.stack(states)


def softplus(v):
    """log1p(exp(v)), v itself above 20."""
    return np.where(v > 20, v, np.log1p(np.exp(np.minimum(v, 20))))


def convolve(before, raw, weight, bias, dtype=np.float64):
    """Causal depthwise convolution and SiLU of `raw` [T, channels] after the raw inputs `before` [m, channels].

    weight [channels, K], bias [channels]; inputs before the first are 0. Returns [T, channels].
    """
    weight = np.asarray(weight, dtype)
    taps = weight.shape[1]
    zeros = np.zeros((taps - 1, raw.shape[1]), dtype)
    inputs = np.concatenate([zeros, np.asarray(before, dtype), np.asarray(raw, dtype)])
    first = len(inputs) - len(raw) - (taps - 1)
    sums = np.asarray(bias, dtype) + sum(weight[:, k] * inputs[first + k : first + k + len(raw)] for k in range(taps))
    return sums / (1 + np.exp(-sums))


def relative_error(given, expected) -> float:
    """|given - expected| / |expected|, L2."""
    given, expected = np.asarray(given, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(given - expected) / np.linalg.norm(expected))
