# SPDX-License-Identifier: Apache-2.0
"""Small engines of plan, conv, flush and step, from hand-made ONNX, and what the builder says about them."""

import re

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from registry import NAMESPACE, Registry

from trtllm_replayssm import _core

H, P, G, N, K = 4, 16, 2, 64, 4
D = H * P + 2 * G * N
PROJECTED = 2 * H * P + 2 * G * N + H
HIDDEN, LAYERS, WINDOW, STEP_TOKENS, ROWS = 64, 2, 8, 4, 6
SLOTS = 100_000  # a pool of gigabytes, of which a build allocates nothing
COMMON = {
    "num_heads": H,
    "head_dim": P,
    "num_groups": G,
    "state_dim": N,
    "conv_kernel": K,
    "window": WINDOW,
    "max_step_tokens": STEP_TOKENS,
    "checkpoint": "fp32",
    "read_copy": "none",
    "activation": "bf16",
    "seed": "18446744073709551615",
    "num_slots": SLOTS,
}
LAYER = {"num_layers": LAYERS, "layer": 0, "slot_stride": 0}
OWN = {
    "ReplaySsmPlan": {"num_layers": LAYERS},
    "ReplayCausalConv": {**LAYER, "in_offset": H * P},
    "ReplaySsmFlush": {**LAYER, "first_head": 0},
    "ReplaySsmStep": {**LAYER, "first_head": 0, "dt_offset": H * P + D, "dt_min": 0.0, "dt_max": float("inf")},
}


def fields(plugin, state_io="alias", **changes):
    """All fields of a plugin; a change to None takes one away."""
    values = {**COMMON, "state_io": state_io, "plan_mode": "cursors", **OWN[plugin], **changes}
    return {name: value for name, value in values.items() if value is not None}


def pool():
    """Bytes of a slot, and INT32 words of the table."""
    config = _core.Config(WINDOW, STEP_TOKENS, 0, 0, _core.DTYPES["bf16"], 0)
    spec = _core.Spec(_core.Geometry(H, P, G, N, K), config, SLOTS, LAYERS, first_head=0)
    return _core.Layout(_core.Geometry(H, P, G, N, K), config).slot_stride, spec.table_bytes // 4


class Graph:
    """An ONNX model in the making. `plugin` adds one of our nodes, whose outputs are named after it.

    state_io: or "lengths": host_pointer with plans of lengths, whose tokens are packed.
    """

    def __init__(self, state_io):
        self.state_io = state_io
        self.nodes, self.inputs, self.outputs, self.constants = [], [], [], []
        self.random = np.random.default_rng(0)

    def input(self, name, kind, shape):
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name, kind, shape):
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def weight(self, name, shape, kind=TensorProto.BFLOAT16):
        values = self.random.standard_normal(shape, dtype=np.float32) * 0.05
        if kind == TensorProto.BFLOAT16:
            tensor = helper.make_tensor(name, kind, shape, values.reshape(-1).tolist())
        else:
            tensor = numpy_helper.from_array(values, name)
        self.constants.append(tensor)
        return name

    def node(self, op, inputs, name, count=1, domain="", **attributes):
        names = [name] if count == 1 else [f"{name}:{i}" for i in range(count)]
        self.nodes.append(helper.make_node(op, inputs, names, name=name, domain=domain, **attributes))
        return names if count > 1 else name

    def plugin(self, op, inputs, name, count, **changes):
        modes = {"state_io": self.state_io}
        if self.state_io == "lengths":
            modes = {"state_io": "host_pointer", "plan_mode": "lengths"}
        given = fields(op, **{**modes, **changes})
        return self.node(op, inputs, name, count, NAMESPACE, plugin_namespace=NAMESPACE, **given)

    def serialized(self):
        graph = helper.make_graph(self.nodes, "test", self.inputs, self.outputs, self.constants)
        imports = [helper.make_opsetid("", 23), helper.make_opsetid(NAMESPACE, 1)]
        return helper.make_model(graph, opset_imports=imports).SerializeToString()


