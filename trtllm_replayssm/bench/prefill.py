# SPDX-License-Identifier: Apache-2.0
"""One Mamba-2 layer's prompt of many tokens: ours beside mamba_ssm's Triton chunk scan.

What is timed is a CUDA graph of one layer: ours with the reset of the slot, plan and commit in it; theirs with the
final state returned, the fastest of its chunk sizes. Both begin with no state and write it at the end.
"""

from __future__ import annotations

import torch

from .. import MambaGeometry, ReplayConfig, StatePool, ops
from .clock import repeatable, seconds, spread
from .kernel import layer_inputs
from .peers import Peer
from .records import InvalidRun

CHUNKS = (128, 256)


class ChunkScan(Peer):
    """mamba_ssm's chunk scan of a whole prompt."""

    settings = [{"chunk_size": size} for size in CHUNKS]

    def __init__(self):
        super().__init__("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined")

    def scan(self, inputs: dict[str, torch.Tensor], setting: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """y [tokens,H,P] and the final state [H,P,N] of inputs as for `ops.prefill`, but A = -exp(A_log)."""
        x, B, C, dt = (inputs[name][None] for name in ("x", "B", "C", "dt"))
        y, state = self.module().mamba_chunk_scan_combined(
            x,
            dt,
            inputs["A"],
            B,
            C,
            D=inputs["D"],
            dt_bias=inputs["dt_bias"],
            dt_softplus=True,
            return_final_states=True,
            **setting,
        )
        return y[0], state[0]


class Prefill:
    """A prompt of one sequence in one layer, on a device."""

    def __init__(self, geometry: MambaGeometry, tokens: int, checkpoint: str, read_copy: str, device: torch.device):
        config = ReplayConfig(16, 1, checkpoint, read_copy, "bf16")
        self.device, self.tokens = device, tokens
        self.pool = StatePool(geometry, config, num_slots=1, num_layers=1, device=device)
        self.inputs = layer_inputs(geometry, tokens, 0, device)
        self.out = torch.empty_like(self.inputs["x"])
        self._slot = torch.zeros(1, dtype=torch.int32, device=device)
        self._stream = torch.zeros(1, dtype=torch.int64, device=device)

    def ours(self, steps: int, repeats: int) -> dict:
        """Figures of a record, microseconds a layer and prompt."""
        return self._timed(self._run, steps, repeats)

    def peer(self, peer: ChunkScan, steps: int, repeats: int) -> dict:
        """The same of the peer at its fastest chunk size. InvalidRun: its outputs are not ours."""
        self._run()
        settings = [setting for setting in peer.settings if setting["chunk_size"] <= self.tokens]
        inputs = self.inputs | {"A": -torch.exp(self.inputs["A_log"])}
        y, _ = peer.scan(inputs, settings[0])
        error = float((y.float() - self.out.float()).norm() / self.out.float().norm())
        if not error < 2e-2:
            raise InvalidRun(f"the peer's outputs are off ours by {error:.3g}")
        took = {}
        for setting in settings:
            took[setting["chunk_size"]] = self._timed(lambda s=setting: peer.scan(inputs, s), steps, repeats)
        best = min(took, key=lambda size: took[size]["us"])
        return took[best] | {"setting": {"chunk_size": best}, "peer_version": peer.version()}

    def _timed(self, work, steps: int, repeats: int) -> dict:
        step = repeatable(work, self.device)
        step()
        figures = spread([seconds(step, steps, self.device) * 1e6 for _ in range(repeats)])
        self.pool.validate()
        return figures

    def _run(self) -> None:
        self.pool.reset(self._slot, self._stream)
        plan = self.pool.plan(self._slot, self.tokens)
        ops.prefill(self.pool, 0, plan, **self.inputs, out=self.out)
        self.pool.commit(plan)
