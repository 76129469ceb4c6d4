# SPDX-License-Identifier: Apache-2.0
"""A tensorrt_llm made of contract.json alone, that records the network which a model class builds.

Whatever the contract does not name does not exist, and a call with another parameter fails. Beneath is as much of
tensorrt as adding a plugin takes. A tensor knows its type and shape (-1: of dynamic size); those of the outputs of
TensorRT-LLM's layers come from the contract, those of our plugins from docs/plugins.md.
"""

import sys
import types
from dataclasses import dataclass, field

import numpy as np

from trtllm_replayssm import plugins
from trtllm_replayssm.integrations.trtllm_build.contract import CONTRACT, evaluate, parameter_shapes

DTYPES = {name: name for name in ("float32", "float16", "bfloat16", "int32", "int64")}
ENTRIES = {entry["name"]: entry for entry in CONTRACT["modules"]}
RUNTIME_INPUTS = {entry["name"]: entry for entry in CONTRACT["runtime"]["inputs"]}


@dataclass
class Node:
    """A call. what: the contract's name, or the plugin's. given: arguments by name; owner: the layer of a forward."""

    what: str
    given: dict
    outputs: list
    owner: object = None
    name: str = ""


def _strictly(what, allowed, args, kwargs):
    """The arguments by name; TypeError for one that the contract does not name."""
    names = list(allowed)
    if len(args) > len(names):
        raise TypeError(f"{what}: the contract knows {len(names)} parameters, got {len(args)}")
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names or name in given:
            raise TypeError(f"{what}: the contract knows no parameter {name!r}")
        given[name] = value
    return given


@dataclass
class Recorder:
    """plugin_config: options by name, laid over the contract's, which are all on."""

    plugin_config: dict = field(default_factory=dict)

    def __post_init__(self):
        self.nodes, self.inputs, self.outputs = [], {}, {}
        self.tensorrt = _tensorrt()

    def install(self, monkeypatch):
        """Puts it in the place of tensorrt and tensorrt_llm, and forgets modules that had another."""
        modules = {"tensorrt": self.tensorrt, "tensorrt_llm": types.ModuleType("tensorrt_llm")}
        for entry in CONTRACT["modules"]:
            path = entry["module"]
            for end in range(1, path.count(".") + 2):
                name = ".".join(path.split(".")[:end])
                modules.setdefault(name, types.ModuleType(name))
            setattr(modules[path], entry["name"], self._made(entry))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        for name in ("model", "network"):
            monkeypatch.delitem(sys.modules, f"trtllm_replayssm.integrations.trtllm_build.{name}", raising=False)

    def add_plugin_v3(self, inputs, shape_inputs, plugin):
        """Of TensorRT's network; its tensors are those that stand behind the contract's."""
        assert shape_inputs == [] and all(isinstance(tensor, TrtTensor) for tensor in inputs)
        outputs = [TrtTensor(dtype, shape) for dtype, shape in _outputs(plugin)]
        given = {"inputs": inputs, "fields": plugin.fields}
        self.nodes.append(Node(plugin.kind, given, outputs, name=plugin.node))
        return types.SimpleNamespace(get_output=lambda index: outputs[index])

    def _made(self, entry):
        kind, recorder = entry["kind"], self
        if kind == "tensor":

            def tensor(*args, **kwargs):
                given = _strictly("Tensor", entry["init"], args, kwargs)
                assert given["name"] not in recorder.inputs, f"{given['name']}: two inputs of one name"
                assert len(given["dim_range"]) == len(given["shape"]), f"{given['name']}: a range for each dimension"
                made = TrtTensor(given["dtype"], tuple(given["shape"]))
                recorder.inputs[given["name"]] = Tensor(recorder, made, ranges=given["dim_range"])
                return recorder.inputs[given["name"]]

            return tensor
        if kind == "layer":
            return type(entry["name"], (_Layer,), {"entry": entry, "recorder": self})
        if kind == "record":
            return type(entry["name"], (_Record,), {"entry": entry})
        if kind == "enum":
            return types.SimpleNamespace(**{name: name for name in entry["members"]})
        if kind == "keys":
            return dict.fromkeys(entry["members"])
        if kind == "parameter":
            return lambda *args, **kwargs: Parameter(recorder, **_strictly("Parameter", entry["init"], args, kwargs))
        if kind == "base":
            return Module
        if kind == "list":
            return ModuleList
        if kind == "mapping":
            return Mapping
        if kind == "net":
            options = dict.fromkeys(entry["plugin_config"], True) | {
                "tokens_per_block": 32,
                "multiple_profiles": False,
                "streamingllm": False,
                "use_paged_context_fmha": False,
            }
            net = types.SimpleNamespace(plugin_config=types.SimpleNamespace(**(options | self.plugin_config)))
            return lambda: net
        if kind == "trtnet":
            network = types.SimpleNamespace(**{name: getattr(self, name) for name in entry["methods"]})
            return lambda: network
        if kind == "model":
            return type("PretrainedModel", (_PretrainedModel,), {"entry": entry, "recorder": self})
        assert kind == "function", kind
        return self._function(entry)

    def _function(self, entry):
        name, output = entry["name"], entry.get("output", {})

        def call(*args, **kwargs):
            given = _strictly(name, entry["parameters"], args, kwargs)
            if "returns_methods" in entry:
                methods = entry["returns_methods"]
                return types.SimpleNamespace(
                    **{m: lambda *a, m=m, **k: _strictly(m, methods[m], a, k) for m in methods}
                )
            if "value" in output:
                value = given[output["value"]]
                return DTYPES[value] if name == "str_dtype_to_trt" else value
            if "wraps" in output:
                return Tensor(self, given[output["wraps"]])
            return self.call(name, given, output)

        return call

    def call(self, name, given, output, owner=None):
        """Records a call and returns its outputs, by the contract's rule for them."""
        source = given[output.get("like", next(iter(given)))]
        dtype, shape = source.trt_tensor.dtype, list(source.trt_tensor.shape)
        arguments = {**(owner.given if owner else {}), **given}
        if "dtype" in output:
            dtype = arguments[output["dtype"]]
            dtype = DTYPES.get(dtype, dtype)
        if "append" in output:
            shape.append(arguments[output["append"]])
        if "last" in output:
            shape[-1] = evaluate(output["last"], arguments)
        if "first" in output:
            shape[0] = given[output["first"]].trt_tensor.shape[0]
        if "sections" in output:
            shapes = [[*shape[:-1], size] for size in given[output["sections"]]]
            assert sum(given[output["sections"]]) == shape[-1]
        else:
            shapes = [shape]
        outputs = [Tensor(self, TrtTensor(dtype, tuple(shape))) for shape in shapes]
        self.nodes.append(Node(name, given, outputs, owner))
        if "sections" in output:
            return outputs
        return (outputs[0], None) if arguments.get(output.get("pair_if")) else outputs[0]


