# SPDX-License-Identifier: Apache-2.0
"""A recorded network at work on the CPU: our plugins by the host ops, TensorRT-LLM's layers by numpy in float32."""

import numpy as np
from onnx import TensorProto, helper

from trtllm_replayssm.builder.evaluator import HostGraph
from trtllm_replayssm.plugins import NAMESPACE, PLUGINS

_KINDS = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "int64": TensorProto.INT64}


def silu(x):
    return x / (1 + np.exp(-x))


class NetworkRun:
    """weights: by parameter name. Keys and values are kept by (layer, slot): what TensorRT-LLM's own cache would do."""

    def __init__(self, recorder, model, weights):
        self.recorder, self.weights, self.cache = recorder, {}, {}
        for name, parameter in model.named_parameters():
            self.weights[id(parameter)] = np.asarray(weights[name], np.float32)
        self.plugins = {}

    def __call__(self, feeds):
        """feeds: arrays by the name of the runtime's input. Returns the network's outputs by name."""
        inputs = self.recorder.inputs
        self.values, self.feeds = {id(inputs[name].trt_tensor): array for name, array in feeds.items()}, feeds
        outputs = {}
        for node in self.recorder.nodes:
            if node.what == "mark_output":
                outputs[node.given["name"]] = self.value(node.given["input"])
                continue
            made = self.plugin(node) if node.what in PLUGINS else getattr(self, node.what)(node)
            for tensor, value in zip(node.outputs, made, strict=True):
                self.values[id(getattr(tensor, "trt_tensor", tensor))] = value
        return outputs

    def value(self, tensor):
        tensor = getattr(tensor, "trt_tensor", tensor)
        if tensor.parameter is not None:
            return self.weights[id(tensor.parameter)]
        return self.values[id(tensor)]

    def plugin(self, node):
        inputs = [self.value(tensor) for tensor in node.given["inputs"]]
        if id(node) not in self.plugins:
            self.plugins[id(node)] = _one_node(node, inputs)
        names = [f"in{index}" for index in range(len(inputs))]
        return list(self.plugins[id(node)](**dict(zip(names, inputs, strict=True))).values())

    def own(self, node, name):
        parameter = dict(node.owner.named_parameters()).get(name)
        return None if parameter is None else self.weights[id(parameter)]

    # ---- TensorRT-LLM's layers and functions, by their names in the contract

    def Embedding(self, node):
        return [self.own(node, "weight")[self.value(node.given["x"])]]

    def ColumnLinear(self, node, name="", x=None):
        x = self.value(node.given["x"]) if x is None else x
        bias = self.own(node, f"{name}bias")
        return [x @ self.own(node, f"{name}weight").T + (0 if bias is None else bias)]

    RowLinear = ColumnLinear

    def RmsNorm(self, node):
        x, groups = self.value(node.given["x"]), node.owner.given["num_groups"]
        grouped = x.reshape(len(x), groups, -1)
        grouped = grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + node.owner.given["eps"])
        return [grouped.reshape(x.shape) * self.own(node, "weight")]

    def MLP(self, node):
        assert node.owner.given["hidden_act"] == "squared-relu"
        (inner,) = self.ColumnLinear(node, "fc.", self.value(node.given["hidden_states"]))
        return self.ColumnLinear(node, "proj.", np.maximum(inner, 0) ** 2)

    def Attention(self, node):
        given = node.owner.given
        assert given["position_embedding_type"] == "learned_absolute" and given["attention_mask_type"] == "causal"
        heads, kv, size = given["num_attention_heads"], given["num_kv_heads"], given["attention_head_size"]
        (qkv,) = self.ColumnLinear(node, "qkv.", self.value(node.given["hidden_states"]))
        out, ends = np.empty((len(qkv), heads * size), np.float32), self.feeds["last_token_ids"]
        for row, slot in enumerate(self.feeds["slot_mapping"]):
            first = ends[row - 1] if row else 0
            mine = qkv[first : ends[row]].reshape(-1, heads + 2 * kv, size)
            key = given["local_layer_idx"], int(slot)
            if self.feeds["host_request_types"][row] == 0:
                self.cache[key] = mine[:0, :kv], mine[:0, :kv]
            keys, values = (
                np.concatenate([old, new])
                for old, new in zip(self.cache[key], (mine[:, heads : heads + kv], mine[:, heads + kv :]), strict=True)
            )
            self.cache[key] = keys, values
            shared = heads // kv
            scores = np.einsum("thd,shd->hts", mine[:, :heads], keys.repeat(shared, 1)) / np.sqrt(size)
            late = np.arange(len(keys)) > (len(keys) - len(mine) + np.arange(len(mine)))[:, None]
            scores = np.where(late, -np.inf, scores)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed = np.einsum("hts,shd->thd", weights, values.repeat(shared, 1))
            out[first : ends[row]] = mixed.reshape(len(mine), -1)
        return self.ColumnLinear(node, "dense.", out)

    def cast(self, node):
        return [self.value(node.given["input"])]

    def silu(self, node):
        return [silu(self.value(node.given["input"]))]

    def split(self, node):
        sections = np.cumsum(node.given["split_size_or_sections"])[:-1]
        return np.split(self.value(node.given["tensor"]), sections, node.given["dim"])

    def gather_last_token_logits(self, node):
        ends = self.value(node.given["last_token_ids"])
        return [self.value(node.given["hidden_states"])[ends - 1]]

    def __add__(self, node):
        return [self.value(node.given["input"]) + self.value(node.given["b"])]

    def __mul__(self, node):
        return [self.value(node.given["input"]) * self.value(node.given["b"])]


