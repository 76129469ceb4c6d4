# SPDX-License-Identifier: Apache-2.0
"""The torch operators `torch.ops.trtllm_replayssm.*` over libreplayssm.

Each takes tensors and plain values only, declares what it mutates and returns nothing, so that torch.compile can trace
it. `spec` is the text of a pool's sizes and formats (`pool_spec`): a value, not a handle, so that a traced graph means
the same in another process. `table` holds error word, counters and cursors of a pool, `data` its slots.
"""

from dataclasses import astuple
from functools import cache, wraps

import torch

from . import _core
from .config import ReplayConfig
from .geometry import MambaGeometry

ACTIVATIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_CODES = {ACTIVATIONS[name]: code for name, code in _core.DTYPES.items()}

_POOL = "Tensor(a!) table, Tensor(b!) data, str spec"
_LAYER = f"{_POOL}, int layer, Tensor plan, int rows"
_CHECKPOINT = "*, Tensor(e!)? checkpoint=None"  # of a pool whose checkpoints lie in another's tensor
_AFTER_B = (
    "Tensor C, Tensor dt, Tensor A_log, Tensor? D, Tensor? dt_bias, Tensor(c!) out, float dt_min, float dt_max, "
    "int max_count"
)
_SCAN = f"{_LAYER}, Tensor x, Tensor B, {_AFTER_B}"
_STEP = f"{_LAYER}, Tensor? x, Tensor? B, {_AFTER_B}"  # None: in the rings
SCHEMAS = {
    "reset": "Tensor(a!) table, str spec, Tensor slots, Tensor streams",
    "adopt": "Tensor(a!) table, str spec, Tensor slots, Tensor streams",
    "plan": "Tensor(a!) table, str spec, Tensor slots, Tensor? counts, int uniform_count, int rows, Tensor(b!) plan",
    "plan_next": "Tensor(a!) table, str spec, Tensor slots, Tensor counts, Tensor accepted, int row_tokens, "
    "Tensor(b!) plan",
    "plan_lengths": "Tensor(a!) error, str spec, Tensor slots, Tensor prompt_lengths, Tensor? sequence_lengths, "
    "Tensor token_ends, bool prompts, Tensor(b!) plan",
    "commit": "Tensor(a!) table, str spec, Tensor plan, int rows, Tensor? accepted, int use",
    "abandon": "Tensor(a!) table, str spec, Tensor plan, int rows, int use",
    "conv_step": f"{_LAYER}, Tensor xBC, Tensor weight, Tensor? bias, Tensor(c!) out, int max_count, bool records",
    "rms_norm": "Tensor(a!) x, Tensor? addend, Tensor? gate, Tensor weight, Tensor(b!) out, int groups, float eps",
    "relu2": "Tensor(a!) x",
    "attend": "Tensor q, Tensor keys, Tensor values, Tensor slots, Tensor positions, Tensor cells, Tensor(a!) out, "
    "float scale",
    "flush": f"{_LAYER}, Tensor A_log, {_CHECKPOINT}",
    "step": f"{_STEP}, bool flushed, {_CHECKPOINT}",
    "prefill": f"{_SCAN}, {_CHECKPOINT}",
    "conventional_step": f"{_SCAN}, {_CHECKPOINT}",
    "conventional_verify": f"{_SCAN}, Tensor(d!) snapshots, {_CHECKPOINT}",
    "materialize": "Tensor(a!) table, Tensor data, str spec, int layer, Tensor slots, Tensor? A_log, Tensor(b!) state, "
    "Tensor(c!)? conv_tail, *, Tensor? checkpoint=None",
    "restore": f"{_POOL}, int layer, Tensor slots, Tensor state, Tensor conv_tail",
    "refresh_read_copy": f"{_POOL}, int layer, Tensor slots, *, Tensor? checkpoint=None",
    "copy": f"{_POOL}, Tensor src, Tensor dst",
}


def pool_spec(
    geometry: MambaGeometry, config: ReplayConfig, num_slots: int, num_layers: int, first_head: int, external: int = 0
) -> str:
    """The text that names a kind of pool: geometry | config | slots, layers, first head, external sections, in their
    fields' order.
    """
    extent = (num_slots, num_layers, first_head, external)
    return " ".join(str(value) for value in (*astuple(geometry), *astuple(config), *extent))


