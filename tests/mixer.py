# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 layers of random weights and the tapes of tokens they are fed, for the tests of the ops."""

import warnings
from typing import NamedTuple

import numpy as np
import oracle
import pytest
import torch

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

SUPER_TP8 = MambaGeometry(num_heads=16, head_dim=64, num_groups=1, state_dim=128)  # F1 of the fault reports
NANO_TP8 = MambaGeometry(num_heads=12, head_dim=80, num_groups=1, state_dim=128)  # F2
SUPER = MambaGeometry(num_heads=128, head_dim=64, num_groups=8, state_dim=128)  # F3
SMALL = MambaGeometry(num_heads=4, head_dim=16, num_groups=2, state_dim=64)

# Every (checkpoint, read copy) that a config takes.
COPIES = ("fp8", "nvfp4", "nvfp4_amax", "e2m2")
PAIRS = [
    *((checkpoint, copy) for checkpoint in ("fp32", "bf16", "fp16", "fp16_sr") for copy in ("none", *COPIES)),
    *(("fp8_sr", copy) for copy in ("none", *COPIES[1:])),
    ("nvfp4", "none"),
]
all_pairs = pytest.mark.parametrize("checkpoint, read_copy", PAIRS)

# Bounds of the design: relative L2 error against the float64 oracle.
FP32_FLOOR = 2e-6
FP32_FACTOR = 1.25
SIXTEEN_BIT = 7e-4


def config_of(checkpoint, read_copy, window=8, max_step_tokens=1, activation="fp32") -> ReplayConfig:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message='checkpoint "bf16"')
        return ReplayConfig(window, max_step_tokens, checkpoint, read_copy, activation)


class Tokens(NamedTuple):
    """Inputs of a scan: x [n, H, P], B and C [n, G, N], dt [n, H]."""

    x: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    dt: torch.Tensor

    def span(self, first: int, end: int) -> "Tokens":
        return Tokens(*(tensor[first:end] for tensor in self))


class Weights(NamedTuple):
    """Per-head weights [H] of a scan, fp32."""

    A_log: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor

    @classmethod
    def random(cls, geometry, device="cpu", seed=0, max_decay=8.0):
        """|A| in 0.01..max_decay (both met), delta around 0.001..0.5."""
        generator = torch.Generator().manual_seed(seed)
        low, high = np.log(0.01), np.log(max_decay)
        A_log = low + (high - low) * torch.rand(geometry.num_heads, generator=generator)
        A_log[0] = high
        delta = torch.exp(-6.9 + 6.2 * torch.rand(geometry.num_heads, generator=generator))
        D = torch.randn(geometry.num_heads, generator=generator)
        return cls(*(w.to(device) for w in (A_log, D, torch.log(torch.expm1(delta)))))


def flush_then_step(pool, plan, tokens, weights) -> torch.Tensor:
    """ops.step of layer 0 as the two operators that engines have, a flush and a step told of it."""
    plan.note_use("stepped", 0)
    call = (pool.table, pool.data, pool.spec, 0, plan.buffer, plan.rows)
    torch.ops.trtllm_replayssm.flush(*call, weights.A_log)
    out = torch.zeros_like(tokens.x)
    torch.ops.trtllm_replayssm.step(*call, *tokens, *weights, out, 0.0, float("inf"), plan.max_count, True)
    return out


def random_tokens(geometry, dtype, count, device="cpu", seed=0) -> Tokens:
    g = geometry
    generator = torch.Generator().manual_seed(seed)
    shapes = ((g.num_heads, g.head_dim), (g.num_groups, g.state_dim), (g.num_groups, g.state_dim), (g.num_heads,))
    return Tokens(*(torch.randn((count, *s), generator=generator).to(dtype).to(device) for s in shapes))


def recur(state, tokens, weights, dtype=np.float64, **named):
    """The oracle on tensors."""
    return oracle.recur(state, *map(array, tokens), *map(array, weights), dtype=dtype, **named)


def array(tensor: torch.Tensor) -> np.ndarray:
    """Exact float64 values of a tensor."""
    return tensor.detach().cpu().double().numpy()


def zero_state(geometry) -> np.ndarray:
    return np.zeros((geometry.num_heads, geometry.head_dim, geometry.state_dim))


