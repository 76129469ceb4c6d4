# SPDX-License-Identifier: Apache-2.0
"""Our plugins in the network that TensorRT-LLM is building."""

from __future__ import annotations

import numpy as np
import tensorrt as trt
from tensorrt_llm._common import default_trtnet
from tensorrt_llm.functional import Tensor, _create_tensor

from ... import plugins

_FIELD_TYPES = {int: (np.int32, "INT32"), float: (np.float32, "FLOAT32")}


def add_plugin(plugin: str, node: str, inputs: list[Tensor], fields: dict, outputs: int) -> list[Tensor]:
    """Adds one of our plugins and returns its outputs. docs/plugins.md has inputs, fields and outputs.

    Raises:
        RuntimeError: it is not registered, or refuses its fields or inputs, with its reason.
    """
    creator = trt.get_plugin_registry().get_creator(plugin, plugins.VERSION, plugins.NAMESPACE)
    if creator is None:
        raise RuntimeError(f"plugin {plugin}: not registered in this process")
    given, kept = [], []  # a field points to its data
    for name, value in fields.items():
        if isinstance(value, str):
            data, kind = np.frombuffer(value.encode() + b"\0", np.int8), "CHAR"
        else:
            dtype, kind = _FIELD_TYPES[type(value)]
            data = np.array([value], dtype)
        kept.append(data)
        given.append(trt.PluginField(name, data, getattr(trt.PluginFieldType, kind)))
    made = creator.create_plugin(node, trt.PluginFieldCollection(given), trt.TensorRTPhase.BUILD)
    if made is None:
        raise RuntimeError(plugins.last_error() or f"plugin {plugin} {node!r}: not created; TensorRT's log says why")
    layer = default_trtnet().add_plugin_v3([tensor.trt_tensor for tensor in inputs], [], made)
    if layer is None:
        raise RuntimeError(plugins.last_error() or f"plugin {plugin} {node!r}: refused by the network")
    return [_create_tensor(layer.get_output(index), layer) for index in range(outputs)]