@dataclass(eq=False)
class TrtTensor:
    """A tensor of TensorRT's network. parameter: whose value it is."""

    dtype: str
    shape: tuple
    parameter: object = None


class Tensor:
    def __init__(self, recorder, trt_tensor, ranges=None):
        self.recorder, self.trt_tensor, self.ranges = recorder, trt_tensor, ranges

    def mark_output(self, name, dtype):
        self.recorder.outputs[name] = self
        self.recorder.nodes.append(Node("mark_output", {"input": self, "name": name, "dtype": dtype}, []))

    def _pair(self, what, other):
        assert self.trt_tensor.dtype == other.trt_tensor.dtype, f"{what} of different types in a strongly typed network"
        assert tuple(self.trt_tensor.shape) == tuple(other.trt_tensor.shape)
        return self.recorder.call(what, {"input": self, "b": other}, {})

    def __add__(self, other):
        return self._pair("__add__", other)

    def __mul__(self, other):
        return self._pair("__mul__", other)


class Parameter:
    def __init__(self, recorder, shape, dtype):
        self.recorder, self.shape, self.dtype, self._value = recorder, tuple(shape), dtype, None

    @property
    def value(self):
        if self._value is None:
            self._value = Tensor(self.recorder, TrtTensor(DTYPES[self.dtype], self.shape, parameter=self))
        return self._value


class Module:
    def __init__(self):
        self.__dict__["members"] = {}

    def __setattr__(self, name, value):
        if isinstance(value, (Module, Parameter)):
            self.members[name] = value
        self.__dict__[name] = value

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def named_parameters(self, prefix=""):
        for name, member in self.members.items():
            if isinstance(member, Parameter):
                yield prefix + name, member
            else:
                yield from member.named_parameters(f"{prefix}{name}.")


class ModuleList(Module):
    def __init__(self, modules):
        super().__init__()
        for index, module in enumerate(modules):
            setattr(self, str(index), module)

    def __iter__(self):
        return iter(self.members.values())


