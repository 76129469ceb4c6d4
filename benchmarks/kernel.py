# SPDX-License-Identifier: Apache-2.0
"""Times one Mamba-2 layer's decode or verification step: ReplaySSM against the conventional kernels.

What is timed is one CUDA graph a decode step: plan, the step of every layer of the pool, commit; the figure is that
time divided by the number of layers. The measurement is set up so that it cannot flatter:

- Flushes are in it. Rows stand at different phases of their windows, as in serving, and the device counts the flushes
  that happened: a run whose count is off the renewal value (one token a step: one flush a window and row) stops with
  an error.
- Verification (--tokens T > 1) accepts 1..T tokens, equally likely, another number for every row and step, drawn
  beforehand and picked on the device inside the graph. The baseline stores a snapshot of the state after every token.
- The L2 cache is cold. The pool has as many layers as it takes for a step to pass through four times the L2.
- Bytes are counted by the pool and set against the read bandwidth measured in the same process (a sum over 4 GiB).

    python benchmarks/kernel.py --geometry super --batches 1 32 256 --output results.json
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shlex
import statistics
import sys

import torch

from trtllm_replayssm import MambaGeometry, ReplayConfig, SlotLayout, StatePool, ops

GEOMETRIES = {
    "super": MambaGeometry(num_heads=128, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4),
    "nano4b": MambaGeometry(num_heads=96, head_dim=80, num_groups=8, state_dim=128, conv_kernel=4),
    "ultra": MambaGeometry(num_heads=256, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4),
}
MODES = ("replay", "conventional", "conventional_verify")
ACTIVATION = torch.bfloat16


def layers_for_cold_cache(layout: SlotLayout, batch: int) -> int:
    """Fewest layers (at least two) whose slots together are four times the L2 cache."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, -(-4 * l2_bytes // (batch * layout.slot_stride)))


def layer_inputs(geometry: MambaGeometry, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Random inputs of one layer: x [tokens,H,P], B and C [tokens,G,N], dt [tokens,H] in bf16; A_log, D, dt_bias [H] in
    fp32.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = ACTIVATION) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    heads = geometry.num_heads
    return {
        "x": normal(tokens, heads, geometry.head_dim),
        "B": normal(tokens, geometry.num_groups, geometry.state_dim),
        "C": normal(tokens, geometry.num_groups, geometry.state_dim),
        "dt": normal(tokens, heads),
        "A_log": torch.log(1 + 15 * torch.rand(heads, generator=generator, device="cuda")),
        "D": normal(heads, dtype=torch.float32),
        "dt_bias": normal(heads, dtype=torch.float32) - 4,
    }


def flushes_per_row_and_step(window: int, tokens: int) -> float:
    """The renewal value: a row that accepts 1..tokens, equally likely, flushes when history + tokens > window.

    A flush leaves no history, so flushes are renewals, and their rate is 1 over the mean number of steps between two:
    m(0), where m(h) = 1 + E[m(h + accepted)] up to h = window - tokens and 0 beyond. (By Wald's identity m(0) is
    E[history at a flush] / E[accepted], the form of docs/algorithm.md, section 6.)
    """
    mean_steps = [0.0] * (window + 1)
    for history in range(window - tokens, -1, -1):
        mean_steps[history] = 1 + sum(mean_steps[history + accepted] for accepted in range(1, tokens + 1)) / tokens
    return 1 / mean_steps[0]


