# SPDX-License-Identifier: Apache-2.0
"""Runs every CUDA op on small pools of every kernel family, next to the host ops, and compares outputs and states.

Small enough to run under compute-sanitizer:

    compute-sanitizer --tool memcheck python scripts/gpu/every_op.py
"""

from __future__ import annotations

import math
import sys
import warnings

import torch

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

SLOTS = 5
# (geometry, activation, checkpoint): the tensor-core and tuned kernels of both head sizes, and the generic ones
CASES = [
    (MambaGeometry(num_heads=4, head_dim=64, num_groups=2, state_dim=128, conv_kernel=4), "bf16", "fp32"),
    (MambaGeometry(num_heads=4, head_dim=64, num_groups=1, state_dim=128, conv_kernel=4), "fp16", "fp16"),
    (MambaGeometry(num_heads=2, head_dim=80, num_groups=1, state_dim=128, conv_kernel=4), "bf16", "bf16"),
    (MambaGeometry(num_heads=2, head_dim=80, num_groups=2, state_dim=128, conv_kernel=4), "bf16", "fp32"),
    (MambaGeometry(num_heads=3, head_dim=24, num_groups=3, state_dim=64, conv_kernel=3), "fp32", "fp32"),
]
# (checkpoint, read copy): others, besides those above; the conventional ops take none of them
FORMATS = [
    *((checkpoint, copy) for checkpoint in ("fp32", "bf16", "fp16", "fp16_sr") for copy in ("fp8", "nvfp4")),
    *(("fp16_sr", "none"), ("fp8_sr", "none"), ("fp8_sr", "nvfp4"), ("nvfp4", "none")),
    *(("fp32", "nvfp4_amax"), ("fp32", "e2m2"), ("fp16_sr", "e2m2"), ("bf16", "nvfp4_amax"), ("bf16", "e2m2")),
]
ROUNDS = [  # (slots, tokens a row, op)
    ([2, -1, 0], [7, 2, 1], "prefill"),
    ([0, 2, -1, 3], [1, 1, 1, 1], "step"),
    ([3, 0, 2], [3, 0, 2], "step"),
    ([2, 3, 0], [3, 3, 1], "step of records"),
    ([0, 3, -1, 2], [2, 3, 3, 3], "flush, step"),
    ([3, 0], [3, 3], "step"),
    ([3, 2, 0], [3, 2, 3], "step"),  # slots 3 and 2 are flushed by the step itself
    ([0, -1, 2, 3], [3, 2, 3, 1], "step of records"),  # so is slot 0
    ([2], [9], "prefill"),
    ([2], [1], "step"),  # single rows have kernels of their own
    ([2], [3], "step"),
    ([2], [3], "step of records"),
    ([2], [3], "step"),  # flushed by the step itself
    ([1], [1], "conventional_step"),
    ([1, -1], [2, 1], "conventional_step"),
    ([1, -1, 4], [3, 1, 2], "conventional_verify"),
    ([4, 1], [2, 3], "conventional_verify"),
]


FLUSHES = 5
LONG_ROUNDS = [  # verification of up to 16 tokens a row in a window of 32
    ([0, 1], [40, 3], "prefill"),
    ([0, -1, 1], [16, 1, 9], "step"),
    ([1, 0], [16, 16], "step"),
    ([0, 1], [7, 12], "flush, step"),  # both are flushed
    ([0, 1], [16, 16], "step"),
    ([1, 0], [16, 16], "step of records"),  # both again, by the step itself
]
LONG_FLUSHES = 4

SELDOM_ROUNDS = [  # up to 8 tokens a row in a window of 32, which steps of 16-bit checkpoints read in their own way
    ([0, 1], [20, 3], "prefill"),
    ([0, -1, 1], [8, 1, 5], "step"),
    ([1, 0], [8, 8], "step"),
    ([0, 1], [8, 8], "step"),
    ([1, 0], [8, 8], "step"),
    ([0, -1], [8, 1], "flush, step"),
    ([1, 0], [8, 1], "step of records"),  # slot 1 is flushed by the step itself
    ([1], [8], "step"),
    ([1], [1], "step"),
    ([1], [8], "step of records"),
    ([1], [8], "step"),
    ([1], [8], "step of records"),  # slot 1 again
]
SELDOM_FLUSHES = 3


def agree(what: str, host: torch.Tensor, device: torch.Tensor, tolerance: float) -> None:
    host, device = host.double(), device.cpu().double()
    error = ((host - device).norm() / host.norm().clamp_min(1e-30)).item()
    if not error <= tolerance:
        raise AssertionError(f"{what}: host and CUDA differ by {error:.2e} (limit {tolerance:.0e})")


