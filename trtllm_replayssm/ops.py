# SPDX-License-Identifier: Apache-2.0
"""The ops of a layer over a pool and a plan, and what a model has between them: norms and attention.

Tokens are packed: those of plan row 0 first, then row 1, …; padded rows (slot -1) take part in the packing, are neither
read nor written, and are zero in an output that the op allocates. All ops are asynchronous on CUDA, synchronise nothing
and can be captured in a CUDA graph; with `out` given they allocate nothing.

Wrong shapes, dtypes, devices and strides raise ValueError or TypeError before anything is written. Bad values raise
ValueError at once on the CPU; on CUDA the row touches nothing and `pool.validate()` raises (see StatePool).
"""

from math import inf

import torch

from .plan import FOLDED, SNAPSHOTTED, STEPPED, Plan
from .pool import FLOATS, ROWS, STRIDED, WHOLE, StatePool, require_layer, require_tensor

_ops = torch.ops.trtllm_replayssm
_INT64 = frozenset({torch.int64})


def conv_step(
    pool: StatePool,
    layer: int,
    plan: Plan,
    xBC: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    records: bool = False,
) -> torch.Tensor:
    """Causal depthwise convolution and SiLU over the new tokens of each row, continuing from its slot's raw inputs.

    out[t, c] = silu(bias[c] + sum_k weight[c, k] * xBC[t - (K-1) + k, c]); inputs before a sequence's first token are
    0. Keeps the raw inputs, so that rejected tokens need no undoing.

    Args:
        pool: the pool.
        layer: 0..num_layers-1.
        plan: an outstanding plan of the pool.
        xBC: activation dtype [num_tokens, conv_channels], raw inputs in the order x | B | C; rows may be strided.
        weight: fp32, bf16 or fp16 [conv_channels, K], contiguous (Hugging Face's [conv_channels, 1, K] squeezed).
        bias: fp32, bf16 or fp16 [conv_channels], or None.
        out: like `xBC`, not overlapping it; allocated if None. With `records` activation dtype [num_tokens, G, N].
        records: x and B go to the rings, as the tokens' records, which spares `step` reading and appending them: it is
            called without them, on the same plan. Only C is returned.

    Returns:
        `out`, [num_tokens, conv_channels], with `records` C [num_tokens, G, N].

    Raises:
        ValueError: among others, with `records`, a row of more than max_step_tokens tokens, or a plan of folding ops.
    """
    _require_plan(pool, layer, plan)
    channels, taps = pool.geometry.conv_channels, pool.geometry.conv_kernel
    num_tokens = _num_tokens(plan, "xBC", xBC)
    require_tensor(pool.device, "xBC", xBC, (num_tokens, channels), pool.activations, ROWS)
    require_tensor(pool.device, "weight", weight, (channels, taps), FLOATS, WHOLE)
    if bias is not None:
        require_tensor(pool.device, "bias", bias, (channels,), FLOATS, WHOLE)
    if records:
        plan.require_use(STEPPED)
        if layer in plan.done:
            raise ValueError(f"layer: expected one whose step has not run on this plan, got {layer}")
        geometry = pool.geometry
        out = _output(pool, out, (num_tokens, geometry.num_groups, geometry.state_dim))
        if geometry.num_groups > 1 and out.stride(1) != geometry.state_dim:
            raise ValueError(f"out: expected groups side by side, got strides {out.stride()}")
        flat, max_count = out.flatten(1), _step_bound(pool, plan)
    else:
        out = flat = _output(pool, out, (num_tokens, channels))
        max_count = _bound(plan, num_tokens)
    call = (pool.table, pool.data, pool.spec, layer, plan.buffer, plan.rows)
    _ops.conv_step(*call, xBC, weight, bias, flat, max_count, records)
    (plan.recorded.add if records else plan.recorded.discard)(layer)
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    groups: int = 1,
    *,
    addend: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean over each of `groups` equal parts of a row; in fp32, in one pass.

    What stands between the other ops of a model: with `addend` the norm before a layer and the sum before that, with
    `gate` Mamba-2's norm after the state. A row's bits depend on nothing but the row.

    Args:
        x: fp32, bf16 or fp16 [rows, width]; rows may be strided, like those of `addend` and `gate`. width / groups: a
            multiple of 8, at most 16384.
        weight: fp32, bf16 or fp16 [width].
        addend: fp32, bf16 or fp16 like `x`, or [addends, rows, width], added in order: x + addend is stored in `x`,
            whose rows must not overlap then. What is normed is the fp32 sum, before it is rounded to the dtype of `x`.
        gate: fp32, bf16 or fp16 like `x`, instead of an addend: x * silu(gate) is normed; `x` stays.
        dtype: of the result; None: that of `x`.

    Returns:
        a new tensor [rows, width].

    Raises:
        NotImplementedError: more than 16384 values a group.
        ValueError: among others, `groups` below 1 or whose width is no multiple of 8, a negative `eps`, both an addend
            and a gate.
    """
    _require_dimensions("x", x, "rows", "width")
    dtype = dtype or x.dtype
    if dtype not in FLOATS:
        raise TypeError(f"dtype: expected torch.float32, torch.bfloat16 or torch.float16, got {dtype}")
    for name, tensor in (("x", x), ("addend", addend), ("gate", gate)):
        if tensor is not None:
            several = name == "addend" and isinstance(tensor, torch.Tensor) and tensor.dim() == 3
            shape = (*tensor.shape[:1], *x.shape) if several else x.shape
            require_tensor(x.device, name, tensor, shape, FLOATS, ROWS)
            if several and tensor.shape[0] == 0:
                raise ValueError("addend: expected [rows, width] or at least one addend, got none")
    require_tensor(x.device, "weight", weight, x.shape[1:], FLOATS, WHOLE)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _ops.rms_norm(x, addend, gate, weight, out, groups, eps)
    return out


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2 in the place of x, which is returned: what a model's MLP has between its products. NaN stays.

    x: fp32, bf16 or fp16, of any shape, contiguous.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    require_tensor(x.device, "x", x, x.shape, FLOATS, WHOLE)
    _ops.relu2(x)
    return x


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cells: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Grouped-query attention of new tokens over the keys of their slots up to their own positions:
    softmax(scale * q . keys) values, in fp32. The keys of the new tokens are there already.

    A token's bits depend neither on its batch nor on the other tokens of its row, as long as values are finite: a later
    token's value that is not may make earlier tokens of its row NaN. Keys behind a row's newest token are not read.
    Values that only the device knows are not checked, but a row whose slot is none is left out.

    Args:
        q: fp32, bf16 or fp16 [num_tokens, heads, head_dim], packed row after row; tokens and heads may be strided.
            head_dim: a multiple of 8.
        keys, values: like `q` in dtype, [num_slots, kv_heads, capacity, head_dim]; slots and heads may be strided.
            kv_heads divides heads.
        slots, positions: int64 [num_tokens]; positions rise in a row.
        cells: int64 [rows, width], where each row's tokens are packed; shorter rows repeat their last one.
        scale: None: head_dim ** -0.5.

    Returns:
        a new tensor like `q`. Tokens that are in no cell are undefined.

    Raises:
        NotImplementedError: on CUDA fp32, or another head_dim than 64 and 128.
        ValueError: among others, on CUDA, heads of q, keys or values that do not begin at multiples of 16 bytes.
    """
    _require_dimensions("q", q, "num_tokens", "heads", "head_dim")
    _require_dimensions("keys", keys, "num_slots", "kv_heads", "capacity", "head_dim")
    _require_dimensions("cells", cells, "rows", "width")
    head_dim = q.shape[2]
    require_tensor(q.device, "q", q, q.shape, FLOATS, ROWS)
    for name, cache in (("keys", keys), ("values", values)):
        require_tensor(q.device, name, cache, (*keys.shape[:3], head_dim), frozenset({q.dtype}), ROWS)
        if cache.stride(2) != head_dim:
            raise ValueError(f"{name}: expected contiguous positions, got strides {cache.stride()}")
    for name, tensor in (("slots", slots), ("positions", positions)):
        require_tensor(q.device, name, tensor, q.shape[:1], _INT64, WHOLE)
    require_tensor(q.device, "cells", cells, cells.shape, _INT64, WHOLE)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _ops.attend(q, keys, values, slots, positions, cells, out, head_dim**-0.5 if scale is None else scale)
    return out


