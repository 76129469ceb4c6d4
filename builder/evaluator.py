# SPDX-License-Identifier: Apache-2.0
"""Exported graphs on the CPU, without TensorRT: ONNX's reference evaluator, with our nodes done by the host ops.

For checking graphs, not for speed. 16-bit products are summed in fp32, as on a GPU; what TensorRT leaves undefined
(outputs behind a row's tokens) is NaN.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_attention import Attention as ReferenceAttention
from onnx.reference.ops.op_matmul import numpy_matmul

from .. import _core
from ..plugins import NAMESPACE

_DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
_CODES = {dtype: _core.DTYPES[name] for name, dtype in _DTYPES.items()}
_ALIGNMENT = 64
_TABLE_HEAD_WORDS = 32  # of the table that a plan of lengths brings: the error word, and no cursors


class HostGraph:
    """An exported graph. Calling it runs it once, from and to named arrays; it keeps nothing from call to call.

    With state_io "alias" the state comes back as new arrays `new_table` and `new_state.N`, although TensorRT's outputs
    leave them out. With "same_pointer" and "host_pointer" the given arrays, or the memory at the given addresses, are
    changed in place.
    """

    def __init__(self, model: str | Path | onnx.ModelProto):
        if not isinstance(model, onnx.ModelProto):
            model = onnx.load(model)
        names = [output.name for output in model.graph.output]
        for node in model.graph.node:
            if node.domain == NAMESPACE:
                names += [name for name in node.output if name.startswith("new_") and name not in names]
        self.inputs = {value.name: value.type.tensor_type for value in model.graph.input}
        self.outputs = names
        self._evaluator = ReferenceEvaluator(model, new_ops=_OPS)

    def __call__(self, **given: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self.outputs, self._evaluator.run(self.outputs, given), strict=True))


class _Node(OpRun):
    """One of our nodes. The plan, table and state that it works on are numpy arrays; the binding takes addresses."""

    op_domain = NAMESPACE

    def _run(self, *inputs, **fields):
        self.fields, self.out_dtype = fields, _DTYPES[fields["activation"]]
        geometry = _core.Geometry(
            *(fields[name] for name in ("num_heads", "head_dim", "num_groups", "state_dim", "conv_kernel"))
        )
        config = _core.Config(
            fields["window"],
            fields["max_step_tokens"],
            _core.CHECKPOINT_FORMATS[fields["checkpoint"]],
            _core.READ_COPY_FORMATS[fields["read_copy"]],
            _core.DTYPES[fields["activation"]],
            int(fields["seed"]),
        )
        self.core = _core.Spec(geometry, config, fields["num_slots"], fields["num_layers"], fields.get("first_head", 0))
        self.layer_bytes = fields["num_slots"] * _core.Layout(geometry, config).slot_stride
        self.lengths = fields["plan_mode"] == "lengths"
        self.inner = fields["num_heads"] * fields["head_dim"]
        self.group = fields["num_groups"] * fields["state_dim"]
        return self.compute(*inputs)

    def memory(self, given: np.ndarray, bytes_: int, copy: bool) -> np.ndarray:
        """uint8 [bytes_] of what is given, or of the address that is given."""
        if self.fields["state_io"] == "host_pointer":
            return np.ctypeslib.as_array((ctypes.c_uint8 * bytes_).from_address(int(given[0])))
        if given.nbytes != bytes_ or not given.flags.c_contiguous:
            raise ValueError(f"{self.onnx_node.name}: expected {bytes_} contiguous bytes, got {given.nbytes}")
        own = given.reshape(-1).view(np.uint8)
        if not copy:
            return own
        new = _aligned((bytes_,), np.uint8)
        new[:] = own
        return new

    def state(self, given: np.ndarray) -> np.ndarray:
        """A layer's memory; with "alias" a new one, so that the graph's edges alone say what follows what."""
        return self.memory(given, self.layer_bytes, copy=self.fields["state_io"] == "alias")

    def undefined(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, np.nan, self.out_dtype)

    def layer_call(self, plan: np.ndarray, table: np.ndarray, state: np.ndarray) -> tuple:
        """First arguments of a layer op. The binding knows whole pools: it gets the address of one whose layer of this
        number lies at `state`."""
        if not self.lengths:  # else what the plan gives is the head of a table
            table = self.memory(table, self.core.table_bytes, copy=False)
        layer = self.fields["layer"]
        pool = state.ctypes.data - layer * self.layer_bytes
        return _core.HOST, table.ctypes.data, pool, layer, plan.ctypes.data, int(plan[0])

    def batch(self, shape: tuple[int, ...], lengths: tuple) -> tuple[bool, int, int]:
        """Whether the tokens of a tensor of this shape are prompts, how many they are, and the most of a row."""
        if not self.lengths:
            rows, width, _ = shape
            return width > self.fields["max_step_tokens"], rows * width, width
        types, prompts = lengths
        context = bool((types == 0).all())
        return context, shape[0], int(prompts.max()) if context else 1

    def after(self, state: np.ndarray, given: np.ndarray) -> np.ndarray:
        """What the next node of the chain waits for."""
        if self.fields["state_io"] == "alias":
            return state.view(np.int32).reshape(given.shape)
        return np.zeros(1, np.int32)


class ReplaySsmPlan(_Node):
    def compute(self, *inputs):
        return self.of_lengths(*inputs) if self.lengths else self.of_cursors(*inputs)

    def of_lengths(self, slots, types, prompts, sequences, ends):
        plan = self.empty_plan(slots)
        table = _aligned((_TABLE_HEAD_WORDS,), np.int32)
        rows = [np.ascontiguousarray(row, np.int32) for row in (slots, prompts, sequences, ends)]
        addresses = (row.ctypes.data for row in rows)
        context = bool((types == 0).all())
        self.core.plan_lengths(_core.HOST, *addresses, len(slots), context, plan.ctypes.data, table.ctypes.data)
        return plan, table

    def of_cursors(self, slots, tokens, accepted, token_ids, table):
        alias = self.fields["state_io"] == "alias"
        memory = self.memory(table, self.core.table_bytes, copy=alias)
        plan = self.empty_plan(slots)
        rows = [np.ascontiguousarray(row, np.int32) for row in (slots, tokens, accepted)]
        addresses = (row.ctypes.data for row in rows)
        self.core.plan_next(
            _core.HOST, memory.ctypes.data, *addresses, len(slots), token_ids.shape[1], plan.ctypes.data
        )
        at = self.core.error_offset
        status = memory[at : at + _core.ERROR_BYTES].view(np.int32).copy()
        if self.fields["state_io"] == "host_pointer":
            return plan, status
        return plan, status, memory.view(np.int32) if alias else table

    def empty_plan(self, slots):
        return _aligned((_core.plan_bytes(len(slots)) // 4,), np.int32)


class ReplayCausalConv(_Node):
    def compute(self, plan, table, given, weight, bias, *rest):
        *lengths, state = rest
        prompts, tokens, longest = self.batch(given.shape, lengths)
        given, weight, bias = map(np.ascontiguousarray, (given, weight, bias))
        out = self.undefined((*given.shape[:-1], self.inner + 2 * self.group))
        first = 0 if prompts else self.inner + self.group  # of a step's tokens C alone, x and B go into the rings
        memory = self.state(state)
        self.core.conv_step(
            *self.layer_call(plan, table, memory),
            given.ctypes.data + self.fields["in_offset"] * given.itemsize,
            given.shape[-1],
            *_vector(weight),
            *_vector(bias),
            out.ctypes.data + first * out.itemsize,
            out.shape[-1],
            tokens,
            longest,
            not prompts,
        )
        return out, self.after(memory, state)


class ReplaySsmFlush(_Node):
    def compute(self, plan, table, A_log, *state):
        memory = self.state(state[-1])
        self.core.flush(*self.layer_call(plan, table, memory), *_vector(A_log))
        return (self.after(memory, state[-1]),)


class ReplaySsmStep(_Node):
    def compute(self, plan, table, xBC, dt, A_log, D, dt_bias, *rest):
        fields, channels, state = self.fields, xBC.shape[-1], rest[-1]
        prompts, tokens, longest = self.batch(xBC.shape, rest[:2])
        xBC, dt = map(np.ascontiguousarray, (xBC, dt))
        out = self.undefined((*xBC.shape[:-1], self.inner))
        memory = self.state(state)
        columns = [
            (xBC.ctypes.data + offset * xBC.itemsize, channels, size)
            for offset, size in (
                (0, fields["head_dim"]),
                (self.inner, fields["state_dim"]),
                (self.inner + self.group, fields["state_dim"]),
            )
        ]
        if not prompts:  # the convolution has stored x and B as records
            columns[:2] = [(0, 0, 0)] * 2
        scan = self.core.prefill if prompts else self.core.step_flushed
        scan(
            *self.layer_call(plan, table, memory),
            *(value for column in columns for value in column),
            dt.ctypes.data + fields["dt_offset"] * dt.itemsize,
            _CODES[dt.dtype],
            dt.shape[-1],
            1,
            *_vector(A_log),
            *_vector(D),
            *_vector(dt_bias),
            out.ctypes.data,
            self.inner,
            fields["head_dim"],
            float(fields["dt_min"]),
            float(fields["dt_max"]),
            tokens,
            longest,
        )
        if fields["state_io"] == "host_pointer":
            return (out,)
        return out, self.after(memory, state) if fields["state_io"] == "alias" else state


class MatMul(OpRun):
    """ONNX's own rounds each partial sum to 16 bits."""

    def _run(self, a, b):
        return (numpy_matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),)


