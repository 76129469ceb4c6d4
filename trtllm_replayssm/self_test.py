# SPDX-License-Identifier: Apache-2.0
"""Each op on a device against a float64 recurrence: whether this build computes the right numbers on this machine.

Two sequences share the rows of a batch: a prompt, decode steps through several windows, verified drafts of which
some are rejected, then everything that moves a state. What the ops gave after the convolution is what the recurrence
goes on with, so that each op's error is its own.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

from . import MambaGeometry, ReplayConfig, StatePool, _core, ops
from .operators import ACTIVATIONS
from .plan import FOLDED, STEPPED

GEOMETRY = MambaGeometry(num_heads=8, head_dim=64, num_groups=2, state_dim=128, conv_kernel=4)
PROMPT, STEPS, DRAFTS, WINDOW = 37, 20, 3, 8
# Relative L2 error of a row that a right build stays below: the rounding of the outputs, and of the state's format.
LIMITS = {
    ("fp32", "fp32", "none"): 2e-6,
    ("bf16", "fp32", "none"): 4e-3,
    ("fp16", "fp16_sr", "none"): 1e-3,
    ("bf16", "fp32", "nvfp4"): 0.08,
}


def run(device: str) -> list[dict]:
    """Every op in the formats of LIMITS: {"op", "device", "activation", "checkpoint", "read_copy", "error", "limit",
    "good"}, the largest error of all calls. An exception is a result, too: "error" is null then, and "why" tells."""
    results = []
    for formats, limit in LIMITS.items():
        labels = dict(zip(("activation", "checkpoint", "read_copy"), formats, strict=True))
        try:
            errors = _Trial(device, *formats).errors
        except Exception as error:  # a build that fails anywhere is told of, not raised
            results.append({"op": "all", "device": device, **labels, "error": None, "limit": limit, "good": False})
            results[-1]["why"] = f"{type(error).__name__}: {error}"
            continue
        for op, error in errors.items():
            most = 0.0 if op in _EXACT else limit
            good = math.isfinite(error) and error <= most
            results.append({"op": op, "device": device, **labels, "error": error, "limit": most, "good": good})
    return results


def _flush_and_step(pool, layer, plan, x, B, C, dt, A_log, D, dt_bias) -> torch.Tensor:
    """As the two plugins do it, that are one op elsewhere."""
    operators, out = torch.ops.trtllm_replayssm, torch.zeros_like(x)
    call = (pool.table, pool.data, pool.spec, layer, plan.buffer, plan.rows)
    operators.flush(*call, A_log)
    operators.step(*call, x, B, C, dt, A_log, D, dt_bias, out, 0.0, math.inf, pool.config.max_step_tokens, True)
    plan.note_use(STEPPED, layer)
    return out


_EXACT = ("plan_lengths", "save, load", "copy")  # the same bits


class _Trial:
    """One pass over all ops. errors: op -> largest error."""

    def __init__(self, device: str, activation: str, checkpoint: str, read_copy: str):
        self.device, self.dtype, self.errors = torch.device(device), ACTIVATIONS[activation], {}
        replay = ReplayConfig(
            window=WINDOW,
            max_step_tokens=1 + DRAFTS,
            checkpoint=checkpoint,
            read_copy=read_copy,
            activation=activation,
            seed=1,
        )
        self.replay = replay
        self.random = np.random.default_rng(0)
        H, channels, taps = GEOMETRY.num_heads, GEOMETRY.conv_channels, GEOMETRY.conv_kernel
        draw = self.random.standard_normal
        self.conv_weight, self.conv_bias = draw((channels, taps)) * 0.5, draw(channels) * 0.1
        self.A_log, self.D, self.dt_bias = self.random.uniform(0, 2.5, H), draw(H), draw(H) - 3
        self.weights = [self._tensor(values, torch.float32) for values in (self.A_log, self.D, self.dt_bias)]
        self.conv = [self._tensor(values, torch.float32) for values in (self.conv_weight, self.conv_bias)]
        self._begin()
        self._forward("prefill", ops.prefill, [PROMPT, PROMPT - 5], [PROMPT, PROMPT - 5])
        for step in range(STEPS):
            self._forward("step", ops.step, [1, 1], [1, 1], order=[step % 2, 1 - step % 2])
        for _ in range(STEPS):
            self._forward("flush, then step", _flush_and_step, [1, 1], [1, 1])
        for step in range(STEPS // 2):
            self._forward("step, drafts", ops.step, [1 + DRAFTS, 2], [1 + step % (1 + DRAFTS), step % 3])
        self._forward("prefill, continued", ops.prefill, [9, 6], [9, 6])
        self._move()
        self._plan_lengths()
        self.pool.validate()
        if read_copy == "none" and checkpoint == "fp32":
            self._baselines()

    def _begin(self) -> None:
        """A pool in which two sequences begin."""
        self.pool = StatePool(GEOMETRY, self.replay, num_slots=5, num_layers=1, device=self.device)
        self.pool.data.fill_(0xFF)  # what is there before a reset must not matter
        self.raw = [np.zeros((0, GEOMETRY.conv_channels)) for _ in range(2)]  # committed inputs, by sequence
        self.state = [np.zeros((GEOMETRY.num_heads, GEOMETRY.head_dim, GEOMETRY.state_dim)) for _ in range(2)]
        self.slots = [3, 1]
        self.pool.reset(self.slots)

    def _baselines(self) -> None:
        """The classical kernels, in pools of their own."""
        self._begin()
        for _ in range(5):
            self._forward("conventional_step", ops.conventional_step, [3, 2], [3, 2])
        self._begin()
        verify = partial(ops.conventional_verify, snapshots=self.pool.allocate_snapshots()[0])
        for step in range(5):
            self._forward("conventional_verify", verify, [1 + DRAFTS, 2], [1 + step % (1 + DRAFTS), 1 + step % 2])
        self.pool.validate()

    def _tensor(self, values, dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(self.device)

    def _note(self, op: str, given, expected) -> None:
        given, expected = (np.asarray(values, np.float64).reshape(len(given), -1) for values in (given, expected))
        norms = np.linalg.norm(expected, axis=1)
        error = np.linalg.norm(given - expected, axis=1) / np.where(norms > 0, norms, 1)
        self.errors[op] = max(self.errors.get(op, 0.0), float(error.max()))

    def _forward(self, name: str, op, counts, accepted, order=(0, 1)) -> None:
        """The new tokens of both sequences through conv_step and `op`, of which `accepted` are committed."""
        H, P, G, N = GEOMETRY.num_heads, GEOMETRY.head_dim, GEOMETRY.num_groups, GEOMETRY.state_dim
        rows = list(order)
        counts, accepted = [counts[row] for row in rows], [accepted[row] for row in rows]
        total = sum(counts)
        raw = self._tensor(self.random.standard_normal((total, GEOMETRY.conv_channels)), self.dtype)
        dt = self._tensor(self.random.standard_normal((total, H)), torch.float32)
        plan = self.pool.plan([self.slots[row] for row in rows], counts)
        made = ops.conv_step(self.pool, 0, plan, raw, *self.conv)
        x, B, C = made.split([H * P, G * N, G * N], -1)
        x, B, C = x.unflatten(-1, (H, P)), B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
        out = op(self.pool, 0, plan, x, B, C, dt, *self.weights)
        self.pool.commit(plan, None if plan.use == FOLDED else accepted)
        raw, dt, made, out, x, B, C = (values.double().cpu().numpy() for values in (raw, dt, made, out, x, B, C))
        first = 0
        for row, count, kept in zip(rows, counts, accepted, strict=True):
            mine = slice(first, first + count)
            self._note("conv_step", made[mine], self._convolved(row, raw[mine]))
            outputs, states = self._recurrence(row, x[mine], B[mine], C[mine], dt[mine])
            self._note(name, out[mine], outputs)
            self.raw[row] = np.concatenate([self.raw[row], raw[mine][:kept]])
            self.state[row] = states[kept]
            first += count

    def _convolved(self, row: int, raw: np.ndarray) -> np.ndarray:
        taps = GEOMETRY.conv_kernel
        before = np.concatenate([np.zeros((taps - 1, raw.shape[1])), self.raw[row]])[len(self.raw[row]) :]
        given = np.concatenate([before, raw])
        summed = sum(self.conv_weight[:, tap] * given[tap : tap + len(raw)] for tap in range(taps)) + self.conv_bias
        return summed / (1 + np.exp(-summed))

    def _recurrence(self, row: int, x, B, C, dt) -> tuple[np.ndarray, list[np.ndarray]]:
        """S = exp(A delta) S + delta x (outer) B, y = S C + D x, token by token; the states before and after each."""
        shared = GEOMETRY.num_heads // GEOMETRY.num_groups
        states, outputs = [self.state[row]], []
        for t in range(len(x)):
            delta = np.logaddexp(0, dt[t] + self.dt_bias)
            decay = np.exp(-np.exp(self.A_log) * delta)
            b, c = B[t].repeat(shared, 0), C[t].repeat(shared, 0)
            added = (delta[:, None] * x[t])[:, :, None] * b[:, None]
            states.append(decay[:, None, None] * states[-1] + added)
            outputs.append((states[-1] * c[:, None]).sum(-1) + self.D[:, None] * x[t])
        return np.array(outputs), states

    def _move(self) -> None:
        """materialize and restore against the recurrence; copy, save and load bit for bit."""
        state, tail = self.pool.materialize(0, self.slots)
        self._note("materialize", state.cpu().numpy(), self.state)
        tails = np.array([raw[-(GEOMETRY.conv_kernel - 1) :] for raw in self.raw])
        self._note("materialize", tail.cpu().numpy(), tails)
        self.pool.reset([0, 2])
        self.pool.restore(0, [0, 2], state, tail)
        again, _ = self.pool.materialize(0, [0, 2])
        self._note("restore", again.cpu().numpy(), self.state)
        whole = self.pool.data[0, self.slots].cpu()
        self.pool.copy(self.slots, [4, 0])
        self.errors["copy"] = float((self.pool.data[0, [4, 0]].cpu() != whole).sum())
        blob = self.pool.save(self.slots)
        self.pool.reset(self.slots)
        self.pool.data[0, self.slots] = 0xFF
        self.pool.load(self.slots, blob)
        self.errors["save, load"] = float((self.pool.data[0, self.slots].cpu() != whole).sum())

    def _plan_lengths(self) -> None:
        """The plans of two sequences that decode beside each other, by their lengths and by cursors."""
        pool = StatePool(GEOMETRY, self.replay, num_slots=2, num_layers=0, device=self.device)
        prompts, different = [5, 11], 0
        given = self._tensor(prompts, torch.int32)
        slots = self._tensor([1, 0], torch.int32)
        buffer = torch.empty(_core.plan_bytes(2), dtype=torch.uint8, device=self.device)
        error = torch.empty(8, dtype=torch.int32, device=self.device)
        pool.reset([1, 0], streams=[0, 0])
        for step in range(-1, 2 * WINDOW + 1):
            counts = prompts if step < 0 else [1, 1]
            plan = pool.plan(slots, counts)
            ends = self._tensor(np.cumsum(counts), torch.int32)
            call = (pool.spec, slots, given, given + step + 1, ends, step < 0, buffer)
            torch.ops.trtllm_replayssm.plan_lengths(error, *call)
            used = (16 + 2 * 16) * 4  # header and rows; what follows is the list of rows that flush
            different += int((buffer[:used] != plan.buffer[:used]).sum()) + int(error.abs().sum())
            plan.note_use(FOLDED if step < 0 else STEPPED, 0)
            pool.commit(plan)
        self.errors["plan_lengths"] = float(different)