def step(
    pool: StatePool,
    layer: int,
    plan: Plan,
    x: torch.Tensor | None,
    B: torch.Tensor | None,
    C: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, inf),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs of 1..max_step_tokens new tokens a row from checkpoint and records; appends their records.

    Rows whose window is full are flushed first. No state is formed and none is written otherwise:
    y_s = exp(e(0,h+s)) S_ckpt C_s + sum_{j<=h+s} delta_j exp(e(j,h+s)) (B_j . C_s) x_j + D x_s, the output of
    S_t = exp(A delta_t) S_{t-1} + delta_t x_t (outer) B_t, y_t = S_t C_t + D x_t,
    delta_t = clamp(softplus(dt_t + dt_bias), *dt_limit), A = -exp(A_log).

    Args:
        pool: the pool.
        layer: 0..num_layers-1.
        plan: an outstanding plan of the pool that no folding op consumed.
        x: activation dtype [num_tokens, H, P], after convolution and SiLU; None, with B: conv_step has stored both as
            the tokens' records. The results have the same bits.
        B: activation dtype [num_tokens, G, N], or None.
        C: activation dtype [num_tokens, G, N]. x, B and C may be slices of one tensor: only their last dimension must
            be contiguous.
        dt: fp32, bf16 or fp16 [num_tokens, H], raw; any strides.
        A_log: fp32, bf16 or fp16 [H]. The pool remembers it for `materialize`.
        D: fp32, bf16 or fp16 [H], or None: no skip connection.
        dt_bias: fp32, bf16 or fp16 [H], or None: zero.
        dt_limit: the checkpoint's `time_step_limit`, the only clamp of delta.
        out: activation dtype [num_tokens, H, P]; allocated if None.

    Returns:
        `out`, [num_tokens, H, P].

    Raises:
        ValueError: among others, a row of more than max_step_tokens tokens, and x and B left out where conv_step has
            not stored them in this layer on this plan.
    """
    return _scan(_ops.step, STEPPED, pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out, False)


def prefill(
    pool: StatePool,
    layer: int,
    plan: Plan,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, inf),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs of prompt chunks of any length, and the state after them, written to the checkpoint.

    Continues each slot from checkpoint and records; afterwards the slot has no records. Its tokens can't be rejected:
    commit takes all of them. With an fp32 checkpoint, a prompt that is cut between calls at multiples of 32 tokens
    keeps its bits; elsewhere a cut may change them by rounding. Arguments, result and formulas as for `step`, but
    that x and B are always given.
    """
    return _scan(_ops.prefill, FOLDED, pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out)


