# SPDX-License-Identifier: Apache-2.0
"""An exported graph at work on the CPU, as an engine's runner would use it."""

import ml_dtypes
import numpy as np
import onnx

from trtllm_replayssm.builder.evaluator import HostGraph

NEW_SEQUENCE = -2
_DTYPES = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16}


class GraphRun:
    """Holds what must last from run to run: table, states, KV caches, and the accepted counts for the next run.

    A row of a run is a row of the KV caches; its slot may be any other number.
    """

    def __init__(self, path, pool, config):
        self.graph, self.state_io = HostGraph(path), config.state_io
        self.state, self.caches = {}, {}
        for name, tensor in self.graph.inputs.items():
            if name == "table":
                self.state[name] = np.zeros(pool.table_words, np.int32)
            elif name.startswith("state."):
                self.state[name] = np.zeros((pool.num_slots, pool.slot_words), np.int32)
            elif "_cache." in name:
                shape = [size.dim_value for size in tensor.shape.dim[1:]]
                self.caches[name] = np.zeros((config.max_batch, *shape), _DTYPES[tensor.elem_type])
        self.accepted = [NEW_SEQUENCE] * pool.num_slots  # by slot

    def __call__(self, rows, tokens, positions, slots=None, width=None, **more):
        """A run of these rows of the KV caches. tokens: a list a row, [] of idle ones; they are padded to `width`.

        Returns the outputs, those of a row cut to its tokens.
        """
        width = width or max(map(len, tokens))
        ids = np.zeros((len(rows), width), np.int32)
        for row, given in enumerate(tokens):
            ids[row, : len(given)] = given
        if slots is not None:
            more["slots"] = np.array(slots, np.int32)
            more["accepted"] = np.array([0 if slot < 0 else self.accepted[slot] for slot in slots], np.int32)
        state = self.state
        if self.state_io == "host_pointer":
            state = {name: np.array([values.ctypes.data]) for name, values in state.items()}
        outputs = self.graph(
            token_ids=ids,
            tokens=np.array([len(given) for given in tokens], np.int32),
            positions=np.array(positions, np.int32),
            **state,
            **{name: values[rows] for name, values in self.caches.items()},
            **more,
        )
        for name, values in self.caches.items():
            values[rows] = outputs["new_" + name]
        if self.state_io != "host_pointer":
            self.state = {name: outputs["new_" + name] for name in self.state}
        assert not outputs.get("status", np.zeros(1)).any()
        return [
            {name: outputs[name][row, : len(given)].astype(np.float32) for name in ("logits", "hidden_states")}
            for row, given in enumerate(tokens)
        ]