class DecodeLoop:
    """A pool whose rows stand at staggered window phases, and one captured graph a step.

    `num_steps` is how many steps will be timed: as many rows of accepted counts are drawn (unless a step brings one
    token, which is always accepted).
    """

    def __init__(self, geometry: MambaGeometry, config: ReplayConfig, batch: int, mode: str, num_steps: int):
        self.tokens = config.max_step_tokens
        self.mode = mode
        self.num_layers = layers_for_cold_cache(SlotLayout(geometry, config), batch)
        self.pool = StatePool(geometry, config, num_slots=batch, num_layers=self.num_layers, device="cuda")
        self.snapshots = self.pool.allocate_snapshots() if mode == "conventional_verify" else None
        self.inputs = [layer_inputs(geometry, batch * self.tokens, seed) for seed in range(self.num_layers)]
        self.out = torch.empty_like(self.inputs[0]["x"])
        self.slots = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.accepted = torch.ones_like(self.slots)
        for phase in range(1, config.window):  # row r advances by r mod window tokens
            self._step(torch.where(self.slots % config.window >= phase, self.slots, -1))
        warm_up = 2 * config.window
        generator = torch.Generator("cuda").manual_seed(batch)
        shape = (1 + warm_up + num_steps, batch)
        self.draws = torch.randint(1, self.tokens + 1, shape, dtype=torch.int32, device="cuda", generator=generator)
        self.turn = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._draw()  # loads its kernels, which a capture must not
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            if self.tokens > 1:
                self._draw()
            self._step(self.slots)
        for _ in range(warm_up):
            self.graph.replay()
        self.pool.validate()

    def _draw(self) -> None:
        """The next row of `draws` is what the next step accepts."""
        torch.index_select(self.draws, 0, self.turn, out=self.accepted[None])
        self.turn.add_(1)

    def _step(self, slots: torch.Tensor) -> None:
        plan = self.pool.plan(slots, self.tokens)
        for layer, inputs in enumerate(self.inputs):
            arguments = {"pool": self.pool, "layer": layer, "plan": plan, **inputs, "out": self.out}
            if self.mode == "replay":
                ops.step(**arguments)
            elif self.mode == "conventional":
                ops.conventional_step(**arguments)
            else:
                ops.conventional_verify(**arguments, snapshots=self.snapshots[layer])
        self.pool.commit(plan, self.accepted)

    def time(self, steps: int) -> float:
        """Mean microseconds a layer of `steps` decode steps."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            self.graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / steps / self.num_layers


def read_bandwidth() -> float:
    """Bytes a second of a float32 reduction over 4 GiB: the best of ten."""
    data = torch.ones(1 << 30, device="cuda")
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        start.record()
        data.sum()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) * 1e-3)
    return data.nbytes / best


def measure(name: str, batch: int, tokens: int, mode: str, args: argparse.Namespace, bandwidth: float) -> dict:
    """One record: the median, least and greatest of `args.repeats` timings of `args.steps` steps."""
    config = ReplayConfig(
        window=args.window,
        max_step_tokens=tokens,
        checkpoint=args.checkpoint,
        read_copy=args.read_copy,
        activation="bf16",
    )
    steps = args.steps * args.repeats
    loop = DecodeLoop(GEOMETRIES[name], config, batch, mode, steps)
    before = loop.pool.stats()
    times = [loop.time(args.steps) for _ in range(args.repeats)]
    after = loop.pool.stats()
    loop.pool.validate()
    flushes = (after["flushes"] - before["flushes"]) / steps
    moved = sum(after[key] - before[key] for key in after if "bytes" in key)
    expected = batch * flushes_per_row_and_step(args.window, tokens) if mode == "replay" else 0.0
    if abs(flushes - expected) > max(0.02 * expected, batch / steps):
        raise RuntimeError(f"invalid run: {flushes:.3f} flushes a step, expected {expected:.3f}")
    us = statistics.median(times)
    bytes_per_layer = moved / steps / loop.num_layers
    return {
        "bench": "kernel",
        "geometry": name,
        "batch": batch,
        "tokens": tokens,
        "mode": mode,
        "checkpoint": args.checkpoint,
        "read_copy": args.read_copy,
        "window": args.window,
        "layers": loop.num_layers,
        "us": round(us, 2),
        "us_min": round(min(times), 2),
        "us_max": round(max(times), 2),
        "accepted_per_row_and_step": round((after["tokens"] - before["tokens"]) / steps / batch, 4),
        "flushes_per_step": round(flushes, 4),
        "state_and_record_bytes_per_step": round(bytes_per_layer),
        "fraction_of_read_bandwidth": round(bytes_per_layer / (us * 1e-6) / bandwidth, 3),
        "read_bandwidth": round(bandwidth),
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": args.commit,
        "command": shlex.join(["python", *(os.path.basename(a) if a == args.output else a for a in sys.argv)]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, nargs="+", default=["super"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="tokens a row and step: 1 + drafts")
    parser.add_argument(
        "--modes", choices=MODES, nargs="+", help="default: replay, and conventional (1 token) or conventional_verify"
    )
    parser.add_argument("--checkpoint", default="fp32", help="format of the checkpoint, see ReplayConfig")
    parser.add_argument("--read-copy", default="none", help="format of the read copy")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--steps", type=int, default=160, help="steps a timing; of one token: a multiple of the window")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", default="unknown", help="commit id to record")
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args()
    if args.modes and "conventional" in args.modes and max(args.tokens) > 1:
        parser.error("--modes conventional: takes --tokens 1 only, it can't reject drafts; use conventional_verify")

    bandwidth = read_bandwidth()
    records = []
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print("geometry batch tokens                mode  us/layer      min      max flushes/step bandwidth")
    for name, batch, tokens in itertools.product(args.geometry, args.batches, args.tokens):
        for mode in args.modes or ("replay", "conventional" if tokens == 1 else "conventional_verify"):
            record = measure(name, batch, tokens, mode, args, bandwidth)
            records.append(record)
            print(
                f"{name:>8} {batch:>5} {tokens:>6} {mode:>19} {record['us']:>9.1f} {record['us_min']:>8.1f} "
                f"{record['us_max']:>8.1f} {record['flushes_per_step']:>12.3f} "
                f"{record['fraction_of_read_bandwidth']:>9.0%}",
                flush=True,
            )
    if args.output:
        with open(args.output + ".tmp", "w") as file:
            json.dump(records, file, indent=1)
        os.replace(args.output + ".tmp", args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