class Pair:
    """The same pool on the host and on the GPU, there over memory that nothing has written: initcheck sees every read
    of what no op wrote before."""

    def __init__(self, geometry: MambaGeometry, config: ReplayConfig, generator: torch.Generator):
        self.pools = [StatePool(geometry, config, SLOTS, num_layers=2, device=device) for device in ("cpu", "cuda")]
        self.pools[1].data = torch.empty_like(self.pools[1].data)
        if config.read_copy == "none":  # a step stores slot 3's first state: in block copies, which initcheck misses
            section = self.pools[1].layout.sections["checkpoint"]
            self.pools[1].data[:, 3, section.offset : section.offset + section.bytes] = 0
        self.conventional = config.checkpoint in ("fp32", "bf16", "fp16") and config.read_copy == "none"
        self.state_snapshots = [pool.allocate_snapshots() for pool in self.pools] if self.conventional else []
        self.geometry = geometry
        self.generator = generator
        self.dtype = self.pools[0].activation
        # Outputs differ by one rounding; a stored state by one rounding a flush: few values of it, if it is coarse.
        exact = self.dtype == torch.float32 and (config.checkpoint, config.read_copy) == ("fp32", "none")
        self.tolerance = 3e-5 if exact else 2e-2

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        host = torch.randn(*shape, generator=self.generator).to(dtype or self.dtype)
        return [host, host.cuda()]

    def check(self, what: str, host: torch.Tensor, device: torch.Tensor) -> None:
        agree(what, host, device, self.tolerance)

    def run(self, rounds: list, flushes: int) -> None:
        g = self.geometry
        heads = [self.random(g.num_heads, dtype=torch.float32) for _ in range(3)]
        weight = self.random(g.conv_channels, g.conv_kernel)
        bias = self.random(g.conv_channels)
        for slots, counts, op in rounds:
            if op.startswith("conventional") and not self.conventional:
                continue
            tokens = sum(counts)
            raw = self.random(tokens, g.conv_channels)
            dt = self.random(tokens, g.num_heads)
            accepted = counts if op in ("prefill", "conventional_step") else [max(count - 1, 0) for count in counts]
            outputs = []
            for side, pool in enumerate(self.pools):
                plan = pool.plan(slots, counts)
                rows = []
                for layer in range(2):
                    conv = (pool, layer, plan, raw[side], weight[side], bias[side])
                    given = (dt[side], *(parameter[side] for parameter in heads))
                    if op == "step of records":
                        C = ops.conv_step(*conv, records=True)
                        rows += [C, ops.step(pool, layer, plan, None, None, C, *given)]
                        continue
                    xBC = ops.conv_step(*conv)
                    x, B, C = xBC.split([g.num_heads * g.head_dim, *[g.num_groups * g.state_dim] * 2], dim=-1)
                    arguments = (
                        x.unflatten(-1, (g.num_heads, g.head_dim)),
                        B.unflatten(-1, (g.num_groups, g.state_dim)),
                        C.unflatten(-1, (g.num_groups, g.state_dim)),
                        *given,
                    )
                    if op == "conventional_verify":
                        snapshots = self.state_snapshots[side][layer]
                        out = ops.conventional_verify(pool, layer, plan, *arguments, snapshots=snapshots)
                        # The states after the last token of each row.
                        last = [snapshots[s, n - 1] for s, n in zip(slots, counts, strict=True) if s >= 0]
                        rows += [xBC, out, torch.stack(last)]
                    else:
                        rows += [xBC, self.layer_op(op)(pool, layer, plan, *arguments)]
                pool.commit(plan, accepted, check=True)
                outputs.append(rows)
            for host, device in zip(*outputs, strict=True):
                self.check(op, host, device)
        counted = [pool.stats()["flushes"] for pool in self.pools]
        if counted != [flushes, flushes]:
            raise AssertionError(f"expected {flushes} flushes, counted {counted}")

    @staticmethod
    def layer_op(op: str):
        if op != "flush, step":
            return getattr(ops, op)

        def flush_then_step(pool, layer, plan, x, B, C, dt, A_log, D, dt_bias):
            plan.note_use("stepped", layer)
            call = (pool.table, pool.data, pool.spec, layer, plan.buffer, plan.rows)
            operators = torch.ops.trtllm_replayssm
            operators.flush(*call, A_log)
            out = torch.zeros_like(x, memory_format=torch.contiguous_format)
            operators.step(*call, x, B, C, dt, A_log, D, dt_bias, out, 0.0, math.inf, plan.max_count, True)
            return out

        return flush_then_step

    def snapshots(self) -> None:
        """materialize, restore, copy, save, load, abandon."""
        states, restored = [], []
        for pool in self.pools:
            states.append([pool.materialize(layer, [0, -1, 3]) for layer in range(2)])
            # Whole slots are copied: in a pool of their own, of which every byte is written.
            whole = StatePool(pool.geometry, pool.config, SLOTS, num_layers=2, device=pool.device)
            for layer, (state, conv_tail) in enumerate(states[-1]):
                whole.restore(layer, [0, -1, 3], state, conv_tail)
            whole.copy([3], [1])
            whole.load([2], whole.save([1]))
            whole.abandon(whole.plan([0, 2], 1))
            whole.validate()
            restored.append([whole.materialize(layer, [0, -1, 2]) for layer in range(2)])
        for name, sides in (("materialize", states), ("restore", restored)):
            for host, device in zip(*sides, strict=True):
                for one, other in zip(host, device, strict=True):
                    self.check(name, one[[0, 2]], other[[0, 2]])