@cache
def core_spec(spec: str) -> "_core.Spec":
    """The C side of a pool's text."""
    fields = spec.split()
    window, max_step_tokens, checkpoint, read_copy, activation, seed = fields[5:11]
    config = _core.Config(
        int(window),
        int(max_step_tokens),
        _core.CHECKPOINT_FORMATS[checkpoint],
        _core.READ_COPY_FORMATS[read_copy],
        _core.DTYPES[activation],
        int(seed),
    )
    return _core.Spec(_core.Geometry(*map(int, fields[:5])), config, *map(int, fields[11:]))


def _stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else _core.HOST


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _address_dtype(tensor: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), DTYPE_CODES[tensor.dtype])


def _slots(data: torch.Tensor, checkpoint: torch.Tensor | None) -> int | tuple[int, int, int, int]:
    """Where the slots lie: blobs alone, or also the checkpoints outside of them [layers, slots, H, P, N]."""
    if checkpoint is None:
        return data.data_ptr()
    layer_stride, slot_stride = checkpoint.stride()[:2]
    size = checkpoint.element_size()
    return data.data_ptr(), checkpoint.data_ptr(), layer_stride * size, slot_stride * size


def reset(table, spec, slots, streams):
    core_spec(spec).reset(_stream(table), table.data_ptr(), slots.data_ptr(), streams.data_ptr(), slots.numel())


def adopt(table, spec, slots, streams):
    core_spec(spec).adopt(_stream(table), table.data_ptr(), slots.data_ptr(), streams.data_ptr(), slots.numel())


def plan(table, spec, slots, counts, uniform_count, rows, plan):
    core_spec(spec).plan(
        _stream(table), table.data_ptr(), slots.data_ptr(), _address(counts), uniform_count, rows, plan.data_ptr()
    )


def plan_next(table, spec, slots, counts, accepted, row_tokens, plan):
    core_spec(spec).plan_next(
        _stream(table),
        table.data_ptr(),
        slots.data_ptr(),
        counts.data_ptr(),
        accepted.data_ptr(),
        slots.numel(),
        row_tokens,
        plan.data_ptr(),
    )


def plan_lengths(error, spec, slots, prompt_lengths, sequence_lengths, token_ends, prompts, plan):
    core_spec(spec).plan_lengths(
        _stream(error),
        slots.data_ptr(),
        prompt_lengths.data_ptr(),
        _address(sequence_lengths),
        token_ends.data_ptr(),
        slots.numel(),
        prompts,
        plan.data_ptr(),
        error.data_ptr(),
    )


def commit(table, spec, plan, rows, accepted, use):
    core_spec(spec).commit(_stream(table), table.data_ptr(), plan.data_ptr(), rows, _address(accepted), use)


