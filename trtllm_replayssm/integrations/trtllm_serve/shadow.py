# SPDX-License-Identifier: Apache-2.0
"""The stock kernel beside ours: every so many steps, one layer of the step is run by both and compared.

Layers take turns. Before the step is planned, the layer's state is materialized; the stock kernel then gets it, in the
manager's dtype, with the inputs of the step. Captured steps run no host code, so they have no shadow.
"""

import torch

from ...pool import StatePool
from .log import logger

NOTABLE = 2e-2  # relative L2 difference from which on it is a warning


class Shadow:
    """Comparisons of a pool's steps.

    Args:
        pool: whose states are materialized.
        every: steps from one comparison to the next.

    Attributes:
        differences: relative L2 differences so far, (step, layer, difference).
    """

    def __init__(self, pool: StatePool, every: int):
        self.differences: list[tuple[int, int, float]] = []
        self._pool = pool
        self._every = every
        self._steps = self._compared = 0
        self._layer = self._state = self._live = None

    def begin(self, slots: torch.Tensor):
        """Before a step is planned. slots: int32 [rows], -1 = masked."""
        self._layer = None
        if slots.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._steps += 1
        layer = self._compared % self._pool.num_layers
        if self._steps % self._every or self._pool.decay[layer] is None:
            return
        self._layer, self._live = layer, slots >= 0
        self._state = self._pool.materialize(layer, slots)[0].to(self._pool.checkpoint.dtype)

    def compare(self, layer: int, out: torch.Tensor, stock):
        """After a layer's step. stock: a function of (state, slots, out) that fills `out` from [rows, ...] states."""
        if layer != self._layer:
            return
        expected = torch.zeros_like(out)
        rows = torch.arange(len(out), dtype=torch.int32, device=out.device)
        stock(self._state, rows, expected)
        self._layer = self._state = None
        self._compared += 1
        expected, given = (tensor[self._live].double() for tensor in (expected, out))
        difference = float((given - expected).norm() / expected.norm().clamp(min=1e-30))
        self.differences.append((self._steps, layer, difference))
        text = f"ReplaySSM shadow: step {self._steps}, Mamba layer {layer}: relative difference {difference:.2e}"
        (logger.warning if difference > NOTABLE or difference != difference else logger.info)(text)
