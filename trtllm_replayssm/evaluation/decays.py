# SPDX-License-Identifier: Apache-2.0
"""How fast a model's heads forget, and what that says about a checkpoint that is quantised at every flush.

Rounding adds an error of some variance v to a head's state. In a read copy it is gone at the next flush. In a shared
checkpoint it stays and fades by the head's decay over a window, ρ: v + ρ²·v + ρ⁴·v + … = v / (1 - ρ²). KL divergence is
quadratic in small errors of the logits, so that the ratio of the two KLs is the mean of 1 / (1 - E[ρ²]) over the heads,
weighted by the share of the read error that each contributes: the energy of what its outputs take from the state,
relative to that of its group, since a norm over the group follows (the relative error of a format is about the same for
every state). This holds while a window changes the state by more than rounding hides; beyond ρ ≈ 0.96, 4-bit codes that
are rounded to nearest stop following the state at all, and the ratio is larger.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional as F

from .. import ReplayConfig, ops
from .subject import Decoder, Subject


def _stride(window: int) -> int:
    """The longest part of a window that a step can bring."""
    return max(part for part in range(1, 17) if window % part == 0)


def least_tokens(window: int) -> int:
    """Tokens that a text must have: the first step reads no state."""
    return 2 * _stride(window)


class _Observer:
    """Stands in for a layer's `ops.step` and sums up what its heads do. Every step must be a whole window."""

    def __init__(self, heads: int, device: torch.device):
        self.decay, self.squared_decay, self.share = torch.zeros((3, heads), dtype=torch.float64, device=device)
        self.windows = 0

    def __call__(self, pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out=None):
        y = ops.step(pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out)
        rows, sharing = plan.rows, x.shape[1] // B.shape[1]
        # [rows, heads, tokens, ...]
        x, B, C, outputs = (v.double().unflatten(0, (rows, -1)).transpose(1, 2) for v in (x, B, C, y))
        B, C = (v.repeat_interleave(sharing, 1) for v in (B, C))
        delta = F.softplus(dt.double() + dt_bias).clamp(*dt_limit).unflatten(0, (rows, -1)).transpose(1, 2)
        log_decay = (-A_log.double().exp()[:, None] * delta).cumsum(-1)
        weights = (log_decay[..., :, None] - log_decay[..., None, :]).exp().tril() * delta[..., None, :]
        from_state = outputs - (weights * (C @ B.mT)) @ x - D.double()[:, None, None] * x
        energy = from_state.square().mean((2, 3)).unflatten(1, (-1, sharing))
        of_group = outputs.square().mean((2, 3)).unflatten(1, (-1, sharing)).sum(-1, keepdim=True)
        rho = log_decay[..., -1].exp()
        self.decay += rho.mean(0)
        self.squared_decay += rho.square().mean(0)
        self.share += (energy / of_group).flatten(1).mean(0)
        self.windows += 1
        return y


@torch.inference_mode()
def measure_decays(subject: Subject, tokens: torch.Tensor, window: int) -> dict:
    """Decays of the heads over `window` tokens, on texts int64 [rows, length].

    Returns per layer lists of heads: `decay` = E[ρ], `ratio` = 1 / (1 - E[ρ²]), `share` of the read error (all shares
    add up to 1); and `predicted_ratio`, the mean of `ratio` weighted by them. Measured over the longest part of a
    window that a step can bring and extrapolated from there.
    """
    if tokens.shape[1] < least_tokens(window):
        raise ValueError(f"decays: expected texts of at least {least_tokens(window)} tokens, got {tokens.shape[1]}")
    stride = _stride(window)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps as long as the window are meant
        replay = ReplayConfig(stride, stride, activation=subject.activation)
    decoder = Decoder(subject, replay, tokens)
    observers = []
    for mixer in subject.mixers:
        observers.append(_Observer(len(mixer.A_log), tokens.device))
        mixer.step = observers[-1]
    try:
        for position in range(0, tokens.shape[1] // stride * stride, stride):
            first = torch.full((), position, device=tokens.device)
            decoder.step(first, stride, position + stride)
    finally:
        for mixer in subject.mixers:
            mixer.step = ops.step
    decay, squared, share = (
        np.stack([(getattr(observer, name) / observer.windows).cpu().numpy() for observer in observers])
        for name in ("decay", "squared_decay", "share")
    )
    decay, squared = (mean ** (window / stride) for mean in (decay, squared))
    ratio, share = 1 / (1 - squared), share / share.sum()
    return {
        "window": window,
        "decay": decay.round(4).tolist(),
        "ratio": ratio.round(2).tolist(),
        "share": share.round(4).tolist(),
        "predicted_ratio": float((ratio * share).sum()),
    }
