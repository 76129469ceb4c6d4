# SPDX-License-Identifier: Apache-2.0
"""One Mamba-2 layer's decode or verification step: ReplaySSM beside the conventional kernels, ours and others'.

What is timed is one CUDA graph a decode step: plan, the step of every layer of a pool, commit; the figure is that time
divided by the number of layers. The convolution before a step is timed with it only if asked for. It cannot flatter:

- Flushes are in it. Rows stand at different phases of their windows, as in serving, and the device counts the flushes
  that happened: a run whose count is off the renewal value by more than 2 % is invalid.
- Verification (T > 1 tokens a row) accepts 1..T tokens, equally likely, another number for every row and step, drawn
  beforehand and picked on the device inside the graph. The baseline stores a snapshot of the state after every token.
- The L2 cache is cold: the pool has as many layers as it takes for a step to pass through four times the L2. It has
  eight if there is room for them, since a step has plan and commit once for all its layers: a model has more (Nano-4B
  21), so that a layer's share of them still is overrated.
- The new tokens' x and B come from memory, from the rings as from tensors, not from an L2 that a convolution has just
  filled. In the rings a step need not append them, which the convolution that put them there has done: the record says
  which it was, and with the convolution in the figure neither way leaves out a store.
- Bytes are counted by the pool and set against the bandwidths measured in the same process: those of what a slot keeps,
  by whom they are moved in the figure. What a step is given and gives (x, B and C of the new tokens, dt, y) is not in
  them.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from .. import MambaGeometry, Plan, ReplayConfig, SlotLayout, StatePool, ops
from .clock import bandwidths, repeatable, seconds, spread
from .peers import PEERS, Peer
from .records import InvalidRun
from .renewal import TOLERANCE, flushes_per_row_and_step, records_per_row_and_step, steps_to_count

GEOMETRIES = {
    "super": MambaGeometry(num_heads=128, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4),
    "nano4b": MambaGeometry(num_heads=96, head_dim=80, num_groups=8, state_dim=128, conv_kernel=4),
    "ultra": MambaGeometry(num_heads=256, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4),
}
MODES = ("replay", "conventional", "conventional_verify")
TOKENS_IN = ("rings", "tensors")
CONVENTIONAL_CHECKPOINTS = ("fp32", "bf16", "fp16")  # all that the conventional kernels take, without a read copy


def peer_of(mode: str) -> Peer | None:
    """Whose kernel the mode times; None: ours."""
    return PEERS[mode.removeprefix("peer:")] if mode.startswith("peer:") else None


def longest_step(mode: str) -> int | None:
    """How many tokens a step of the mode takes; None: as many as the window."""
    peer = peer_of(mode)
    return peer.longest_step if peer else 1 if mode == "conventional" else None


def checkpoints_of(mode: str) -> tuple[str, ...]:
    """Formats that a mode other than replay takes, all without a read copy."""
    peer = peer_of(mode)
    return peer.checkpoints if peer else CONVENTIONAL_CHECKPOINTS


def tokens_in_of(mode: str) -> tuple[str, ...]:
    """Where a step of the mode may find x and B of its new tokens: as records in the rings, where the convolution has
    put them, or in tensors, from which a step of mode replay appends them.
    """
    return TOKENS_IN if mode == "replay" else TOKENS_IN[1:]


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
    without, rows stay at their phases and every step reads only. tokens_in: one of `tokens_in_of`. with_conv: the
    convolution before each step is in the figure. ValueError: values that do not go together.
    """

    geometry: str
    batch: int
    tokens: int
    mode: str
    checkpoint: str = "fp32"
    read_copy: str = "none"
    window: int = 16
    flushes: bool = True
    tokens_in: str = "tensors"
    with_conv: bool = False

    def __post_init__(self):
        for name in ("batch", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        longest = longest_step(self.mode)
        if longest is not None and self.tokens > longest:
            raise ValueError(
                f"mode {self.mode} takes {longest} token{'s' * (longest > 1)}, got {self.tokens}; to reject drafts use "
                "conventional_verify"
            )
        if self.with_conv and self.peer:
            raise ValueError(f"mode {self.mode} is timed without a convolution; --with-conv goes with our modes")
        if self.tokens_in not in tokens_in_of(self.mode):
            known = " or ".join(tokens_in_of(self.mode))
            raise ValueError(f"mode {self.mode} finds its tokens in {known}, got {self.tokens_in!r}")
        if self.mode != "replay":
            if not self.flushes:
                raise ValueError(f"mode {self.mode} never flushes; --no-flush goes with mode replay")
            if self.read_copy != "none" or self.checkpoint not in checkpoints_of(self.mode):
                raise ValueError(
                    f"mode {self.mode} takes {', '.join(checkpoints_of(self.mode))} checkpoints without a read copy, "
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
        self.inputs = [self._inputs(seed) for seed in range(self.num_layers)]
        tokens, sizes = case.batch * case.tokens, case.sizes
        self.out = torch.empty((tokens, sizes.num_heads, sizes.head_dim), dtype=torch.bfloat16, device=device)
        # What the convolution gives passes from layer to layer, as in a model.
        self.convolved = self.out.new_empty((tokens, sizes.conv_channels))
        self.C = self.out.new_empty((tokens, sizes.num_groups, sizes.state_dim))
        if case.tokens_in == "rings":
            self._fill_rings()
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

    def _inputs(self, seed: int) -> dict[str, torch.Tensor]:
        """Those of `layer_inputs`; if the convolution is timed, instead of x, B and C what it takes: "raw" [tokens,
        conv_channels], "conv_weight" and "conv_bias".
        """
        inputs = layer_inputs(self.case.sizes, self.case.batch * self.case.tokens, seed, self.device)
        if self.case.with_conv:
            inputs["raw"] = torch.cat([inputs.pop(name).flatten(1) for name in ("x", "B", "C")], 1)
            generator, sizes = torch.Generator(self.device).manual_seed(seed), self.case.sizes
            shape = (sizes.conv_channels, sizes.conv_kernel + 1)
            drawn = torch.randn(shape, generator=generator, device=self.device).to(torch.bfloat16) / 2
            inputs["conv_weight"], inputs["conv_bias"] = drawn[:, :-1].contiguous(), drawn[:, -1].contiguous()
        return inputs

    def _fill_rings(self) -> None:
        """Random x and B in every ring row of every slot: the records of whatever tokens a step will bring."""
        generator = torch.Generator(self.device).manual_seed(0)
        for section in map(self.pool.layout.sections.get, ("x_ring", "b_ring")):
            for slots in self.pool.data[..., section.offset : section.offset + section.bytes]:
                slots.view(torch.bfloat16).normal_(generator=generator)

    def _begin(self) -> None:
        """A prompt of a token: a state that was never written would not be read."""
        plan = self.pool.plan(self.slots, 1)
        for layer in range(self.num_layers):
            self._run(ops.prefill, layer, plan, self.case.batch, "tensors")
        self.pool.commit(plan)

    def _run(self, op: Callable, layer: int, plan: Plan, count: int, tokens_in: str, **more) -> None:
        """`op` of a layer on the first `count` of its tokens, behind the convolution if that is timed."""
        inputs = self.inputs[layer]
        x, B, C = self._tokens(layer, plan, count, tokens_in == "rings")
        weights = (inputs[name] for name in ("A_log", "D", "dt_bias"))
        op(self.pool, layer, plan, x, B, C, inputs["dt"][:count], *weights, out=self.out[:count], **more)

    def _tokens(self, layer: int, plan: Plan, count: int, records: bool) -> tuple[torch.Tensor | None, ...]:
        """x, B and C for an op of a layer; None for x and B that are `records` in the rings."""
        inputs, sizes = self.inputs[layer], self.case.sizes
        if not self.case.with_conv:
            if not records:
                return tuple(inputs[name][:count] for name in ("x", "B", "C"))
            plan.recorded.add(layer)  # _fill_rings has stored them
            return None, None, inputs["C"][:count]
        conv = (self.pool, layer, plan, inputs["raw"][:count], inputs["conv_weight"], inputs["conv_bias"])
        if records:
            return None, None, ops.conv_step(*conv, self.C[:count], records=True)
        widths = (sizes.num_heads * sizes.head_dim, *[sizes.num_groups * sizes.state_dim] * 2)
        x, B, C = ops.conv_step(*conv, self.convolved[:count]).split(widths, -1)
        return x.unflatten(-1, self.out.shape[1:]), *(t.unflatten(-1, self.C.shape[1:]) for t in (B, C))

    def _next(self) -> None:
        """A step of all rows that accepts the next row of `draws`."""
        if self.case.tokens > 1 or not self.case.flushes:
            torch.index_select(self.draws, 0, self.turn, out=self.accepted[None])
            self.turn.add_(1)
        self._step(self.slots)

    def _step(self, slots: torch.Tensor) -> None:
        plan = self.pool.plan(slots, self.case.tokens)
        op = {"replay": ops.step, "conventional": ops.conventional_step}.get(self.case.mode, ops.conventional_verify)
        for layer in range(self.num_layers):
            more = {} if self.snapshots is None else {"snapshots": self.snapshots[layer]}
            self._run(op, layer, plan, self.case.batch * self.case.tokens, self.case.tokens_in, **more)
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
        layout, rows = self.pool.layout, self.case.batch
        if self.case.with_conv:  # of each row all its raw inputs are kept, of which the next step reads the last K-1
            raw = layout.sections["conv_ring"].bytes // layout.conv_rows
            moved["read"] += rows * (self.case.sizes.conv_kernel - 1) * raw
            moved["written"] += rows * self.case.tokens * raw
        elif self.case.tokens_in == "rings":  # of a record the step stores delta
            stored = layout.sections["x_ring"].bytes + layout.sections["b_ring"].bytes
            moved["written"] -= counted["record_writes"] * (stored // layout.ring_rows)
        return {
            **spread(times),
            "layers": self.num_layers,
            "accepted_per_row_and_step": round(counted["tokens"] / self.case.batch, 4),
            "flushes_per_step": round(counted["flushes"], 4),
            "bytes_read_per_step": round(moved["read"]),
            "bytes_written_per_step": round(moved["written"]),
        }


WARM_UP = 3  # steps before a setting is timed
FINALISTS = 3  # settings that a few steps found fastest, timed at length


class PeerLoop:
    """Another library's step over as many layers, tuned over its launch settings."""

    def __init__(self, case: Case, num_steps: int, device: torch.device):
        self.case, self.device, self.peer = case, device, case.peer
        layout = SlotLayout(case.sizes, case.config)
        self.state_bytes = case.batch * layout.sections["checkpoint"].bytes
        self.record_bytes = case.batch * layout.record_bytes
        try:
            self._check(self.peer.tuned_over(case)[0])
        except (InvalidRun, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a library that lacks the case may fail in any way
            raise self._failure(error) from error
        states = 1 if self.peer.longest_window else case.tokens
        self.num_layers = layers_of_pool(self.state_bytes * states, device)
        self.memories = [self.peer.memory(case, device) for _ in range(self.num_layers)]
        self.inputs = [self._inputs(seed) for seed in range(self.num_layers)]
        self._lay_out_cursors(num_steps)

    def measure(self, steps: int, repeats: int) -> dict:
        """Figures of a record at the fastest of the peer's settings."""
        check_flushes(self.flushes, self.case.expected_flushes)
        gc.freeze()  # a capture collects garbage first: not over all that other libraries have loaded
        try:
            times, setting, refused = self._fastest(steps, repeats)
        finally:
            gc.unfreeze()
        self._check(setting)
        return {
            **spread(times),
            "layers": self.num_layers,
            "setting": setting,
            "settings_refused": refused,
            "peer_version": self.peer.version(),
            "accepted_per_row_and_step": self.accepted,
            "flushes_per_step": self.flushes,
            **self._bytes(),
        }

    def _failure(self, error: Exception) -> InvalidRun:
        return InvalidRun(f"{self.case.mode} failed, {type(error).__name__}: {error}".splitlines()[0])

    def _fastest(self, steps: int, repeats: int) -> tuple[list[float], dict, int]:
        """Times at the fastest setting, that setting, and how many the library refused, which are left out."""
        settings, tried, error = self.peer.tuned_over(self.case), [], None
        for n, setting in enumerate(settings):
            try:
                tried.append((self._tuning_time(setting), n, setting))
            except torch.OutOfMemoryError:
                raise
            except Exception as refusal:  # too much shared memory, a tactic that was not built: it may fail in any way
                error = refusal
        if not tried:
            raise self._failure(error) from error
        timed = [(self._times(setting, steps, repeats), setting) for _, _, setting in sorted(tried)[:FINALISTS]]
        times, setting = min(timed, key=lambda pair: statistics.median(pair[0]))
        return times, setting, len(settings) - len(tried)

    def _bytes(self) -> dict:
        """Of ReplaySSM what ours moves, of verification without it a state for each token."""
        case = self.case
        read, written = self.state_bytes, self.state_bytes * case.tokens
        if case.replays:
            read += self.record_bytes * records_per_row_and_step(case.window, case.tokens)
            written = self.state_bytes * case.expected_flushes / case.batch + self.record_bytes * case.tokens
        return {"bytes_read_per_step": round(read), "bytes_written_per_step": round(written)}

    def _inputs(self, seed: int) -> dict[str, torch.Tensor]:
        inputs = layer_inputs(self.case.sizes, self.case.batch * self.case.tokens, seed, self.device)
        inputs["A"] = -torch.exp(inputs.pop("A_log"))
        return self.peer.prepare(inputs)

    def _lay_out_cursors(self, num_steps: int) -> None:
        """The cursors of so many steps of rows at staggered phases, which accept 1..T tokens: a step copies a row of
        bytes to where the peer's kernels look for them.
        """
        case, generator = self.case, torch.Generator().manual_seed(self.case.batch)
        cursors = self.peer.cursors(case, torch.arange(case.batch, dtype=torch.int32) % case.window)
        rows, flushes, tokens = [], 0, 0
        for step in range(-2 * case.window, max(num_steps, case.window, 8) + 1):
            accepted = torch.randint(1, case.tokens + 1, (case.batch,), dtype=torch.int32, generator=generator)
            if step >= 0 and cursors:
                rows.append(torch.cat([_padded(cursor) for cursor in cursors.values()]))
            if 0 <= step < num_steps:
                flushes += int(self.peer.flushing(case, cursors).sum()) if case.replays else 0
                tokens += int(accepted.sum())
            cursors = self.peer.advance(case, cursors, accepted)
        self.flushes, self.accepted = round(flushes / num_steps, 4), round(tokens / num_steps / case.batch, 4)
        self.turn = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.cursors = {}
        if cursors:
            self.rows = torch.stack(rows).to(self.device)
            self.row = self.rows[:1].clone()
            begin = 0
            for name, cursor in cursors.items():
                self.cursors[name] = self.row[0, begin : begin + cursor.nbytes].view(cursor.dtype)
                begin += _padded(cursor).numel()

    def _step(self, setting: dict) -> None:
        if self.cursors:
            torch.index_select(self.rows, 0, self.turn, out=self.row)
            self.turn.add_(1)
        for memory, inputs in zip(self.memories, self.inputs, strict=True):
            self.peer.update(self.case, memory | self.cursors, inputs, setting)

    def _tuning_time(self, setting: dict) -> float:
        """A layer's microseconds in a few steps, of which some flush."""
        return self._times(setting, self.case.window if self.case.batch < self.case.window else 8, 1)[0]

    def _times(self, setting: dict, steps: int, repeats: int) -> list[float]:
        """Microseconds a layer and step, `repeats` times."""
        step, times = repeatable(lambda: self._step(setting), self.device), []
        for count in (WARM_UP, *[steps] * repeats):
            self.turn.zero_()
            times.append(seconds(step, count, self.device) * 1e6 / self.num_layers)
        return times[1:]

    def _check(self, setting: dict) -> None:
        """InvalidRun unless the outputs of steps from a state of zeros are the recurrence's. Of ReplaySSM some steps
        come after a flush; drafts are rejected. Of a large batch some rows are compared.
        """
        case, geometry, inputs = self.case, self.case.sizes, self._inputs(0)
        memory = self.peer.memory(case, self.device)
        cursors = self.peer.cursors(case, torch.zeros(case.batch, dtype=torch.int32, device=self.device))
        rows = torch.linspace(0, case.batch - 1, min(case.batch, 16), device=self.device).long()
        given = {
            name: inputs[name].float().unflatten(0, (case.batch, case.tokens))[rows] for name in ("x", "B", "C", "dt")
        }
        given |= {
            name: given[name].repeat_interleave(geometry.num_heads // geometry.num_groups, 2) for name in ("B", "C")
        }
        delta = torch.nn.functional.softplus(given["dt"] + inputs["dt_bias"].float())
        decay = torch.exp(inputs["A"] * delta)
        state = torch.zeros(len(rows), geometry.num_heads, geometry.head_dim, geometry.state_dim, device=self.device)
        worst = 0.0
        for step in range(case.window + 2 if case.replays else 3):
            accepted = (torch.arange(case.batch, dtype=torch.int32, device=self.device) + step) % case.tokens + 1
            out = self.peer.update(case, memory | cursors, inputs, setting).float()
            cursors = self.peer.advance(case, cursors, accepted)
            expected, newest = torch.empty_like(given["x"]), state
            for token in range(case.tokens):
                x, B, C, d, a = (t[:, token, :] for t in (given["x"], given["B"], given["C"], delta, decay))
                newest = a[..., None, None] * newest + (d[..., None] * x)[..., None] * B[..., None, :]
                expected[:, token] = (newest * C[..., None, :]).sum(-1) + inputs["D"].float()[:, None] * x
                state = torch.where((accepted[rows] == token + 1)[:, None, None, None], newest, state)
            out = out.unflatten(0, (case.batch, case.tokens))[rows]
            worst = max(worst, float((out - expected).norm() / expected.norm()))
        if not worst < 1e-2:
            raise InvalidRun(f"{case.mode} {setting}: its outputs are off the recurrence by {worst:.3g}")


def _padded(cursor: torch.Tensor) -> torch.Tensor:
    """Its bytes, and zeros up to a multiple of 16."""
    data = cursor.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(data, (0, -data.numel() % 16))


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
            figures = PeerLoop(case, steps, self.device).measure(steps, self.repeats)
        else:
            figures = DecodeLoop(case, steps * self.repeats, self.device).measure(steps, self.repeats)
        rate = (figures["bytes_read_per_step"] + figures["bytes_written_per_step"]) / (figures["us"] * 1e-6)
        fractions = {f"fraction_of_{name}": round(rate / value, 3) for name, value in self.bandwidths.items()}
        return figures | {"expected_flushes_per_step": round(case.expected_flushes, 4)} | fractions | self.bandwidths
