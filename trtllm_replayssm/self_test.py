# SPDX-License-Identifier: Apache-2.0
"""Each op on a device against a float64 recurrence: whether this build computes the right numbers on this machine.

Two sequences share the rows of a batch: a prompt, decode steps through several windows, verified drafts of which
some are rejected, then everything that moves a state. What the ops gave after the convolution is what the recurrence
goes on with, so that each op's error is its own.

`run` is for the doctor, every op in some formats; `require` for an engine that is loaded, what it will call.
"""

from __future__ import annotations

import math
from functools import cache, partial

import numpy as np
import torch

from . import MambaGeometry, ReplayConfig, StatePool, _core, ops
from .operators import ACTIVATIONS
from .plan import FOLDED, STEPPED

GEOMETRY = MambaGeometry(num_heads=8, head_dim=64, num_groups=2, state_dim=128, conv_kernel=4)
PROMPT, STEPS, DRAFTS, WINDOW = 37, 20, 3, 16
FORMATS = (  # activation, checkpoint, read copy
    ("fp32", "fp32", "none"),
    ("bf16", "fp32", "none"),
    ("fp16", "fp16_sr", "none"),
    ("bf16", "fp32", "nvfp4"),
)
# Relative L2 errors of a row that a right build stays below: of outputs, by their dtype, and by what the state is read
# from. About twice the largest of 2,625 trials of `serve`, from P = 8 to 128.
ROUNDED = {"fp32": 2e-6, "fp16": 1e-3, "bf16": 6e-3}
STORED = {
    "none": 0.0,
    "fp32": 0.0,
    "fp16": 1e-3,
    "fp16_sr": 1e-3,
    "bf16": 1e-2,
    "fp8": 0.06,
    "fp8_sr": 0.1,
    "e2m2": 0.1,
    "nvfp4": 0.25,
    "nvfp4_amax": 0.25,
}


class SelfTestError(RuntimeError):
    """An op gives wrong numbers on this machine, or none."""


def run(device: str) -> list[dict]:
    """Every op in FORMATS: {"op", "device", "activation", "checkpoint", "read_copy", "error", "limit", "good"}, the
    largest error of all calls. An exception is a result, too: "error" is null then, and "why" tells.
    """
    results = []
    for formats in FORMATS:
        labels = {"device": device, **dict(zip(("activation", "checkpoint", "read_copy"), formats, strict=True))}
        try:
            trial = _Trial(torch.device(device), GEOMETRY, _replay(*formats))
            trial.every_op()
        except Exception as error:  # a build that fails anywhere is told of, not raised
            why = f"{type(error).__name__}: {error}"
            results.append({"op": "all", **labels, "error": None, "limit": None, "good": False, "why": why})
            continue
        for op, error in trial.errors.items():
            limit, good = trial.limit(op), trial.good(op)
            results.append({"op": op, **labels, "error": error, "limit": limit, "good": good})
    return results


@cache  # once a process
def require(device: torch.device, geometry: MambaGeometry, replay: ReplayConfig, conventional: bool = False) -> None:
    """Runs what an engine will call, in its formats and sizes, on one group of heads: convolution, prefill, and decode
    steps, ReplaySSM's until windows have been full, with tokens from tensors and from the rings, or conventional ones.

    Raises:
        SelfTestError: an op's numbers are wrong, by name, with the error and what it may be; or one cannot run.
    """
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    heads = geometry.num_heads // geometry.num_groups
    sizes = MambaGeometry(heads, geometry.head_dim, 1, geometry.state_dim, geometry.conv_kernel)
    trial = _Trial(device, sizes, replay)
    try:
        trial.serve(conventional)
    except RuntimeError as error:
        raise SelfTestError(f"self-test on {where}: {error}") from error
    if bad := [op for op in trial.errors if not trial.good(op)]:
        told = ", ".join(
            f"{op} has a relative error of {trial.errors[op]:.1e} (limit {trial.limit(op):g})" for op in bad
        )
        raise SelfTestError(
            f"self-test on {where}: {told}; activations {replay.activation}, checkpoint {replay.checkpoint}, read copy "
            f"{replay.read_copy}, {sizes}: this build must not be used here, 'trtllm-replayssm doctor' tests every op"
        )


def _replay(activation: str, checkpoint: str, read_copy: str) -> ReplayConfig:
    return ReplayConfig(WINDOW, 1 + DRAFTS, checkpoint, read_copy, activation, seed=1)


def _flush_and_step(pool, layer, plan, x, B, C, dt, A_log, D, dt_bias) -> torch.Tensor:
    """As the two plugins do it, that are one op elsewhere."""
    operators, out = torch.ops.trtllm_replayssm, torch.zeros_like(x)
    call = (pool.table, pool.data, pool.spec, layer, plan.buffer, plan.rows)
    operators.flush(*call, A_log)
    operators.step(*call, x, B, C, dt, A_log, D, dt_bias, out, 0.0, math.inf, pool.config.max_step_tokens, True)
    plan.note_use(STEPPED, layer)
    return out


