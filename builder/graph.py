# SPDX-License-Identifier: Apache-2.0
"""An ONNX graph in the making."""

from __future__ import annotations

from collections.abc import Callable

import torch
from onnx import ModelProto, TensorProto, helper

from ..plugins import NAMESPACE
from .weight_file import WeightFile

_OPSET = 24  # TensorScatter
_IR_VERSION = 10


class Graph:
    """Nodes are named by the caller; a value, if it has no name of its own, is called after its node.

    dtype: of weights and activations.
    """

    def __init__(self, name: str, weights: WeightFile, dtype: torch.dtype):
        self.name, self.dtype = name, dtype
        self._weights = weights
        self._nodes, self._inputs, self._outputs = [], [], []
        self._initializers: dict[str, TensorProto] = {}

    def input(self, name: str, kind: int, shape: list[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: list[int | str]) -> None:
        """Makes a value an output of the model."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def weight(self, name: str, read: Callable[[], torch.Tensor]) -> str:
        if name not in self._initializers:
            self._initializers[name] = self._weights.tensor(name, read)
        return name

    def constant(self, name: str, values, dtype: torch.dtype) -> str:
        return self.weight(name, lambda: torch.as_tensor(values, dtype=dtype))

    def node(self, op: str, name: str, *inputs: str, output: str | None = None, **attributes) -> str:
        output = output or name
        self._nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))
        return output

    def fp4(self, name: str, x: str, scale: str) -> tuple[str, str]:
        """x in NVFP4, by TensorRT's node for it: E2M1 codes, and E4M3 scales of blocks of 16 in the last dimension."""
        outputs = f"{name}.codes", f"{name}.scales"
        fields = dict(axis=-1, block_size=16, scale_type=TensorProto.FLOAT8E4M3FN)
        self._nodes.append(
            helper.make_node("TRT_FP4DynamicQuantize", [x, scale], outputs, name, domain="trt", **fields)
        )
        return outputs

    def top_k(self, name: str, x: str, count: str) -> tuple[str, str]:
        """The largest of the last dimension: values, indices int64."""
        outputs = f"{name}.values", f"{name}.indices"
        self._nodes.append(helper.make_node("TopK", [x, count], outputs, name=name, axis=-1))
        return outputs

    def plugin(self, op: str, name: str, inputs: list[str], outputs: list[str], fields: dict) -> list[str]:
        """One of our nodes."""
        node = helper.make_node(op, inputs, outputs, name=name, domain=NAMESPACE, plugin_namespace=NAMESPACE, **fields)
        self._nodes.append(node)
        return outputs

    def model(self) -> ModelProto:
        graph = helper.make_graph(
            self._nodes, self.name, self._inputs, self._outputs, list(self._initializers.values())
        )
        domains = dict.fromkeys(node.domain for node in self._nodes)
        imports = [helper.make_opsetid(domain, 1 if domain else _OPSET) for domain in domains]
        return helper.make_model(graph, opset_imports=imports, ir_version=_IR_VERSION, producer_name="trtllm-replayssm")