def plugin_graph(nodes):
    """Our plugins of a network as an ONNX model; what comes from elsewhere is an input. Rows are B, tokens S."""
    kinds = _KINDS | {"bfloat16": TensorProto.BFLOAT16}
    made = {id(tensor): f"{node.name}.{index}" for node in nodes for index, tensor in enumerate(node.outputs)}
    names, inputs, own = {}, [], []
    for node in nodes:
        for tensor in node.given["inputs"]:
            if id(tensor) in made or id(tensor) in names:
                continue
            names[id(tensor)] = f"in{len(inputs)}"
            size = "B" if len(tensor.shape) == 1 else "S"
            shape = [size if extent == -1 else extent for extent in tensor.shape]
            inputs.append(helper.make_tensor_value_info(names[id(tensor)], kinds[tensor.dtype], shape))
        given = [made.get(id(tensor)) or names[id(tensor)] for tensor in node.given["inputs"]]
        outputs = [made[id(tensor)] for tensor in node.outputs]
        own.append(helper.make_node(node.what, given, outputs, node.name, domain=NAMESPACE, **node.given["fields"]))
    used = {id(tensor) for node in nodes for tensor in node.given["inputs"]}
    loose = [tensor for node in nodes for tensor in node.outputs if id(tensor) not in used]
    results = [helper.make_tensor_value_info(made[id(tensor)], kinds[tensor.dtype], None) for tensor in loose]
    imports = [helper.make_opsetid("", 24), helper.make_opsetid(NAMESPACE, 1)]
    graph = helper.make_graph(own, "plugins", inputs, results)
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _one_node(node, inputs):
    """One of our plugins as an ONNX graph, for the evaluator."""
    names = [f"in{index}" for index in range(len(inputs))]
    outputs = [f"out{index}" for index in range(len(node.outputs))]
    fields = dict(node.given["fields"])
    made = helper.make_node(node.what, names, outputs, node.name, domain=NAMESPACE, **fields)
    of = lambda name, array: helper.make_tensor_value_info(name, _KINDS[array.dtype.name], None)  # noqa: E731
    graph = helper.make_graph(
        [made],
        node.name,
        [of(name, array) for name, array in zip(names, inputs, strict=True)],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
    )
    imports = [helper.make_opsetid("", 24), helper.make_opsetid(NAMESPACE, 1)]
    return HostGraph(helper.make_model(graph, opset_imports=imports, ir_version=10))