def abandon(table, spec, plan, rows, use):
    core_spec(spec).abandon(_stream(table), table.data_ptr(), plan.data_ptr(), rows, use)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices of contiguous rows, neither empty, share memory. Other columns of one buffer are no overlap;
    where the rows lie differently far apart, what lies between two rows counts as theirs.
    """
    size, widths = a.element_size(), (a.shape[1], b.shape[1])
    ahead = (b.data_ptr() - a.data_ptr()) // size  # elements from a's first to b's
    if not -(b.stride(0) * (b.shape[0] - 1) + widths[1]) < ahead < a.stride(0) * (a.shape[0] - 1) + widths[0]:
        return False
    apart = a.stride(0)
    return not apart or b.stride(0) != apart or ahead % apart < widths[0] or -ahead % apart < widths[1]


def conv_step(table, data, spec, layer, plan, rows, xBC, weight, bias, out, max_count, records):
    if out.numel() and _overlap(out, xBC):
        raise ValueError("out: expected a tensor that does not overlap xBC, got the same memory")
    core_spec(spec).conv_step(
        _stream(table),
        table.data_ptr(),
        data.data_ptr(),
        layer,
        plan.data_ptr(),
        rows,
        xBC.data_ptr(),
        xBC.stride(0),
        *_address_dtype(weight),
        *_address_dtype(bias),
        out.data_ptr(),
        out.stride(0),
        xBC.shape[0],
        max_count,
        records,
    )


def _matrix(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if tensor is None else (*_address_dtype(tensor), tensor.stride(-2))


def rms_norm(x, addend, gate, weight, out, groups, eps):
    tensors = (_matrix(x), _matrix(addend), _matrix(gate), *_address_dtype(weight), _matrix(out))
    addends = (addend.shape[0], addend.stride(0)) if addend is not None and addend.dim() == 3 else (1, 0)
    _core.rms_norm(_stream(x), *tensors, *x.shape, groups, eps, *addends)


def relu2(x):
    _core.relu2(_stream(x), *_address_dtype(x), x.numel())


def attend(q, keys, values, slots, positions, cells, out, scale):
    _core.attend(
        _stream(q),
        DTYPE_CODES[q.dtype],
        *((tensor.data_ptr(), *tensor.stride()[:2]) for tensor in (q, keys, values, out)),
        *(tensor.data_ptr() for tensor in (slots, positions, cells)),
        *cells.shape,
        q.shape[1],
        keys.shape[1],
        q.shape[2],
        keys.shape[0],
        keys.shape[2],
        scale,
    )


def flush(table, data, spec, layer, plan, rows, A_log, checkpoint=None):
    slots = _slots(data, checkpoint)
    core_spec(spec).flush(_stream(table), table.data_ptr(), slots, layer, plan.data_ptr(), rows, *_address_dtype(A_log))


def _tokens(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if tensor is None else (tensor.data_ptr(), *tensor.stride()[:2])


def _scan(run, table, slots, layer, plan, rows, x, B, C, dt, A_log, D, dt_bias, out, dt_min, dt_max, max_count, *more):
    run(
        _stream(table),
        table.data_ptr(),
        slots,
        layer,
        plan.data_ptr(),
        rows,
        *_tokens(x),
        *_tokens(B),
        *_tokens(C),
        *_address_dtype(dt),
        *dt.stride(),
        *_address_dtype(A_log),
        *_address_dtype(D),
        *_address_dtype(dt_bias),
        out.data_ptr(),
        *out.stride()[:2],
        dt_min,
        dt_max,
        C.shape[0],
        max_count,
        *more,
    )


def step(table, data, spec, *arguments, checkpoint=None):
    *arguments, flushed = arguments
    core = core_spec(spec)
    _scan(core.step_flushed if flushed else core.step, table, _slots(data, checkpoint), *arguments)


def prefill(table, data, spec, *arguments, checkpoint=None):
    _scan(core_spec(spec).prefill, table, _slots(data, checkpoint), *arguments)


def conventional_step(table, data, spec, *arguments, checkpoint=None):
    _scan(core_spec(spec).conventional_step, table, _slots(data, checkpoint), *arguments)


def conventional_verify(table, data, spec, *arguments, checkpoint=None):
    *arguments, snapshots = arguments
    stride = snapshots.stride(0) * snapshots.element_size()
    core = core_spec(spec)
    _scan(core.conventional_verify, table, _slots(data, checkpoint), *arguments, snapshots.data_ptr(), stride)


def materialize(table, data, spec, layer, slots, A_log, state, conv_tail, checkpoint=None):
    core_spec(spec).materialize(
        _stream(table),
        table.data_ptr(),
        _slots(data, checkpoint),
        layer,
        slots.data_ptr(),
        slots.numel(),
        *_address_dtype(A_log),
        state.data_ptr(),
        _address(conv_tail),
    )


def restore(table, data, spec, layer, slots, state, conv_tail):
    core_spec(spec).restore(
        _stream(table),
        table.data_ptr(),
        data.data_ptr(),
        layer,
        slots.data_ptr(),
        slots.numel(),
        state.data_ptr(),
        conv_tail.data_ptr(),
    )


def refresh_read_copy(table, data, spec, layer, slots, checkpoint=None):
    core_spec(spec).refresh_read_copy(
        _stream(table), table.data_ptr(), _slots(data, checkpoint), layer, slots.data_ptr(), slots.numel()
    )


def copy(table, data, spec, src, dst):
    core_spec(spec).copy(_stream(table), table.data_ptr(), data.data_ptr(), src.data_ptr(), dst.data_ptr(), src.numel())


def _on_its_device(op):
    """`op` with the CUDA device of its first tensor as the current one: a stream takes launches from its own device
    only."""

    @wraps(op)
    def run(first, *arguments, **named):
        if torch.cuda.current_device() == first.device.index:
            op(first, *arguments, **named)
        else:
            with torch.cuda.device(first.device):
                op(first, *arguments, **named)

    return run


def _no_output(*arguments, **named):
    """The fake kernel of every operator: they only mutate."""


_library = torch.library.Library("trtllm_replayssm", "DEF")
for _name, _arguments in SCHEMAS.items():
    _library.define(f"{_name}({_arguments}) -> ()")
    _library.impl(_name, globals()[_name], "CPU")
    _library.impl(_name, _on_its_device(globals()[_name]), "CUDA")
    torch.library.register_fake(f"trtllm_replayssm::{_name}", _no_output, lib=_library)
