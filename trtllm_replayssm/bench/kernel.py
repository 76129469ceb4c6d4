# SPDX-License-Identifier: Apache-2.0
"""One Mamba-2 layer's decode or verification step: ReplaySSM beside the conventional kernels, ours and others'.

What is timed is one CUDA graph a decode step: plan, the step of every layer of a pool, commit; the figure is that time
divided by the number of layers. It cannot flatter:

- Flushes are in it. Rows stand at different phases of their windows, as in serving, and the device counts the flushes
  that happened: a run whose count is off the renewal value by more than 2 % is invalid.
- Verification (T > 1 tokens a row) accepts 1..T tokens, equally likely, another number for every row and step, drawn
  beforehand and picked on the device inside the graph. The baseline stores a snapshot of the state after every token.
- The L2 cache is cold: the pool has as many layers as it takes for a step to pass through four times the L2. It has
  eight if there is room for them, since a step has plan and commit once for all its layers: a model has more (Nano-4B
  21), so that a layer's share of them still is overrated.
- Bytes are counted by the pool and set against the bandwidths measured in the same process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from .. import MambaGeometry, ReplayConfig, SlotLayout, StatePool, ops
from ..operators import ACTIVATIONS
from .clock import bandwidths, repeatable, seconds, spread
from .peers import PEERS, Peer
from .records import InvalidRun
from .renewal import TOLERANCE, flushes_per_row_and_step, steps_to_count

GEOMETRIES = {
    "super": MambaGeometry(num_heads=128, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4),
    "nano4b": MambaGeometry(num_heads=96, head_dim=80, num_groups=8, state_dim=128, conv_kernel=4),
    "ultra": MambaGeometry(num_heads=256, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4),
}
MODES = ("replay", "conventional", "conventional_verify")
CONVENTIONAL_CHECKPOINTS = ("fp32", "bf16", "fp16")  # all that the conventional kernels take, without a read copy


def peer_of(mode: str) -> Peer | None:
    """Whose kernel the mode times; None: ours."""
    return PEERS[mode.removeprefix("peer:")] if mode.startswith("peer:") else None


def takes_one_token(mode: str) -> bool:
    return mode == "conventional" or mode.startswith("peer:")


def parse_geometry(text: str) -> MambaGeometry:
    """A geometry by name, or by numbers: heads x head_dim x groups x state_dim, as in 16x64x1x128."""
    if text in GEOMETRIES:
        return GEOMETRIES[text]
    numbers = text.split("x")
    if len(numbers) != 4 or not all(number.isdigit() for number in numbers):
        raise ValueError(
            f"geometry is {text!r}, expected {', '.join(GEOMETRIES)}, or HEADSxHEAD_DIMxGROUPSxSTATE_DIM as in "
            "16x64x1x128"
        )
    return MambaGeometry(*map(int, numbers))


@dataclass(frozen=True)
class Case:
    """What decides a figure. mode: one of MODES, or "peer:NAME". flushes: whether steps commit, and hence flush;
    without, rows stay at their phases and every step reads only. ValueError: values that do not go together.
    """

    geometry: str
    batch: int
    tokens: int
    mode: str
    checkpoint: str = "fp32"
    read_copy: str = "none"
    window: int = 16
    flushes: bool = True

    def __post_init__(self):
        for name in ("batch", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if takes_one_token(self.mode) and self.tokens > 1:
            raise ValueError(
                f"mode {self.mode} takes 1 token, got {self.tokens}: it can't reject drafts; use conventional_verify"
            )
        if self.mode != "replay":
            if not self.flushes:
                raise ValueError(f"mode {self.mode} never flushes; --no-flush goes with mode replay")
            if self.read_copy != "none" or self.checkpoint not in CONVENTIONAL_CHECKPOINTS:
                raise ValueError(
                    f"mode {self.mode} takes {', '.join(CONVENTIONAL_CHECKPOINTS)} checkpoints without a read copy, "
                    f"got {self.checkpoint}:{self.read_copy}"
                )
            if self.replays and self.window > self.peer.longest_window:
                raise ValueError(f"mode {self.mode} takes windows up to {self.peer.longest_window}, got {self.window}")

    @property
    def sizes(self) -> MambaGeometry:
        return parse_geometry(self.geometry)

    @property
    def config(self) -> ReplayConfig:
        return ReplayConfig(self.window, self.tokens, self.checkpoint, self.read_copy, "bf16")

    @property
    def peer(self) -> Peer | None:
        return peer_of(self.mode)

    @property
    def replays(self) -> bool:
        return self.mode == "replay" or (self.peer is not None and self.peer.longest_window > 0)

    @property
    def expected_flushes(self) -> float:
        """Flushes a step by the renewal equation."""
        if not self.replays or not self.flushes:
            return 0.0
        return self.batch * flushes_per_row_and_step(self.window, self.tokens)

    def steps(self, least: int) -> int:
        """At least `least` steps, enough that the count of flushes tells; of one token whole windows, which count
        exactly.
        """
        if self.tokens > 1 and self.expected_flushes:
            return max(least, steps_to_count(self.window, self.tokens, self.batch))
        return -(-least // self.window) * self.window


PLANNED_LAYERS = 8


def layers_of_pool(layer_bytes: int, device: torch.device) -> int:
    """As many layers of so many bytes as are four times the L2 cache and PLANNED_LAYERS at least, of which half the
    memory must have room (else at least two).
    """
    if device.type != "cuda":
        return 2
    properties = torch.cuda.get_device_properties(device)
    cold = -(-4 * properties.L2_cache_size // layer_bytes)
    return max(2, cold, min(PLANNED_LAYERS, properties.total_memory // 2 // layer_bytes))


def layer_inputs(geometry: MambaGeometry, tokens: int, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random inputs of one layer: x [tokens,H,P], B and C [tokens,G,N], dt [tokens,H] in bf16; A_log, D, dt_bias [H] in
    fp32.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    heads = geometry.num_heads
    return {
        "x": normal(tokens, heads, geometry.head_dim),
        "B": normal(tokens, geometry.num_groups, geometry.state_dim),
        "C": normal(tokens, geometry.num_groups, geometry.state_dim),
        "dt": normal(tokens, heads),
        "A_log": torch.log(1 + 15 * torch.rand(heads, generator=generator, device=device)),
        "D": normal(heads, dtype=torch.float32),
        "dt_bias": normal(heads, dtype=torch.float32) - 4,
    }


class DecodeLoop:
    """A pool whose rows stand at staggered window phases, and a step as one graph.

    num_steps: how many will be timed: as many rows of accepted counts are drawn.
    """

    def __init__(self, case: Case, num_steps: int, device: torch.device):
        self.case, self.device, config = case, device, case.config
        slot_bytes = SlotLayout(case.sizes, config).slot_stride
        snapshots = case.tokens if case.mode == "conventional_verify" else 0
        self.num_layers = layers_of_pool(case.batch * slot_bytes * (1 + snapshots), device)
        self.pool = StatePool(case.sizes, config, num_slots=case.batch, num_layers=self.num_layers, device=device)
        self.snapshots = self.pool.allocate_snapshots() if case.mode == "conventional_verify" else None
        self.inputs = [
            layer_inputs(case.sizes, case.batch * case.tokens, seed, device) for seed in range(self.num_layers)
        ]
        self.out = torch.empty_like(self.inputs[0]["x"])
        self.slots = torch.arange(case.batch, dtype=torch.int32, device=device)
        self.accepted = torch.ones_like(self.slots)
        self._begin()
        # Row r advances by r mod `phases` tokens. Rows that never commit stay where the next step does not flush yet.
        phases = case.window if case.flushes else case.window - case.tokens + 1
        for phase in range(1, phases):
            self._step(torch.where(self.slots % phases >= phase, self.slots, -1))
        warm_up = 2 * case.window
        generator = torch.Generator(device).manual_seed(case.batch)
        shape = (2 + warm_up + num_steps, case.batch)
        self.draws = torch.randint(1, case.tokens + 1, shape, dtype=torch.int32, device=device, generator=generator)
        if not case.flushes:
            self.draws.zero_()
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.step = repeatable(self._next, device)
        for _ in range(warm_up):
            self.step()
        self.pool.validate()

    def _begin(self) -> None:
        """A prompt of a token: a state that was never written would not be read."""
        plan = self.pool.plan(self.slots, 1)
        for layer, inputs in enumerate(self.inputs):
            given = {name: t[: self.case.batch] if t.dim() > 1 else t for name, t in inputs.items()}
            ops.prefill(self.pool, layer, plan, **given)
        self.pool.commit(plan)

    def _next(self) -> None:
        """A step of all rows that accepts the next row of `draws`."""
        if self.case.tokens > 1 or not self.case.flushes:
            torch.index_select(self.draws, 0, self.turn, out=self.accepted[None])
            self.turn.add_(1)
        self._step(self.slots)

    def _step(self, slots: torch.Tensor) -> None:
        plan = self.pool.plan(slots, self.case.tokens)
        for layer, inputs in enumerate(self.inputs):
            arguments = {"pool": self.pool, "layer": layer, "plan": plan, **inputs, "out": self.out}
            if self.case.mode == "replay":
                ops.step(**arguments)
            elif self.case.mode == "conventional":
                ops.conventional_step(**arguments)
            else:
                ops.conventional_verify(**arguments, snapshots=self.snapshots[layer])
        self.pool.commit(plan, self.accepted)

    def measure(self, steps: int, repeats: int) -> dict:
        """Figures of a record: microseconds a layer, flushes a step of all rows, bytes a layer and step."""
        before = self.pool.stats()
        times = [seconds(self.step, steps, self.device) * 1e6 / self.num_layers for _ in range(repeats)]
        after = self.pool.stats()
        self.pool.validate()
        counted = {name: (after[name] - before[name]) / (steps * repeats) for name in after}
        check_flushes(counted["flushes"], self.case.expected_flushes)
        moved = {
            kind: sum(counted[f"{what}_bytes_{kind}"] for what in ("state", "record")) / self.num_layers
            for kind in ("read", "written")
        }
        return {
            **spread(times),
            "layers": self.num_layers,
            "accepted_per_row_and_step": round(counted["tokens"] / self.case.batch, 4),
            "flushes_per_step": round(counted["flushes"], 4),
            "bytes_read_per_step": round(moved["read"]),
            "bytes_written_per_step": round(moved["written"]),
        }


class PeerLoop:
    """Another library's step over as many layers, tuned over its launch settings."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device, self.peer = case, device, case.peer
        layout = SlotLayout(case.sizes, case.config)
        self.state_bytes = case.batch * layout.sections["checkpoint"].bytes
        self.record_bytes = case.batch * layout.record_bytes if self.peer.longest_window else 0
        self.num_layers = layers_of_pool(self.state_bytes, device)
        self.memories = [
            self.peer.memory(case.batch, case.sizes, case.window, ACTIVATIONS[case.checkpoint], device)
            for _ in range(self.num_layers)
        ]
        self.inputs = [layer_inputs(case.sizes, case.batch, seed, device) for seed in range(self.num_layers)]
        for layer, inputs in enumerate(self.inputs):
            inputs["A"] = -torch.exp(inputs.pop("A_log"))
            self.inputs[layer] = self.peer.prepare(inputs)
        self._check()
        rows = torch.arange(case.batch, dtype=torch.int32, device=device)
        self.cursors = self.peer.cursors(rows % case.window, case.window)

    def measure(self, steps: int, repeats: int) -> dict:
        """Figures of a record at the fastest of the peer's settings."""
        flushes = self._count_flushes()
        check_flushes(flushes, self.case.expected_flushes)
        best = None
        for setting in self.peer.settings:
            step = repeatable(lambda chosen=setting: self._step(chosen), self.device)
            seconds(step, 3, self.device)
            took = seconds(step, max(steps // 4, 1), self.device)
            if best is None or took < best[0]:
                best = took, setting, step
        _, setting, step = best
        times = [seconds(step, steps, self.device) * 1e6 / self.num_layers for _ in range(repeats)]
        window, replays = self.case.window, self.peer.longest_window > 0
        return {
            **spread(times),
            "layers": self.num_layers,
            "setting": setting,
            "peer_version": self.peer.version(),
            "accepted_per_row_and_step": 1.0,
            "flushes_per_step": flushes,
            # Of ReplaySSM what ours moves: a row has 1 to `window` records before its next flush.
            "bytes_read_per_step": self.state_bytes + self.record_bytes * (window + 1) // 2,
            "bytes_written_per_step": self.state_bytes // (window if replays else 1) + self.record_bytes,
        }

    def _step(self, setting: dict) -> None:
        for memory, inputs in zip(self.memories, self.inputs, strict=True):
            self.peer.update(memory | self.cursors, **inputs, setting=setting)
        self.peer.advance(self.cursors, self.case.window)

    def _count_flushes(self) -> float:
        """Flushes a step, of a window's steps after each row's first flush."""
        if not self.peer.longest_window:
            return 0.0
        counted = 0
        for token in range(2 * self.case.window):
            if token >= self.case.window:
                counted += int(self.peer.flushing(self.cursors, self.case.window).sum())
            self._step(self.peer.settings[0])
        return counted / self.case.window

    def _check(self) -> None:
        """InvalidRun unless outputs from a state of zeros are the recurrence's, here of the same token again and again:
        the last of n + 1 is y = ((1 + a + … + a^n) delta (B·C) + D) x, a = exp(A delta). Of ReplaySSM it is the second
        after a flush.
        """
        given, memory = self.inputs[0], self.memories[0]
        tokens = self.case.window + 2 if self.peer.longest_window else 2
        cursors = self.peer.cursors(
            torch.zeros(self.case.batch, dtype=torch.int32, device=self.device), self.case.window
        )
        for _ in range(tokens):
            out = self.peer.update(memory | cursors, **given, setting=self.peer.settings[0])
            self.peer.advance(cursors, self.case.window)
        delta = torch.nn.functional.softplus(given["dt"].float() + given["dt_bias"].float())
        decay = torch.exp(given["A"] * delta)
        delta = delta * sum(decay**n for n in range(tokens))
        sharing = self.case.sizes.num_heads // self.case.sizes.num_groups
        similarity = (given["B"].float() * given["C"].float()).sum(-1).repeat_interleave(sharing, 1)
        expected = (delta * similarity + given["D"].float())[..., None] * given["x"].float()
        error = float((out.float() - expected).norm() / expected.norm())
        for tensor in memory.values():
            tensor.zero_()
        if not error < 1e-2:
            raise InvalidRun(f"{self.case.mode}: its outputs are off the recurrence by {error:.3g}")


def check_flushes(counted: float, expected: float) -> None:
    """InvalidRun unless flushes a step are what the renewal equation gives, within 2 %."""
    if abs(counted - expected) > TOLERANCE * expected:
        raise InvalidRun(
            f"{counted:.4f} flushes a step were counted, the renewal value is {expected:.4f}: off by more than 2 %"
        )


class KernelBench:
    """Measures cases on a device, with the device's bandwidths measured first."""

    def __init__(self, device: torch.device, steps: int, repeats: int):
        self.device, self.steps, self.repeats = device, steps, repeats
        self.bandwidths = bandwidths(device)

    def identity(self, case: Case) -> dict:
        """The fields of a record that tell a case."""
        return {"bench": "kernel", **asdict(case), "steps": case.steps(self.steps), "repeats": self.repeats}

    def measure(self, case: Case) -> dict:
        """The other fields."""
        steps = case.steps(self.steps)
        if case.peer:
            figures = PeerLoop(case, self.device).measure(steps, self.repeats)
        else:
            figures = DecodeLoop(case, steps * self.repeats, self.device).measure(steps, self.repeats)
        rate = (figures["bytes_read_per_step"] + figures["bytes_written_per_step"]) / (figures["us"] * 1e-6)
        fractions = {f"fraction_of_{name}": round(rate / value, 3) for name, value in self.bandwidths.items()}
        return figures | {"expected_flushes_per_step": round(case.expected_flushes, 4)} | fractions | self.bandwidths
