# SPDX-License-Identifier: Apache-2.0
"""Records that the convolution stores: the bits of steps that append them, the oracle, and what is refused."""

from functools import partial

import numpy as np
import oracle
import pytest
import torch
from mixer import (
    NANO_TP8,
    SMALL,
    SUPER_TP8,
    Mixer,
    Stack,
    all_pairs,
    array,
    assert_accurate,
    config_of,
    same_bits,
    zero_state,
)

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

_ops = torch.ops.trtllm_replayssm


def flush_then_step(mixer, pool, layer, plan, raw, dt):
    """A step of records as the two operators that engines have."""
    C = ops.conv_step(pool, layer, plan, raw, mixer.conv_weight, mixer.conv_bias, records=True)
    plan.note_use("stepped", layer)
    call = (pool.table, pool.data, pool.spec, layer, plan.buffer, plan.rows)
    _ops.flush(*call, mixer.weights.A_log)
    out = torch.zeros((len(raw), mixer.geometry.num_heads, mixer.geometry.head_dim), dtype=C.dtype, device=C.device)
    _ops.step(*call, None, None, C, dt, *mixer.weights, out, 0.0, float("inf"), plan.max_count, True)
    return out


def assert_same_bits(stack, sequences, cycles, *, most=None, by_records=Mixer.by_records, make_pool=Stack.pool):
    """Steps both ways, from prompts of different lengths on, some of whose tokens are rejected, in rows of any order,
    one of them padded: the same outputs, and the same bytes in all slots after each.
    """
    most = stack.config.max_step_tokens if most is None else most
    rng = np.random.default_rng(0)
    pools = [make_pool(stack, sequences) for _ in range(2)]
    prompts = [stack.tape(seed % 7, 2 + seed % 7) for seed in range(sequences)]
    for pool in pools:
        pool.reset(list(range(sequences)))
        stack.cycle(pool, list(range(sequences)), prompts, op=ops.prefill)
    for cycle in range(cycles):
        slots = rng.permutation(np.arange(-1, sequences)).tolist()
        counts = rng.integers(0, most + 3, len(slots)).clip(max=most)
        raw, dt = stack.tape(100 + cycle, int(counts.sum()))
        accepted = np.where(rng.random(len(slots)) < 0.3, rng.integers(0, counts + 1), counts).tolist()
        outputs = []
        for pool, mix in zip(pools, (partial(Mixer.__call__, op=ops.step), by_records), strict=True):
            plan = pool.plan(slots, counts.tolist())
            layers = [mix(mixer, pool, layer, plan, raw, dt) for layer, mixer in enumerate(stack.mixers)]
            outputs.append(torch.stack(layers))
            pool.commit(plan, accepted)
        assert same_bits(*outputs), cycle
        assert same_bits(*(pool.data for pool in pools)), cycle
    for pool in pools:
        pool.validate()
    if pools[0].checkpoint is not None:
        assert same_bits(*(pool.checkpoint for pool in pools))
    assert all(map(torch.equal, *(pool.cursors() for pool in pools)))
    assert pools[0].stats() == pools[1].stats()
    assert pools[1].stats()["flushes"] >= sequences


@all_pairs
def test_every_format_has_the_bits_of_appended_records(device, checkpoint, read_copy):
    geometry = MambaGeometry(num_heads=4, head_dim=16, num_groups=2, state_dim=128)
    stack = Stack(geometry, config_of(checkpoint, read_copy, 7, 3, "bf16"), num_layers=1, device=device)
    assert_same_bits(stack, 3, 16)


GEOMETRIES = [
    (SUPER_TP8, "bf16"),
    (NANO_TP8, "fp16"),
    (MambaGeometry(4, 128, 2, 128), "bf16"),
    (MambaGeometry(6, 80, 2, 64), "fp32"),
    (MambaGeometry(2, 40, 2, 128), "fp16"),
    (MambaGeometry(3, 24, 3, 64, conv_kernel=2), "bf16"),
    (MambaGeometry(4, 8, 1, 64, conv_kernel=8), "fp32"),
]
FORMATS = [("fp32", "none"), ("fp16_sr", "none"), ("fp16_sr", "nvfp4")]