class Attention(ReferenceAttention):
    """As MatMul: fp32 within."""

    def _run(self, Q, K, V, attn_mask=None, *others, **attributes):
        wide = (values.astype(np.float32) for values in (Q, K, V))
        return tuple(
            values if values is None else values.astype(Q.dtype)
            for values in super()._run(*wide, attn_mask, *others, **attributes)
        )


class TRT_Attention(OpRun):
    """TensorRT's attention of the newest tokens over the first `lengths` keys of each row; q is scaled already."""

    op_domain = "trt"

    def _run(self, q, keys, values, mask, query_lengths, lengths, causal_kind=None):
        if mask is not None or query_lengths is not None or causal_kind != "lower_right":
            raise NotImplementedError(f"{self.onnx_node.name}: expected lengths and causal_kind lower_right only")
        sharing, width, capacity = q.shape[1] // keys.shape[1], q.shape[2], keys.shape[2]
        keys, values = (np.repeat(cached.astype(np.float32), sharing, axis=1) for cached in (keys, values))
        last = lengths[:, None] - width + np.arange(width)
        scores = q.astype(np.float32) @ keys.swapaxes(2, 3)
        scores = np.where(np.arange(capacity) <= last[:, None, :, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return ((weights / weights.sum(-1, keepdims=True) @ values).astype(q.dtype),)


class TRT_FP4DynamicQuantize(OpRun):
    """TensorRT's quantisation of activations to NVFP4."""

    op_domain = "trt"

    def _run(self, x, scale, axis=None, block_size=None, scale_type=None):
        blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block_size)
        largest = np.abs(blocks).max(-1) / (6 * scale)
        scales = np.clip(largest, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
        values = np.clip(blocks / (scales.astype(np.float32) * scale)[..., None], -6, 6)
        return values.astype(ml_dtypes.float4_e2m1fn).reshape(x.shape), scales


def _vector(values: np.ndarray) -> tuple[int, int]:
    return values.ctypes.data, _CODES[values.dtype]


def _aligned(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Zeros at an address that the library accepts for plans and slots."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


_OPS = [
    ReplaySsmPlan,
    ReplayCausalConv,
    ReplaySsmFlush,
    ReplaySsmStep,
    MatMul,
    Attention,
    TRT_Attention,
    TRT_FP4DynamicQuantize,
]