def assert_accurate(out: torch.Tensor, expected: np.ndarray, conventional: np.ndarray | None = None):
    """Output error within the design's bounds.

    fp32: at most 2e-6, or 1.25 times the error of the conventional float32 recurrence. 16 bits: at most 7e-4, besides
    the error of rounding the exact output.
    """
    error = oracle.relative_error(array(out), expected)
    if out.dtype == torch.float32:
        bound = FP32_FLOOR
        if conventional is not None:
            bound = max(bound, FP32_FACTOR * oracle.relative_error(conventional, expected))
    else:
        rounding = oracle.relative_error(array(torch.from_numpy(expected).to(out.dtype)), expected)
        error = max(error**2 - rounding**2, 0.0) ** 0.5
        bound = SIXTEEN_BIT
    assert error <= bound, f"relative error {error:.2e} > {bound:.2e}"


class Mixer:
    """A Mamba-2 mixer between its projections: convolution, then scan of slices of its output."""

    def __init__(self, geometry: MambaGeometry, device="cpu", seed=0):
        generator = torch.Generator().manual_seed(1000 + seed)
        self.geometry = geometry
        self.weights = Weights.random(geometry, device, seed)
        channels, taps = geometry.conv_channels, geometry.conv_kernel
        self.conv_weight = (torch.randn((channels, taps), generator=generator) / taps**0.5).to(device)
        self.conv_bias = (0.1 * torch.randn(channels, generator=generator)).to(device)

    def split(self, xBC: torch.Tensor):
        """x, B, C as slices of the convolution's output."""
        g = self.geometry
        x, B, C = xBC.split([g.num_heads * g.head_dim, g.num_groups * g.state_dim, g.num_groups * g.state_dim], dim=1)
        return x.unflatten(1, (g.num_heads, -1)), B.unflatten(1, (g.num_groups, -1)), C.unflatten(1, (g.num_groups, -1))

    def __call__(self, pool, layer, plan, raw, dt, op):
        xBC = ops.conv_step(pool, layer, plan, raw, self.conv_weight, self.conv_bias)
        return op(pool, layer, plan, *self.split(xBC), dt, *self.weights)

    def by_records(self, pool, layer, plan, raw, dt):
        """A step whose x and B the convolution stores as records."""
        C = ops.conv_step(pool, layer, plan, raw, self.conv_weight, self.conv_bias, records=True)
        return ops.step(pool, layer, plan, None, None, C, dt, *self.weights)


class Stack:
    """Mixers over a pool, one a layer, each fed the same tape."""

    def __init__(self, geometry: MambaGeometry, config: ReplayConfig, num_layers=2, device="cpu"):
        self.geometry = geometry
        self.config = config
        self.device = device
        self.mixers = [Mixer(geometry, device, seed) for seed in range(num_layers)]

    def pool(self, num_slots=1) -> StatePool:
        """A pool whose slots hold garbage: nothing may depend on fresh memory."""
        pool = StatePool(self.geometry, self.config, num_slots, len(self.mixers), self.device)
        pool.data.fill_(0xFF)
        return pool

    def tape(self, seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw convolution inputs [count, channels] and dt [count, H] of a sequence."""
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randn((count, self.geometry.conv_channels), generator=generator)
        dt = torch.randn((count, self.geometry.num_heads), generator=generator)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.config.activation]
        return raw.to(dtype).to(self.device), dt.to(dtype).to(self.device)

    def cycle(self, pool, slots, chunks, accepted=None, op=ops.step):
        """Plans, runs all layers and commits. chunks: (raw, dt) of each row. Returns [layers, T, H, P] of each row."""
        counts = [len(raw) for raw, _ in chunks]
        plan = pool.plan(slots, counts)
        raw = torch.cat([raw for raw, _ in chunks])
        dt = torch.cat([dt for _, dt in chunks])
        outputs = torch.stack([mixer(pool, layer, plan, raw, dt, op) for layer, mixer in enumerate(self.mixers)])
        pool.commit(plan, accepted)
        return outputs.split(counts, dim=1)

    def run(self, pool, slot, tape, op=ops.step, chunk=1):
        """Feeds a whole tape to one slot in chunks. Returns outputs [layers, n, H, P]."""
        pieces = zip(*(tensor.split(chunk) for tensor in tape), strict=True)
        return torch.cat([self.cycle(pool, [slot], [piece], op=op)[0] for piece in pieces], dim=1)


def row_order(rows: torch.Tensor) -> list[int]:
    """The order of a plan's rows, int32 [rows, 16]: those that flush, -1 for those that are not live, the others from
    the last one on."""
    live = rows[:, 6] >= 0
    flushing = live & (rows[:, 10] & 1 != 0)
    others = (live & ~flushing).nonzero().flatten().flip(0)
    return [*flushing.nonzero().flatten().tolist(), *[-1] * int((~live).sum()), *others.tolist()]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes and bits (NaN included)."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8).cpu(), b.contiguous().view(torch.uint8).cpu()
    )