@pytest.mark.parametrize("checkpoint, read_copy", FORMATS)
@pytest.mark.parametrize("geometry, activation", GEOMETRIES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_every_geometry_has_the_bits_of_appended_records(device, geometry, activation, checkpoint, read_copy, tokens):
    """With the convolution's weights in the activation's format, of which CUDA has kernels of their own."""
    stack = Stack(geometry, config_of(checkpoint, read_copy, 8, 4, activation), num_layers=1, device=device)
    for mixer in stack.mixers:
        dtype = stack.tape(0, 0)[0].dtype
        mixer.conv_weight, mixer.conv_bias = mixer.conv_weight.to(dtype), mixer.conv_bias.to(dtype)
    assert_same_bits(stack, 2, 20 if tokens == 1 else 10, most=tokens)


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("checkpoint, read_copy", FORMATS)
def test_many_rows_have_the_bits_of_appended_records(device, checkpoint, read_copy, most):
    """So many that CTAs take several rows, or several heads, one after another."""
    on_cpu = device.type == "cpu"
    geometry = MambaGeometry(4, 16, 2, 128) if on_cpu else MambaGeometry(128, 64, 8, 128)
    stack = Stack(geometry, config_of(checkpoint, read_copy, 8, 4, "bf16"), num_layers=1, device=device)
    assert_same_bits(stack, 30 if on_cpu else 150, 24 if most == 1 else 10, most=most)


@pytest.mark.filterwarnings("ignore:window 16 < 2")
@pytest.mark.parametrize("window", [64, 16])
@pytest.mark.parametrize("checkpoint, read_copy", FORMATS)
def test_longest_steps_have_the_bits_of_appended_records(device, checkpoint, read_copy, window):
    geometry = MambaGeometry(num_heads=4, head_dim=16, num_groups=2, state_dim=128)
    stack = Stack(geometry, config_of(checkpoint, read_copy, window, 16, "bf16"), num_layers=1, device=device)
    assert_same_bits(stack, 2, 14)


@pytest.mark.parametrize("checkpoint, read_copy", FORMATS)
@pytest.mark.parametrize("geometry, activation", [(SMALL, "fp32"), (MambaGeometry(2, 64, 1, 128), "bf16")])
def test_an_engines_states_have_the_bits_of_appended_records(device, geometry, activation, checkpoint, read_copy):
    def make_pool(stack, num_slots):
        dtype = torch.float32 if checkpoint == "fp32" else torch.float16
        shape = (2, num_slots, geometry.num_heads, geometry.head_dim, geometry.state_dim)
        states = torch.full(shape, float("nan"), dtype=dtype, device=device)
        return StatePool(geometry, stack.config, num_slots, 2, device, external={"checkpoint": states})

    stack = Stack(geometry, config_of(checkpoint, read_copy, 8, 3, activation), device=device)
    assert_same_bits(stack, 2, 12, make_pool=make_pool)


@pytest.mark.parametrize("checkpoint, read_copy", FORMATS)
@pytest.mark.parametrize("geometry, activation", [(SMALL, "fp32"), (MambaGeometry(2, 64, 1, 128), "bf16")])
def test_flush_then_step_is_step(device, geometry, activation, checkpoint, read_copy):
    stack = Stack(geometry, config_of(checkpoint, read_copy, 8, 3, activation), device=device)
    assert_same_bits(stack, 2, 14, by_records=flush_then_step)


@pytest.mark.parametrize(
    "geometry, activation, window, max_step_tokens",
    [
        (SUPER_TP8, "bf16", 16, 4),
        (NANO_TP8, "fp16", 5, 1),
        (MambaGeometry(2, 64, 1, 128), "fp32", 16, 8),
        *((*case, 11, 5) for case in GEOMETRIES[3:]),
    ],
)
def test_drafts_agree_with_the_oracle(device, geometry, activation, window, max_step_tokens):
    """Two sequences, from raw inputs to outputs, of whose drafts any prefix stays."""
    rng = np.random.default_rng(window)
    stack = Stack(geometry, config_of("fp32", "none", window, max_step_tokens, activation), 1, device)
    mixer, pool = stack.mixers[0], stack.pool(2)
    pool.reset([0, 1])
    parameters = [array(tensor) for tensor in (mixer.conv_weight, mixer.conv_bias)]
    committed = [np.zeros((0, geometry.conv_channels))] * 2
    states = {np.float64: [zero_state(geometry)] * 2, np.float32: [zero_state(geometry)] * 2}
    given, expected, conventional = [], [], []
    for cycle in range(40):
        counts = rng.integers(0 if max_step_tokens > 1 else 1, max_step_tokens + 1, 2)
        accepted = rng.integers(0, counts + 1) if max_step_tokens > 1 else counts
        raw, dt = stack.tape(cycle, int(counts.sum()))
        plan = pool.plan([1, 0], counts.tolist())
        given.append(mixer.by_records(pool, 0, plan, raw, dt))
        pool.commit(plan, accepted.tolist())
        for slot, part in zip((1, 0), np.split(np.arange(counts.sum()), counts[:1]), strict=True):
            mine, kept = array(raw[part]), accepted[1 - slot]
            xBC = torch.from_numpy(oracle.convolve(committed[slot], mine, *parameters)).to(raw.dtype)
            inputs = [array(tensor) for tensor in (*mixer.split(xBC), dt[part], *mixer.weights)]
            for dtype, outputs in ((np.float64, expected), (np.float32, conventional)):
                y, after = oracle.recur(states[dtype][slot], *inputs, dtype=dtype)
                outputs.append(y)
                states[dtype][slot] = after[kept]
            committed[slot] = np.concatenate([committed[slot], mine[:kept]])
    pool.validate()
    assert pool.cursors([0, 1]).tokens.tolist() == [len(raw) for raw in committed]
    assert pool.stats()["flushes"] > 2
    assert_accurate(torch.cat(given), np.concatenate(expected), np.concatenate(conventional))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_the_convolution_returns_is_C_where_it_is_told(device, dtype):
    """With `out` at any address and pitch; outputs of rows without a slot and what lies between rows stay."""
    geometry = MambaGeometry(2, 8, 2, 64)
    stack = Stack(geometry, ReplayConfig(window=8, max_step_tokens=2, activation=dtype), 1, device)
    mixer, raw = stack.mixers[0], stack.tape(1, 5)[0]
    pool, slots, counts = stack.pool(2), [1, -1, 0], [2, 1, 2]
    pool.reset([0, 1])
    plan = pool.plan(slots, counts)
    xBC = ops.conv_step(pool, 0, plan, raw, mixer.conv_weight, mixer.conv_bias)
    pool.abandon(plan)
    C = mixer.split(xBC)[2]
    memory = torch.full((5, 131), 7.0, dtype=raw.dtype, device=device)
    out = memory[:, 1:129].unflatten(1, (2, 64))
    plan = pool.plan(slots, counts)
    returned = ops.conv_step(pool, 0, plan, raw, mixer.conv_weight, mixer.conv_bias, out, records=True)
    assert returned is out
    live = torch.tensor([0, 1, 3, 4], device=device)
    assert same_bits(out[live], C[live])
    assert memory[2].eq(7).all() and memory[:, 0].eq(7).all() and memory[:, 129:].eq(7).all()
    with pytest.raises(ValueError, match=r"out: expected groups side by side, got strides \(160, 80, 1\)"):
        apart = torch.zeros((5, 2, 80), dtype=raw.dtype, device=device)[:, :, :64]
        ops.conv_step(pool, 0, plan, raw, mixer.conv_weight, mixer.conv_bias, apart, records=True)
    with pytest.raises(ValueError, match=r"out: expected shape \(5, 2, 64\), got \(5, 272\)"):
        ops.conv_step(pool, 0, plan, raw, mixer.conv_weight, mixer.conv_bias, torch.zeros_like(raw), records=True)


def test_rows_that_a_step_does_not_take_are_refused(device):
    """A row of more tokens than a step takes, of which the host may not know, and one whose state is a snapshot.

    On CUDA the other row of the call is none the worse for it.
    """
    stack = Stack(SMALL, ReplayConfig(window=8, max_step_tokens=2, activation="fp32"), 1, device)
    mixer, pool = stack.mixers[0], stack.pool(3)
    pool.reset([0, 1, 2])
    verify = partial(ops.conventional_verify, snapshots=pool.allocate_snapshots()[0])
    stack.cycle(pool, [1], [stack.tape(0, 2)], op=verify)
    long, snapshot = "row 1: brings 3 tokens, expected at most 2", "row 1: the state of slot 1 is a snapshot"
    for slot, count, match in ((2, 3, long), (1, 2, snapshot)):
        before, (raw, _) = pool.data.clone(), stack.tape(slot, 1 + count)
        plan = pool.plan([0, slot], [1, count])
        call = (pool.table, pool.data, pool.spec, 0, plan.buffer, plan.rows)
        C = torch.zeros((1 + count, 128), device=device)
        with pytest.raises(ValueError, match=match):
            _ops.conv_step(*call, raw, mixer.conv_weight, mixer.conv_bias, C, 2, True)
            pool.validate()
        assert same_bits(pool.data[0, 1:], before[0, 1:]) and not C[1:].any()
        proceeded = device.type == "cuda"
        assert C[0].any() == proceeded and same_bits(pool.data[0, 0], before[0, 0]) != proceeded
        pool.abandon(plan)
        pool.reset([0, 2])


def test_steps_without_their_records_are_refused(device):
    config = ReplayConfig(window=8, max_step_tokens=2, activation="fp32")
    stack = Stack(SMALL, config, 2, device)
    mixer, pool = stack.mixers[0], stack.pool(1)
    pool.reset(0)
    raw, dt = stack.tape(0, 2)
    convolution = (raw, mixer.conv_weight, mixer.conv_bias)
    plan = pool.plan(0, 2)
    x, B, C = mixer.split(ops.conv_step(pool, 0, plan, *convolution))
    rest = (C, dt, *mixer.weights)
    before = pool.data.clone()
    none_here = "x: expected a torch.Tensor, got None; conv_step stored no records of layer {} on this plan"
    with pytest.raises(ValueError, match=none_here.format(0)):
        ops.step(pool, 0, plan, None, None, *rest)
    with pytest.raises(TypeError, match="B: expected a torch.Tensor, got NoneType"):
        ops.step(pool, 0, plan, x, None, *rest)
    with pytest.raises(TypeError, match="x: expected a torch.Tensor, got NoneType"):
        ops.step(pool, 0, plan, None, B, *rest)
    for op in (ops.prefill, ops.conventional_step):
        with pytest.raises(TypeError, match="x: expected a torch.Tensor, got NoneType"):
            op(pool, 0, plan, None, None, *rest)
    with pytest.raises(TypeError, match="x: expected a torch.Tensor, got NoneType"):
        ops.conventional_verify(pool, 0, plan, None, None, *rest, snapshots=pool.allocate_snapshots()[0])
    assert same_bits(pool.data, before) and plan.use is None
    columns = raw[:, -C[0].numel() :].unflatten(1, C.shape[1:])
    with pytest.raises(ValueError, match="out: expected a tensor that does not overlap xBC, got the same memory"):
        ops.conv_step(pool, 0, plan, *convolution, columns, records=True)
    assert same_bits(pool.data, before)
    both = torch.cat([raw, C.flatten(1)], 1)  # other columns of one buffer
    beside = both[:, raw.shape[1] :].unflatten(1, C.shape[1:])
    ops.conv_step(pool, 0, plan, both[:, : raw.shape[1]], *convolution[1:], beside, records=True)
    assert same_bits(beside, C) and same_bits(both[:, : raw.shape[1]], raw)

    ops.conv_step(pool, 0, plan, *convolution, records=True)
    ops.conv_step(pool, 0, plan, *convolution)  # its x, B and C are in a tensor: what is stored is another's
    with pytest.raises(ValueError, match=none_here.format(0)):
        ops.step(pool, 0, plan, None, None, *rest)
    ops.conv_step(pool, 0, plan, *convolution, records=True)
    ops.step(pool, 0, plan, None, None, *rest)
    with pytest.raises(ValueError, match=none_here.format(1)):
        ops.step(pool, 1, plan, None, None, *rest)
    with pytest.raises(ValueError, match="layer: expected one whose step has not run on this plan, got 0"):
        ops.conv_step(pool, 0, plan, *convolution, records=True)
    stack.mixers[1].by_records(pool, 1, plan, raw, dt)
    pool.commit(plan)
    plan = pool.plan(0, 2, out=plan)  # the records of a plan are not those of the next one
    with pytest.raises(ValueError, match=none_here.format(0)):
        ops.step(pool, 0, plan, None, None, *rest)
    pool.abandon(plan)
    pool.reset(0)
    plan = pool.plan(0, 2)
    ops.prefill(pool, 0, plan, x, B, *rest)
    with pytest.raises(ValueError, match="plan: expected one that is not folded yet, got one for an op of stepped"):
        ops.conv_step(pool, 1, plan, *convolution, records=True)
    pool.abandon(plan)


def test_plans_that_a_step_does_not_take_are_refused(device):
    stack = Stack(SMALL, ReplayConfig(window=8, max_step_tokens=2, activation="fp32"), 1, device)
    mixer, pool = stack.mixers[0], stack.pool(1)
    pool.reset(0)
    raw, _ = stack.tape(0, 3)
    plan, before = pool.plan(0, 3), pool.data.clone()
    with pytest.raises(ValueError, match="plan: expected at most max_step_tokens = 2 tokens a row, got 3 in row 0"):
        ops.conv_step(pool, 0, plan, raw, mixer.conv_weight, mixer.conv_bias, records=True)
    with pytest.raises(ValueError, match="max_count: a step takes at most max_step_tokens=2 tokens a row, got 3"):
        out = torch.zeros((3, 128), device=device)
        call = (pool.table, pool.data, pool.spec, 0, plan.buffer, plan.rows)
        _ops.conv_step(*call, raw, mixer.conv_weight, mixer.conv_bias, out, 3, True)
    assert same_bits(pool.data, before)


def test_a_pool_without_conv_ring_stores_no_records(device):
    config = ReplayConfig(window=8, max_step_tokens=2, activation="fp32")
    pool = StatePool(SMALL, config, 1, 1, device, external={"conv_ring": None})
    mixer, (raw, _) = Mixer(SMALL, device), Stack(SMALL, config, 1, device).tape(0, 1)
    pool.reset(0)
    plan, before = pool.plan(0), pool.data.clone()
    with pytest.raises(ValueError, match="expected a conv_ring buffer, got NULL: the convolution is another's"):
        ops.conv_step(pool, 0, plan, raw, mixer.conv_weight, mixer.conv_bias, records=True)
    assert same_bits(pool.data, before) and not plan.recorded