_EXACT = ("plan_lengths", "save, load", "copy")  # the same bits
_WITHOUT_STATE = ("conv_step", "prefill")  # that they would read


class _Trial:
    """Two sequences of random tokens. errors: op -> largest error."""

    def __init__(self, device: torch.device, geometry: MambaGeometry, replay: ReplayConfig):
        self.device, self.geometry, self.replay = device, geometry, replay
        self.dtype, self.errors = ACTIVATIONS[replay.activation], {}
        self.random = np.random.default_rng(0)
        H, channels, taps = geometry.num_heads, geometry.conv_channels, geometry.conv_kernel
        draw = self.random.standard_normal
        self.conv_weight, self.conv_bias = draw((channels, taps)) * 0.5, draw(channels) * 0.1
        self.A_log, self.D, self.dt_bias = self.random.uniform(0, 2.5, H), draw(H), draw(H) - 3
        self.weights = [self._tensor(values, torch.float32) for values in (self.A_log, self.D, self.dt_bias)]
        self.conv = [self._tensor(values, torch.float32) for values in (self.conv_weight, self.conv_bias)]

    def limit(self, op: str) -> float:
        if op in _EXACT:
            return 0.0
        rounded, states = ROUNDED[self.replay.activation], (self.replay.checkpoint, self.replay.read_copy)
        return rounded if op in _WITHOUT_STATE else max(rounded, *(STORED[name] for name in states))

    def good(self, op: str) -> bool:
        return math.isfinite(self.errors[op]) and self.errors[op] <= self.limit(op)

    def every_op(self) -> None:
        self._begin()
        self._forward("prefill", ops.prefill, [PROMPT, PROMPT - 5], [PROMPT, PROMPT - 5])
        for step in range(STEPS):
            self._forward("step", ops.step, [1, 1], [1, 1], order=[step % 2, 1 - step % 2])
        for step in range(STEPS):
            self._forward("step of records", ops.step, [1 + DRAFTS, 1], [1 + step % (1 + DRAFTS), 1], records=True)
        for _ in range(STEPS):
            self._forward("flush, then step", _flush_and_step, [1, 1], [1, 1])
        for step in range(STEPS // 2):
            self._forward("step, drafts", ops.step, [1 + DRAFTS, 2], [1 + step % (1 + DRAFTS), step % 3])
        self._forward("prefill, continued", ops.prefill, [9, 6], [9, 6])
        self._move()
        self._plan_lengths()
        self.pool.validate()
        if self.replay.read_copy == "none" and self.replay.checkpoint == "fp32":
            self._baselines()

    def serve(self, conventional: bool) -> None:
        """Few tokens: what is wrong is so everywhere, and engines are loaded often."""
        most = self.replay.max_step_tokens
        self._begin()
        self._forward("prefill", ops.prefill, [9, 5], [9, 5])
        if not conventional:  # each row brings 1 + most tokens in two cycles
            name, op, cycles = "step", ops.step, 2 * (self.replay.window + most) // (1 + most) + 2
        elif most == 1:
            name, op, cycles = "conventional_step", ops.conventional_step, 4
        else:
            snapshots = self.pool.allocate_snapshots()[0]
            name, op, cycles = "conventional_verify", partial(ops.conventional_verify, snapshots=snapshots), 4
        for cycle in range(cycles):
            counts = [most, 1] if cycle % 2 else [1, most]
            accepted, order = [1, 1] if cycle == 1 else counts, [cycle % 2, 1 - cycle % 2]
            if name == "step" and cycle // 2 % 2:
                self._forward("step of records", op, counts, accepted, order, records=True)
            else:
                self._forward(name, op, counts, accepted, order)
        if name != "conventional_verify":  # whose state is one of the snapshots
            state, _ = self.pool.materialize(0, self.slots)
            self._note("materialize", state.cpu().numpy(), self.state)
        self.pool.validate()

    def _begin(self) -> None:
        """A pool in which two sequences begin."""
        self.pool = StatePool(self.geometry, self.replay, num_slots=5, num_layers=1, device=self.device)
        self.pool.data.fill_(0xFF)  # what is there before a reset must not matter
        self.raw = [np.zeros((0, self.geometry.conv_channels)) for _ in range(2)]  # committed inputs, by sequence
        self.state = [
            np.zeros((self.geometry.num_heads, self.geometry.head_dim, self.geometry.state_dim)) for _ in range(2)
        ]
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

    def _note(self, op: str, given, expected, least=0.0) -> None:
        """least: of a row's norm, as which a smaller one counts."""
        given, expected = (np.asarray(values, np.float64).reshape(len(given), -1) for values in (given, expected))
        norms = np.maximum(np.linalg.norm(expected, axis=1), least)
        error = np.linalg.norm(given - expected, axis=1) / np.where(norms > 0, norms, 1)
        self.errors[op] = float(np.maximum(self.errors.get(op, 0.0), error.max()))  # NaN stays

    def _forward(self, name: str, op, counts, accepted, order=(0, 1), records=False) -> None:
        """The new tokens of both sequences through conv_step and `op`, of which `accepted` are committed. records: x
        and B pass between these by way of the rings.
        """
        H, P, G, N = self.geometry.num_heads, self.geometry.head_dim, self.geometry.num_groups, self.geometry.state_dim
        rows = list(order)
        counts, accepted = [counts[row] for row in rows], [accepted[row] for row in rows]
        total = sum(counts)
        raw = self._tensor(self.random.standard_normal((total, self.geometry.conv_channels)), self.dtype)
        dt = self._tensor(self.random.standard_normal((total, H)), torch.float32)
        plan = self.pool.plan([self.slots[row] for row in rows], counts)
        if records:
            C = ops.conv_step(self.pool, 0, plan, raw, *self.conv, records=True)
            stored = torch.cat([self._stored(row, count) for row, count in zip(rows, counts, strict=True)])
            made = torch.cat([stored, C.flatten(1)], -1)
        else:
            made = ops.conv_step(self.pool, 0, plan, raw, *self.conv)
        x, B, C = made.split([H * P, G * N, G * N], -1)
        x, B, C = x.unflatten(-1, (H, P)), B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
        out = op(self.pool, 0, plan, *((None, None) if records else (x, B)), C, dt, *self.weights)
        self.pool.commit(plan, None if plan.use == FOLDED else accepted)
        raw, dt, made, out, x, B, C = (values.double().cpu().numpy() for values in (raw, dt, made, out, x, B, C))
        first = 0
        for row, count, kept in zip(rows, counts, accepted, strict=True):
            mine = slice(first, first + count)
            self._note("conv_step", made[mine], self._convolved(row, raw[mine]))
            outputs, states = self._recurrence(row, x[mine], B[mine], C[mine], dt[mine])
            # What is read of a head's state is on average as much as along a random C, but may be nothing.
            read = np.linalg.norm(states[1:], axis=(2, 3)) * np.linalg.norm(C[mine], axis=2).repeat(H // G, 1)
            self._note(name, out[mine], outputs, np.linalg.norm(read, axis=1) / math.sqrt(N))
            self.raw[row] = np.concatenate([self.raw[row], raw[mine][:kept]])
            self.state[row] = states[kept]
            first += count

    def _stored(self, row: int, count: int) -> torch.Tensor:
        """x and B of the records behind the row's committed ones, [count, H*P + G*N]."""
        layout, slot = self.pool.layout, self.pool.data[0, self.slots[row]]
        places, parts = [(len(self.raw[row]) + token) % layout.ring_rows for token in range(count)], []
        for ring in (layout.sections["x_ring"], layout.sections["b_ring"]):
            records = slot[ring.offset : ring.offset + ring.bytes].view(self.dtype).view(ring.shape)
            parts.append(records[:, places].transpose(0, 1).flatten(1))
        return torch.cat(parts, -1)

    def _convolved(self, row: int, raw: np.ndarray) -> np.ndarray:
        taps = self.geometry.conv_kernel
        before = np.concatenate([np.zeros((taps - 1, raw.shape[1])), self.raw[row]])[len(self.raw[row]) :]
        given = np.concatenate([before, raw])
        summed = sum(self.conv_weight[:, tap] * given[tap : tap + len(raw)] for tap in range(taps)) + self.conv_bias
        return summed / (1 + np.exp(-summed))

    def _recurrence(self, row: int, x, B, C, dt) -> tuple[np.ndarray, list[np.ndarray]]:
        """S = exp(A delta) S + delta x (outer) B, y = S C + D x, token by token; the states before and after each."""
        shared = self.geometry.num_heads // self.geometry.num_groups
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
        tails = np.array([raw[-(self.geometry.conv_kernel - 1) :] for raw in self.raw])
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
        pool = StatePool(self.geometry, self.replay, num_slots=2, num_layers=0, device=self.device)
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
            used = (16 + 2 * 16 + 2) * 4  # header, rows and their order
            different += int((buffer[:used] != plan.buffer[:used]).sum()) + int(error.abs().sum())
            plan.note_use(FOLDED if step < 0 else STEPPED, 0)
            pool.commit(plan)
        self.errors["plan_lengths"] = float(different)