def stack(state_io):
    """Plan and LAYERS blocks of norm, projection, mixer, projection and sum."""
    g = Graph(state_io)
    slot_stride, table_words = pool()
    words = slot_stride // 4
    lengths = state_io == "lengths"
    pointers = lengths or state_io == "host_pointer"
    tokens = ["S"] if lengths else ["B", "S"]
    hidden = g.input("hidden", TensorProto.BFLOAT16, [*tokens, HIDDEN])
    memory = TensorProto.INT64 if pointers else TensorProto.INT32
    if lengths:
        rows = [g.input(name, TensorProto.INT32, ["B"]) for name in ("slots", "types", "prompts", "sequences", "ends")]
        phase = [rows[1], g.input("host_prompts", TensorProto.INT32, ["B"])]
        plan, shared = g.plugin("ReplaySsmPlan", rows, "plan", 2)
        g.output(shared, TensorProto.INT32, [32])
    else:
        rows = [g.input(name, TensorProto.INT32, ["B"]) for name in ("slots", "tokens", "accepted")]
        rows.append(g.input("token_ids", TensorProto.INT64, ["B", "S"]))
        phase = []
        g.input("table", memory, [1] if pointers else [table_words])
        plan, status, *table = g.plugin("ReplaySsmPlan", [*rows, "table"], "plan", 2 if pointers else 3)
        g.output(status, TensorProto.INT32, [8])
        if state_io == "same_pointer":
            g.output(table[0], memory, [table_words])
        shared = table[0] if state_io == "alias" else "table"
    for i in range(LAYERS):
        at = f"layer{i}/"
        state = g.input(f"{at}state", memory, [1] if pointers else [SLOTS, words])
        norm = g.node("RMSNormalization", [hidden, g.weight(f"{at}scale", [HIDDEN])], f"{at}norm")
        projected = g.node("MatMul", [norm, g.weight(f"{at}in_proj", [HIDDEN, PROJECTED])], f"{at}projected")
        conv = [plan, shared, projected, g.weight(f"{at}conv_weight", [D, K]), g.weight(f"{at}conv_bias", [D])]
        xBC, after_conv = g.plugin("ReplayCausalConv", [*conv, *phase, state], f"{at}conv", 2, layer=i)
        A_log, skip, dt_bias = (g.weight(f"{at}{name}", [H], TensorProto.FLOAT) for name in ("A_log", "D", "dt_bias"))
        order = [after_conv] if state_io == "alias" else [after_conv, state]
        after_flush = g.plugin("ReplaySsmFlush", [plan, shared, A_log, *order], f"{at}flush", 1, layer=i)
        order = [after_flush] if state_io == "alias" else [after_flush, state]
        step = [plan, shared, xBC, projected, A_log, skip, dt_bias, *phase, *order]
        out = g.plugin("ReplaySsmStep", step, f"{at}step", 1 if pointers else 2, layer=i)
        if state_io == "same_pointer":
            g.output(out[1], memory, [SLOTS, words])
        y = out if pointers else out[0]
        back = g.node("MatMul", [y, g.weight(f"{at}out_proj", [H * P, HIDDEN])], f"{at}back")
        hidden = g.node("Add", [hidden, back], f"{at}sum")
    g.output(hidden, TensorProto.BFLOAT16, [*tokens, HIDDEN])
    return g.serialized()


def build(model, words=None, alias=True):
    """Parses and builds with TensorRT-RTX; two profiles, steps and prompts of ROWS rows. `words`: size of a plan input.

    Returns:
        registry with its log, network or None if parsing failed, plan or None.
    """
    registry = Registry("rtx")
    trt, builder = registry.trt, registry.builder
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, registry.logger)
    if not parser.parse(model):
        registry.log += [("ERROR", parser.get_error(i).desc()) for i in range(parser.num_errors)]
        return registry, None, None
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, alias)
    for least, most in ((1, STEP_TOKENS), (STEP_TOKENS + 1, 32)):
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            names = [tensor.get_dimension_name(d) for d in range(len(tensor.shape))]
            shapes = []
            for tokens in (least, most, most):
                sizes = {"B": ROWS, "S": tokens, "T": tokens + 1, "W": words}
                shapes.append([sizes.get(name, size) for name, size in zip(names, tensor.shape, strict=True)])
            if any(names):
                profile.set_shape(tensor.name, *shapes)
        config.add_optimization_profile(profile)
    return registry, network, builder.build_serialized_network(network, config)


def engine_layers(log):
    """The finished engine's layers, both profiles: [(type, ONNX names, the rest of the line)]."""
    text = next(message for _, message in reversed(log) if message.startswith("Layers:"))
    lines = re.findall(r"^Name: .*?, LayerType: (\w+), (.*)$", text, re.M)
    return [(kind, re.findall(r"\[ONNX Layer: ([^\]]*)\]", rest), rest) for kind, rest in lines]


