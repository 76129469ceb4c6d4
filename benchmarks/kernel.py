# SPDX-License-Identifier: Apache-2.0
"""Times one Mamba-2 layer's decode step: ReplaySSM against the conventional read-update-write kernel.

What is timed is one CUDA graph a decode step: plan, the step of every layer of the pool, commit; the figure is that
time divided by the number of layers. The measurement is set up so that it cannot flatter:

- Flushes are in it. Rows stand at different phases of their windows, as in serving, and the device counts the flushes
  that happened: a run whose count is off the renewal value (one flush a window and row) stops with an error.
- The L2 cache is cold. The pool has as many layers as it takes for a step to pass through four times the L2.
- Bytes are counted by the pool and set against the read bandwidth measured in the same process (a sum over 4 GiB).

    python benchmarks/kernel.py --geometry super --batches 1 32 256 --output results.json
"""

from __future__ import annotations

import argparse
import datetime
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
MODES = {"replay": ops.step, "conventional": ops.conventional_step}
ACTIVATION = torch.bfloat16


def layers_for_cold_cache(layout: SlotLayout, batch: int) -> int:
    """Fewest layers (at least two) whose slots together are four times the L2 cache."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, -(-4 * l2_bytes // (batch * layout.slot_stride)))


def layer_inputs(geometry: MambaGeometry, batch: int, seed: int) -> dict[str, torch.Tensor]:
    """Random inputs of one layer, a token a row.

    x [batch,H,P], B and C [batch,G,N], dt [batch,H] in bf16; A_log, D, dt_bias [H] in fp32.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = ACTIVATION) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    heads = geometry.num_heads
    return {
        "x": normal(batch, heads, geometry.head_dim),
        "B": normal(batch, geometry.num_groups, geometry.state_dim),
        "C": normal(batch, geometry.num_groups, geometry.state_dim),
        "dt": normal(batch, heads),
        "A_log": torch.log(1 + 15 * torch.rand(heads, generator=generator, device="cuda")),
        "D": normal(heads, dtype=torch.float32),
        "dt_bias": normal(heads, dtype=torch.float32) - 4,
    }


class DecodeLoop:
    """A pool whose rows stand at staggered window phases, and one captured graph a decode step."""

    def __init__(self, geometry: MambaGeometry, config: ReplayConfig, batch: int, mode: str):
        self.batch = batch
        self.num_layers = layers_for_cold_cache(SlotLayout(geometry, config), batch)
        self.pool = StatePool(geometry, config, num_slots=batch, num_layers=self.num_layers, device="cuda")
        self.inputs = [layer_inputs(geometry, batch, seed) for seed in range(self.num_layers)]
        self.out = torch.empty_like(self.inputs[0]["x"])
        self.layer_op = MODES[mode]
        self.slots = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.accepted = torch.ones_like(self.slots)
        for phase in range(1, config.window):  # row r advances by r mod window tokens
            self._step(torch.where(self.slots % config.window >= phase, self.slots, -1))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step(self.slots)
        for _ in range(2 * config.window):
            self.graph.replay()
        self.pool.validate()

    def _step(self, slots: torch.Tensor) -> None:
        plan = self.pool.plan(slots, 1)
        for layer, inputs in enumerate(self.inputs):
            self.layer_op(self.pool, layer, plan, **inputs, out=self.out)
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


def measure(name: str, batch: int, mode: str, args: argparse.Namespace, bandwidth: float) -> dict:
    """One record: the median, least and greatest of `args.repeats` timings of `args.steps` steps."""
    config = ReplayConfig(window=args.window, max_step_tokens=1, checkpoint=args.checkpoint, activation="bf16")
    loop = DecodeLoop(GEOMETRIES[name], config, batch, mode)
    before = loop.pool.stats()
    times = [loop.time(args.steps) for _ in range(args.repeats)]
    after = loop.pool.stats()
    steps = args.steps * args.repeats
    flushes = (after["flushes"] - before["flushes"]) / steps
    moved = sum(after[key] - before[key] for key in after if "bytes" in key)
    expected = batch / args.window if mode == "replay" else 0.0
    if abs(flushes - expected) > max(0.02 * expected, batch / steps):
        raise RuntimeError(f"invalid run: {flushes:.3f} flushes a step, expected {expected:.3f}")
    us = statistics.median(times)
    bytes_per_layer = moved / steps / loop.num_layers
    return {
        "bench": "kernel",
        "geometry": name,
        "batch": batch,
        "tokens": 1,
        "mode": mode,
        "checkpoint": args.checkpoint,
        "read_copy": "none",
        "window": args.window,
        "layers": loop.num_layers,
        "us": round(us, 2),
        "us_min": round(min(times), 2),
        "us_max": round(max(times), 2),
        "flushes_per_step": round(flushes, 4),
        "state_and_record_bytes_per_step": round(bytes_per_layer),
        "fraction_of_read_bandwidth": round(bytes_per_layer / (us * 1e-6) / bandwidth, 3),
        "read_bandwidth": round(bandwidth),
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": args.commit,
        "command": shlex.join(["python", *sys.argv]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, nargs="+", default=["super"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--checkpoint", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--steps", type=int, default=160, help="decode steps a timing; a multiple of the window")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", default="unknown", help="commit id to record")
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args()

    bandwidth = read_bandwidth()
    records = []
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print("geometry batch          mode  us/layer      min      max flushes/step bandwidth")
    for name in args.geometry:
        for batch in args.batches:
            for mode in args.modes:
                record = measure(name, batch, mode, args, bandwidth)
                records.append(record)
                print(
                    f"{name:>8} {batch:>5} {mode:>13} {record['us']:>9.1f} {record['us_min']:>8.1f} "
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