class _Layer(Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.given = _strictly(self.entry["name"], self.entry["init"], args, kwargs)
        for name, shape in parameter_shapes(self.entry, self.given).items():
            parent = self
            *path, last = name.split(".")
            for part in path:
                if part not in parent.members:
                    setattr(parent, part, Module())
                parent = parent.members[part]
            setattr(parent, last, Parameter(self.recorder, shape, self.given["dtype"]))

    def forward(self, *args, **kwargs):
        given = _strictly(f"{self.entry['name']}.forward", self.entry["forward"], args, kwargs)
        return self.recorder.call(self.entry["name"], given, self.entry["output"], owner=self)


class _Record:
    def __init__(self, *args, **kwargs):
        self.__dict__.update(_strictly(self.entry["name"], self.entry["init"], args, kwargs))


class Mapping:
    def __init__(self, *args, **kwargs):
        given = _strictly("Mapping", ENTRIES["Mapping"]["init"], args, kwargs)
        self.rank, self.tp_size, self.pp_size = given["rank"], given["tp_size"], given["pp_size"]
        self.world_size = given["world_size"]
        assert self.world_size == self.tp_size * self.pp_size
        self.tp_rank, self.pp_rank = self.rank % self.tp_size, self.rank // self.tp_size
        self.tp_group = list(range(self.pp_rank * self.tp_size, (self.pp_rank + 1) * self.tp_size))

    def is_first_pp_rank(self):
        return self.pp_rank == 0

    def is_last_pp_rank(self):
        return self.pp_rank == self.pp_size - 1

    def prev_pp_rank(self):
        return self.rank - self.tp_size

    def next_pp_rank(self):
        return self.rank + self.tp_size

    def pp_layers(self, num_layers):
        """First stages one larger, as the contract states."""
        least, larger = divmod(num_layers, self.pp_size)
        sizes = [least + (stage < larger) for stage in range(self.pp_size)]
        first = sum(sizes[: self.pp_rank])
        return list(range(first, first + sizes[self.pp_rank]))


class _PretrainedModel(Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def get_profiles_ranges(self, **given):
        given = _strictly("get_profiles_ranges", self.entry["methods"]["get_profiles_ranges"], (), given)
        most = given["max_batch_size"]
        ranges = {
            "bb_range": [[1, (1 + most) // 2, most]],
            "bbd_range": [[1, (1 + most) // 2, most]],
            "num_tokens_range": [[1, most, given["max_num_tokens"]]],
        }
        return 1, {name: ranges[name] for name in self.entry["ranges"]}

    def prepare_attention_inputs(self, **given):
        """Tensors that the runtime binds by name are inputs of the network; the others nobody looks into."""
        methods = self.entry["methods"]
        given = _strictly("prepare_attention_inputs", methods["prepare_attention_inputs"], (), given)
        stage = given["mapping"].pp_layers(given["num_layers"])
        assert stage, "upstream fails without an attention layer"
        self.attention_layers = len(stage)
        inputs = {}
        for name in self.entry["attention_inputs"]:
            inputs[name] = f"the runtime's {name}"
            if name in RUNTIME_INPUTS:
                known = RUNTIME_INPUTS[name]
                made = TrtTensor(known["dtype"], (-1,))
                inputs[name] = self.recorder.inputs[name] = Tensor(self.recorder, made)
        return inputs


# ---- tensorrt


def _tensorrt():
    """The module: types, a registry that knows our plugins once their library was loaded, and plugins of fields."""
    module, loaded = types.ModuleType("tensorrt"), []

    class Creator:
        plugin_version, plugin_namespace = plugins.VERSION, plugins.NAMESPACE

        def __init__(self, name):
            self.name = name

        def create_plugin(self, node, collection, phase):
            assert phase == "BUILD"
            fields = {}
            for name, data, kind in collection:
                assert (
                    name not in fields
                    and data.dtype == {"INT32": np.int32, "FLOAT32": np.float32, "CHAR": np.int8}[kind]
                )
                fields[name] = data.tobytes()[:-1].decode() if kind == "CHAR" else data.item()
                assert kind == "CHAR" or data.shape == (1,)
            return types.SimpleNamespace(kind=self.name, node=node, fields=fields)

    class Registry:
        @property
        def all_creators(self):
            return [Creator(name) for name in plugins.PLUGINS] if loaded else []

        def load_library(self, path):
            loaded.append(path)

        def get_creator(self, name, version, namespace):
            assert (version, namespace) == (plugins.VERSION, plugins.NAMESPACE)
            return next((creator for creator in self.all_creators if creator.name == name), None)

    registry = Registry()
    module.get_plugin_registry = lambda: registry
    module.int32, module.DataType = "int32", str
    module.PluginField = lambda name, data, kind: (name, data, kind)
    module.PluginFieldCollection = list
    module.PluginFieldType = types.SimpleNamespace(INT32="INT32", FLOAT32="FLOAT32", CHAR="CHAR")
    module.TensorRTPhase = types.SimpleNamespace(BUILD="BUILD")
    return module


def _outputs(plugin):
    fields = plugin.fields
    inner = fields["num_heads"] * fields["head_dim"]
    activation = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[fields["activation"]]
    order = "int32", (1,)
    return {
        "ReplaySsmPlan": [("int32", (-1,)), ("int32", (32,))],
        "ReplayCausalConv": [
            (activation, (-1, inner + 2 * fields["num_groups"] * fields["state_dim"])),
            order,
        ],
        "ReplaySsmFlush": [order],
        "ReplaySsmStep": [(activation, (-1, inner))],
    }[plugin.kind]