def conventional_step(
    pool: StatePool,
    layer: int,
    plan: Plan,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, inf),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The classical decode kernel, the baseline: reads the state, updates it by each token, writes it back.

    For slots that never hold records, so not to be mixed with `step` on one sequence. Arguments and result as for
    `step`; all tokens are committed.

    Raises:
        NotImplementedError: another checkpoint than "fp32", "bf16" or "fp16", or a read copy.
        ValueError: among others, a slot that holds records.
    """
    return _scan(_ops.conventional_step, FOLDED, pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out)


def conventional_verify(
    pool: StatePool,
    layer: int,
    plan: Plan,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, inf),
    *,
    snapshots: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The classical verification kernel, the baseline: one read of the state, and one write after each token.

    After a commit of `accepted` tokens the slot's state is snapshot accepted - 1, which the next verification reads;
    nothing is selected or copied. From its first commit until a reset, a slot is for this op only. A verification after
    the first that accepts no token leaves its slot invalid: it has overwritten the state it began with. Arguments and
    result as for `step`.

    Args:
        snapshots: checkpoint dtype [num_slots, max_step_tokens, H, P, N] of this layer, the same from step to step
            (`pool.allocate_snapshots`); contiguous but for its first dimension.

    Raises:
        NotImplementedError: as for `conventional_step`.
        ValueError: among others, a slot that holds records, and a row of more than max_step_tokens tokens.
    """
    if pool.snapshots_dtype is not None:  # the library refuses other formats by name
        dtypes = frozenset({pool.snapshots_dtype})
        require_tensor(pool.device, "snapshots", snapshots, pool.snapshots_shape, dtypes, STRIDED)
    if not snapshots[0].is_contiguous():
        raise ValueError(f"snapshots: expected contiguous slots, got strides {snapshots.stride()}")
    operator = _ops.conventional_verify
    return _scan(operator, SNAPSHOTTED, pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out, snapshots)