def report(model, **arguments):
    """What a build gave, as JSON: built, the engine's layers, log."""
    registry, network, plan = build(model, **arguments)
    layers = engine_layers(registry.log) if plan is not None else []
    return {"parsed": network is not None, "built": plan is not None, "layers": layers, "log": registry.log}


def file_report(path):
    """`report` of a model in a file."""
    with open(path, "rb") as file:
        return report(file.read())


def stack_report(state_io):
    return report(stack(state_io))


KINDS = {
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}
OUTPUTS = {  # types in alias
    "ReplaySsmPlan": ["int32", "int32", "int32"],
    "ReplayCausalConv": ["bf16", "int32"],
    "ReplaySsmFlush": ["int32"],
    "ReplaySsmStep": ["bf16", "int32"],
}


def inputs_of(plugin):
    """Good inputs of a node in alias, [[type, shape], ...]."""
    slot_stride, table = pool()
    rows, state, shared = ["int32", ["B"]], ["int32", [SLOTS, slot_stride // 4]], ["int32", [table]]
    plan = ["int32", ["W"]]
    projected, heads = ["bf16", ["B", "S", PROJECTED]], ["fp32", [H]]
    return {
        "ReplaySsmPlan": [rows, rows, rows, ["int64", ["B", "S"]], shared],
        "ReplayCausalConv": [plan, shared, projected, ["fp32", [D, K]], ["fp32", [D]], state],
        "ReplaySsmFlush": [plan, shared, heads, state],
        "ReplaySsmStep": [plan, shared, ["bf16", ["B", "S", D]], projected, heads, heads, heads, state],
    }[plugin]


def node_report(plugin, inputs, outputs, changes, rows=ROWS):
    """Builds a network of one node."""
    g = Graph("alias")
    names = [g.input(f"in{i}", KINDS[kind], shape) for i, (kind, shape) in enumerate(inputs)]
    result = g.plugin(plugin, names, "it", len(outputs), **changes)
    for name, kind in zip([result] if len(outputs) == 1 else result, outputs, strict=True):
        g.output(name, KINDS[kind], None)
    return report(g.serialized(), words=16 * -(-(64 + 68 * rows) // 64))


def left_out(plugin, index):
    """A node without its input `index`, whose place is left empty."""
    g = Graph("alias")
    names = [g.input(f"in{i}", KINDS[kind], shape) for i, (kind, shape) in enumerate(inputs_of(plugin))]
    result = g.plugin(plugin, [*names[:index], "", *names[index + 1 :]], "it", len(OUTPUTS[plugin]))
    for name, kind in zip([result] if isinstance(result, str) else result, OUTPUTS[plugin], strict=True):
        g.output(name, KINDS[kind], None)
    return report(g.serialized(), words=16)


def broken_stack(state_io, change, **arguments):
    """`stack`, with `change` done to the ONNX graph."""
    model = onnx.load_from_string(stack(state_io))
    change({node.name: node for node in model.graph.node}, model.graph)
    return report(model.SerializeToString(), **arguments)


def two_plugins_alias_one_state():
    def change(nodes, _):
        nodes["layer0/flush"].input[3] = "layer0/state"
        nodes["layer0/step"].input[7] = "layer0/flush"

    return broken_stack("alias", change)


def aliased_state_is_read_elsewhere():
    def change(_, graph):
        graph.node.append(helper.make_node("ReduceSum", ["layer0/state"], ["total"], name="total", keepdims=0))
        graph.output.append(helper.make_tensor_value_info("total", TensorProto.INT32, []))

    return broken_stack("alias", change)


def alias_feature_is_off():
    return broken_stack("alias", lambda *_: None, alias=False)


def state_is_a_constant():
    def change(nodes, graph):
        index = next(i for i, value in enumerate(graph.input) if value.name == "layer0/state")
        shape = [size.dim_value for size in graph.input[index].type.tensor_type.shape.dim]
        del graph.input[index]
        zeros = helper.make_tensor("zero", TensorProto.INT32, [1], [0])
        graph.initializer.append(numpy_helper.from_array(np.array(shape), "layer0/shape"))
        graph.node.insert(0, helper.make_node("ConstantOfShape", ["layer0/shape"], ["layer0/state"], value=zeros))

    return broken_stack("alias", change)


def flush_is_not_consumed():
    def change(nodes, _):
        nodes["layer0/step"].input[7] = "layer0/conv:1"

    return broken_stack("host_pointer", change)