def check_ops_without_pools(generator: torch.Generator) -> None:
    """rms_norm, relu2 and attend, among keys that nothing has written."""
    for dtype in (torch.bfloat16, torch.float16):
        x, y, z = (torch.randn(5, 7680, generator=generator) for _ in range(3))
        parts = torch.stack([x, y, z, x])
        for name, groups, other in (("addend", 1, z.to(dtype)), ("gate", 8, z.to(dtype)), ("addend", 1, parts)):
            for kind, tolerance in ((torch.float32, 1e-5), (dtype, 1e-3)):
                rows = []
                for device in ("cpu", "cuda"):
                    more = {name: other.to(device), "dtype": kind}
                    rows.append(ops.rms_norm(x.clone().to(device), y[0].to(device, kind), 1e-5, groups, **more))
                agree(f"rms_norm with {name}", *rows, tolerance)
        agree("relu2", *(ops.relu2(x.to(device, dtype)[:, 1:].contiguous()) for device in ("cpu", "cuda")), 0.0)
        for head_dim, sharing, counts in ((64, 5, [1, 4, 3]), (128, 4, [1, 1, 1]), (128, 5, [4, 9, 30])):
            starts, tokens, kv_heads, capacity = [0, 37, 16], sum(counts), 2, 60
            keys, values = torch.randn(2, 4, kv_heads, capacity, head_dim, generator=generator).to(dtype)
            q = torch.randn(tokens, kv_heads * sharing, head_dim, generator=generator).to(dtype)
            first = torch.tensor([0, *counts[:-1]]).cumsum(0)
            cells = first[:, None] + torch.minimum(torch.arange(max(counts)), torch.tensor(counts)[:, None] - 1)
            slots = torch.tensor([3, 0, 2]).repeat_interleave(torch.tensor(counts))
            positions = torch.cat([start + torch.arange(n) for n, start in zip(counts, starts, strict=True)])
            caches = [torch.empty(keys.shape, dtype=dtype, device="cuda") for _ in range(2)]
            for target, source in zip(caches, (keys, values), strict=True):
                for slot, start, n in zip([3, 0, 2], starts, counts, strict=True):
                    target[slot, :, : start + n] = source[slot, :, : start + n].cuda()
            host = ops.attend(q, keys, values, slots, positions, cells)
            device = ops.attend(q.cuda(), *caches, slots.cuda(), positions.cuda(), cells.cuda())
            agree(f"attend, head_dim {head_dim}", host, device, 1e-2)


def main() -> int:
    warnings.filterwarnings("ignore", message='checkpoint "bf16"')
    generator = torch.Generator().manual_seed(3)
    check_ops_without_pools(generator)
    print("norms and attention: agree with the host")
    for geometry, activation, checkpoint in CASES:
        formats = {"activation": activation, "checkpoint": checkpoint}
        pair = Pair(geometry, ReplayConfig(window=6, max_step_tokens=3, **formats), generator)
        pair.run(ROUNDS, FLUSHES)
        pair.snapshots()
        Pair(geometry, ReplayConfig(window=32, max_step_tokens=16, **formats), generator).run(LONG_ROUNDS, LONG_FLUSHES)
        Pair(geometry, ReplayConfig(window=32, max_step_tokens=8, **formats), generator).run(
            SELDOM_ROUNDS, SELDOM_FLUSHES
        )
        print(f"head_dim {geometry.head_dim}, {activation}, checkpoint {checkpoint}: every op agrees with the host")
    for index, (checkpoint, read_copy) in enumerate(FORMATS):
        geometry, activation, _ = CASES[index % len(CASES)]
        formats = {"activation": activation, "checkpoint": checkpoint, "read_copy": read_copy}
        pair = Pair(geometry, ReplayConfig(window=6, max_step_tokens=3, **formats), generator)
        pair.run(ROUNDS, FLUSHES)
        pair.snapshots()
        print(f"checkpoint {checkpoint}, read copy {read_copy}: every op agrees with the host")
    return 0


if __name__ == "__main__":
    sys.exit(main())