def _step_bound(pool: StatePool, plan: Plan) -> int:
    """An upper bound of the plan's counts; ValueError if the host knows one above max_step_tokens."""
    limit = pool.config.max_step_tokens
    if plan.max_count is None:
        return limit
    if plan.max_count > limit:
        row = f" in row {plan.counts.index(plan.max_count)}" if plan.counts else ""
        raise ValueError(
            f"plan: expected at most max_step_tokens = {limit} tokens a row, got {plan.max_count}{row}; "
            "use ops.prefill for longer chunks"
        )
    return plan.max_count


def _scan(operator, use, pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, dt_limit, out, *more) -> torch.Tensor:
    """Checks the arguments of an op that consumes `plan`, runs its operator (`more` are its last arguments), returns
    `out`.
    """
    _require_plan(pool, layer, plan)
    geometry = pool.geometry
    num_tokens = _num_tokens(plan, "C", C)
    max_count = _bound(plan, num_tokens) if use == FOLDED else _step_bound(pool, plan)
    heads = (geometry.num_heads,)
    head_rows = (num_tokens, geometry.num_heads, geometry.head_dim)
    group_rows = (num_tokens, geometry.num_groups, geometry.state_dim)
    if operator is _ops.step and x is None and B is None:
        if layer not in plan.recorded:
            raise ValueError(
                f"x: expected a torch.Tensor, got None; conv_step stored no records of layer {layer} on this plan"
            )
    else:
        require_tensor(pool.device, "x", x, head_rows, pool.activations, ROWS)
        require_tensor(pool.device, "B", B, group_rows, pool.activations, ROWS)
    require_tensor(pool.device, "C", C, group_rows, pool.activations, ROWS)
    require_tensor(pool.device, "dt", dt, head_rows[:2], FLOATS, STRIDED)
    require_tensor(pool.device, "A_log", A_log, heads, FLOATS, WHOLE)
    if D is not None:
        require_tensor(pool.device, "D", D, heads, FLOATS, WHOLE)
    if dt_bias is not None:
        require_tensor(pool.device, "dt_bias", dt_bias, heads, FLOATS, WHOLE)
    try:
        low, high = map(float, dt_limit)
    except (TypeError, ValueError):
        raise TypeError(f"dt_limit: expected (lower, upper), got {dt_limit!r}") from None
    if not 0.0 <= low <= high:
        raise ValueError(f"dt_limit: expected 0 <= lower <= upper, got {tuple(dt_limit)}")
    out = _output(pool, out, head_rows)
    plan.require_use(use)
    if layer in plan.done:
        raise ValueError(f"layer: expected one whose op has not run on this plan, got {layer} again; its tokens are in")
    call = (pool.table, pool.data, pool.spec, layer, plan.buffer, plan.rows)
    scan = (x, B, C, dt, A_log, D, dt_bias, out, low, high, max_count, *more)
    operator(*call, *scan, checkpoint=pool.checkpoint)
    # After the op, so that one that raised leaves the plan as it was.
    plan.note_use(use, layer)
    pool.decay[layer] = A_log
    return out


def _require_dimensions(name: str, tensor, *dimensions: str):
    """TypeError or ValueError unless `tensor` is one of as many dimensions."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != len(dimensions):
        raise ValueError(f"{name}: expected shape ({', '.join(dimensions)}), got {tuple(tensor.shape)}")


def _require_plan(pool: StatePool, layer: int, plan: Plan):
    require_layer(layer, pool.num_layers)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    plan.require_open(pool)


def _num_tokens(plan: Plan, name: str, tensor: torch.Tensor) -> int:
    """Rows of the packed tensors: what the plan says, or, if only the device knows the counts, those of `tensor`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if plan.num_tokens is not None:
        return plan.num_tokens
    return tensor.shape[0] if tensor.dim() else 0


def _bound(plan: Plan, otherwise: int) -> int:
    return otherwise if plan.max_count is None else plan.max_count


def _output(pool: StatePool, out: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """`out`, checked, or a new tensor of zeros: rows that the op does not write are then defined."""
    if out is None:
        return torch.zeros(shape, dtype=pool.activation, device=pool.device)
    require_tensor(pool.device, "out", out, shape, pool.activations, ROWS)
    extent = 1
    for size, stride in zip(reversed(shape), reversed(out.stride()), strict=True):
        if size > 1 and stride < extent:
            raise ValueError(f"out: expected elements that do not overlap, got strides {out.stride()} of shape {shape}")
        extent += (size - 1) * stride
    return out
