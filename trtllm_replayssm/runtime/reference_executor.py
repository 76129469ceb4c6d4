# SPDX-License-Identifier: Apache-2.0
"""The graphs of an engine folder on the CPU, for tests, not for speed: ONNX's reference evaluator and the host ops."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from ..builder.bundle import MODELS, Bundle
from ..builder.evaluator import HostGraph
from .executor import Outputs
from .graph_memory import GraphMemory


class ReferenceExecutor:
    """An Executor. It needs the folder's ONNX models, no plans."""

    def __init__(self, folder: Path, bundle: Bundle, memory: GraphMemory):
        self._memory, self._state_io = memory, bundle.engine.state_io
        self._graphs = {graph: HostGraph(folder / model) for graph, model in MODELS.items() if model in bundle.files}
        pool = memory.pool
        self._state = {"table": pool.table} | {f"state.{layer}": data for layer, data in enumerate(pool.data)}

    def run(self, graph: str, row: int | None, inputs: dict[str, torch.Tensor]) -> Outputs:
        evaluated, caches = self._graphs[graph], self._memory.caches[graph]
        rows = slice(None) if row is None else slice(row, row + 1)
        given = inputs | {name: cache[rows] for name, cache in caches.items()}
        arrays = {name: _array(values) for name, values in given.items()}
        if graph == "model":
            arrays |= {name: self._bound(memory) for name, memory in self._state.items()}
        outputs = evaluated(**{name: array for name, array in arrays.items() if name in evaluated.inputs})
        for name, cache in caches.items():
            cache[rows] = _tensor(outputs["new_" + name])
        if graph == "model" and self._state_io == "alias":  # the evaluator gives what it would have written in place
            for name, memory in self._state.items():
                memory.view(-1).view(torch.int32).copy_(_tensor(outputs["new_" + name]).flatten())
        return Outputs(_tensor(outputs["logits"]), _tensor(outputs["hidden_states"]))

    def _bound(self, memory: torch.Tensor) -> np.ndarray:
        """The memory itself, INT32, or where it is."""
        if self._state_io == "host_pointer":
            return np.array([memory.data_ptr()])
        return memory.view(torch.int32).numpy()


def _array(values: torch.Tensor) -> np.ndarray:
    if values.dtype == torch.bfloat16:  # numpy has none
        return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return values.numpy()


def _tensor(values: np.ndarray) -> torch.Tensor:
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
