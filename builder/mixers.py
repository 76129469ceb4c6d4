# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 layers of a graph: our plugins, and the state they share. docs/plugins.md has the contract."""

from __future__ import annotations

from onnx import TensorProto

from .engine_config import Pool
from .graph import Graph


class Mixers:
    """Plan, and per layer conv, flush and step, chained in one of the three ways of `state_io`.

    The network's inputs are `table` and `state.0`, `state.1` …; where the state comes back as an output, it is called
    `new_table`, `new_state.0` …
    """

    def __init__(self, graph: Graph, pool: Pool, state_io: str):
        self.graph, self.pool, self.state_io = graph, pool, state_io
        self._alias, self._pointers = state_io == "alias", state_io == "host_pointer"
        geometry, replay = pool.geometry, pool.replay
        self._common = {
            "num_heads": geometry.num_heads,
            "head_dim": geometry.head_dim,
            "num_groups": geometry.num_groups,
            "state_dim": geometry.state_dim,
            "conv_kernel": geometry.conv_kernel,
            "window": replay.window,
            "max_step_tokens": replay.max_step_tokens,
            "checkpoint": replay.checkpoint,
            "read_copy": replay.read_copy,
            "activation": replay.activation,
            "seed": str(replay.seed),
            "num_slots": pool.num_slots,
            "state_io": state_io,
            "plan_mode": "cursors",
            "num_layers": pool.num_layers,
        }

    def plan(self, slots: str, tokens: str, accepted: str, token_ids: str) -> None:
        """The first node. The error word after it is the output `status`."""
        table = self._memory("table", [self.pool.table_words])
        inputs = [slots, tokens, accepted, token_ids, table]
        outputs = ["plan", "status"] + ([] if self._pointers else ["new_table"])
        self.graph.plugin("ReplaySsmPlan", "plan", inputs, outputs, self._common)
        self.graph.output("status", TensorProto.INT32, [8])
        if self.state_io == "same_pointer":
            self.graph.output("new_table", TensorProto.INT32, [self.pool.table_words])
        self._table = "new_table" if self._alias else "table"

    def __call__(
        self,
        layer: int,
        name: str,
        projected: str,
        conv: tuple[str, str],
        A_log: str,
        D: str,
        dt_bias: str,
        dt_limit: tuple[float, float],
    ) -> str:
        """A layer's out [B, S, H·P], undefined behind a row's tokens.

        projected: all of in_proj's output, z | x | B | C | dt. conv: weight [channels, K] and bias [channels].
        """
        graph, geometry = self.graph, self.pool.geometry
        shape = [self.pool.num_slots, self.pool.slot_words]
        state, new_state = self._memory(f"state.{layer}", shape), f"new_state.{layer}"
        inner = geometry.num_heads * geometry.head_dim
        fields = {**self._common, "layer": layer, "slot_stride": 0}

        def chained(after: str) -> list[str]:
            """What the next node of the chain gets from the last one: the state itself, or the order and the state."""
            return [after] if self._alias else [after, state]

        xBC, after = graph.plugin(
            "ReplayCausalConv",
            f"{name}conv",
            ["plan", self._table, projected, *conv, state],
            [f"{name}conv", f"{name}conv.after"],
            {**fields, "in_offset": inner},
        )
        (after,) = graph.plugin(
            "ReplaySsmFlush",
            f"{name}flush",
            ["plan", self._table, A_log, *chained(after)],
            [f"{name}flush.after"],
            {**fields, "first_head": 0},
        )
        own = {"dt_offset": inner + geometry.conv_channels, "dt_min": dt_limit[0], "dt_max": dt_limit[1]}
        outputs = graph.plugin(
            "ReplaySsmStep",
            f"{name}step",
            ["plan", self._table, xBC, projected, A_log, D, dt_bias, *chained(after)],
            [f"{name}step"] + ([] if self._pointers else [new_state]),
            {**fields, "first_head": 0, **own},
        )
        if self.state_io == "same_pointer":
            graph.output(new_state, TensorProto.INT32, shape)
        return outputs[0]

    def _memory(self, name: str, shape: list[int]) -> str:
        """A network input: the memory itself, or where it is."""
        if self._pointers:
            return self.graph.input(name, TensorProto.INT64, [1])
        return self.graph.input(name, TensorProto.INT32, shape)
