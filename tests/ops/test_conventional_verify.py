# SPDX-License-Identifier: Apache-2.0
"""ops.conventional_verify, the baseline with a state snapshot per draft token: against the oracle and the other ops."""

import warnings
from contextlib import contextmanager

import numpy as np
import oracle
import pytest
import torch
from mixer import (
    FP32_FACTOR,
    FP32_FLOOR,
    NANO_TP8,
    SMALL,
    SUPER_TP8,
    Stack,
    Weights,
    array,
    assert_accurate,
    random_tokens,
    recur,
    same_bits,
    zero_state,
)

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

CONFIG = ReplayConfig(window=8, max_step_tokens=4, activation="fp32")


def make_pool(device, geometry=SMALL, config=CONFIG, num_slots=2, num_layers=1):
    """A pool and snapshots that hold NaN: nothing may be read before it was written."""
    pool = StatePool(geometry, config, num_slots, num_layers, device)
    pool.data.fill_(0xFF)
    pool.reset(list(range(num_slots)))
    return pool, pool.allocate_snapshots().fill_(float("nan"))


def verify(pool, plan, snapshots, device, seed=0):
    tokens = random_tokens(pool.geometry, pool.activation, plan.num_tokens, device, seed)
    return ops.conventional_verify(
        pool, 0, plan, *tokens, *Weights.random(pool.geometry, device), snapshots=snapshots[0]
    )


@contextmanager
def row_error(pool, match):
    """The error of a bad value on the device: at once on the CPU, from the error word on CUDA."""
    with pytest.raises(ValueError, match=match):
        yield
        pool.validate()


@pytest.mark.parametrize(
    "geometry, activation, checkpoint, most",
    [
        (SMALL, "fp32", "fp32", 16),
        (MambaGeometry(2, 64, 1, 128), "bf16", "fp32", 8),
        (MambaGeometry(2, 64, 1, 128), "fp16", "fp16", 4),
        (MambaGeometry(2, 80, 2, 128), "bf16", "fp32", 5),
        (MambaGeometry(3, 24, 3, 64), "bf16", "bf16", 3),
        (SUPER_TP8, "bf16", "fp32", 4),
        (NANO_TP8, "fp16", "fp32", 2),
    ],
)
def test_any_acceptance_against_the_oracle(device, geometry, activation, checkpoint, most):
    """Mixed counts (0 included), padded rows, a prompt before some of the sequences, acceptance from 1 to all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the bf16 checkpoint
        config = ReplayConfig(window=2 * most, max_step_tokens=most, activation=activation, checkpoint=checkpoint)
    rows, rng = 4, np.random.default_rng(most)
    cycles = 15 if geometry.num_heads > 4 else 60
    pool, snapshots = make_pool(device, geometry, config, rows)
    weights = Weights.random(geometry, device)
    prompt = random_tokens(geometry, pool.activation, 14, device, seed=99)
    plan = pool.plan([2, 0], [9, 5])
    ops.prefill(pool, 0, plan, *prompt, *weights)
    pool.commit(plan)
    exact, single = ([zero_state(geometry)] * rows for _ in range(2))
    for slot, part in ((2, prompt.span(0, 9)), (0, prompt.span(9, 14))):
        exact[slot] = recur(exact[slot], part, weights)[1][-1]
        single[slot] = recur(single[slot], part, weights, np.float32)[1][-1]
    tokens_of, given, expected, conventional = np.array([5, 0, 9, 0]), [], [], []
    for cycle in range(cycles):
        order = [*rng.permutation(rows).tolist(), -1]
        counts = rng.integers(0, most + 1, rows + 1)
        accepted = np.where(counts > 0, rng.integers(1, np.maximum(counts, 1) + 1), 0)
        tokens = random_tokens(geometry, pool.activation, int(counts.sum()), device, seed=cycle)
        plan = pool.plan(order, counts.tolist())
        before = snapshots.clone()
        out = ops.conventional_verify(pool, 0, plan, *tokens, *weights, snapshots=snapshots[0])
        pool.commit(plan, accepted.tolist())
        for row, (slot, end) in enumerate(zip(order, np.cumsum(counts).tolist(), strict=True)):
            count = int(counts[row])
            if slot < 0:
                assert not out[end - count : end].any()
                continue
            assert same_bits(snapshots[0, slot, count:], before[0, slot, count:])
            if count == 0:
                continue
            mine = tokens.span(end - count, end)
            y, states = recur(exact[slot], mine, weights)
            y32, states32 = recur(single[slot], mine, weights, np.float32)
            if checkpoint == "fp32":
                bound = max(FP32_FLOOR, FP32_FACTOR * oracle.relative_error(states32[1:], states[1:]))
                assert oracle.relative_error(array(snapshots[0, slot, :count]), states[1:]) <= bound
            exact[slot], single[slot] = states[accepted[row]], states32[accepted[row]]
            tokens_of[slot] += accepted[row]
            given.append(out[end - count : end])
            expected.append(y)
            conventional.append(y32)
    pool.validate()
    assert pool.cursors().tokens.tolist() == tokens_of.tolist()
    if checkpoint == "fp32":
        assert_accurate(torch.cat(given), np.concatenate(expected), np.concatenate(conventional))
    else:  # rounded once a step
        error = oracle.relative_error(array(torch.cat(given)), np.concatenate(expected))
        assert error < {"fp16": 2e-3, "bf16": 2e-2}[checkpoint]


@pytest.mark.parametrize("geometry, activation", [(SMALL, "fp32"), (MambaGeometry(2, 64, 1, 128), "bf16")])
def test_equals_the_other_ops(device, geometry, activation):
    """Committed tokens have the bits of conventional_step (fp32 snapshots) and the values of ops.step."""
    config = ReplayConfig(window=16, max_step_tokens=4, activation=activation)
    pool, snapshots = make_pool(device, geometry, config, 3)
    weights, tokens = Weights.random(geometry, device), random_tokens(geometry, pool.activation, 120, device)
    rng, position, outputs, stepped = np.random.default_rng(0), 0, [], []
    while position + 4 <= 120:
        count = int(rng.integers(1, 5))
        accepted = int(rng.integers(1, count + 1))
        span = tokens.span(position, position + count)
        plan = pool.plan(0, count)
        outputs.append(ops.conventional_verify(pool, 0, plan, *span, *weights, snapshots=snapshots[0])[:accepted])
        pool.commit(plan, accepted)
        plan = pool.plan(1, count)
        stepped.append(ops.step(pool, 0, plan, *span, *weights)[:accepted])
        pool.commit(plan, accepted)
        position += accepted
    plan = pool.plan(2, position)
    reference = ops.conventional_step(pool, 0, plan, *tokens.span(0, position), *weights)
    pool.commit(plan)
    assert same_bits(torch.cat(outputs), reference)
    live = int(pool.cursors(0).history) - 1
    assert same_bits(snapshots[0, 0, live], pool.materialize(0, 2)[0][0])
    y = recur(zero_state(geometry), tokens.span(0, position), weights)[0]
    assert_accurate(torch.cat(stepped), y, array(reference))


def test_bits_of_a_row_do_not_depend_on_the_batch(device):
    """A row alone, among others and at another place in the batch; two layers with their convolutions."""
    stack = Stack(SUPER_TP8, ReplayConfig(window=16, max_step_tokens=4), device=device)
    tapes = [stack.tape(slot, 12) for slot in range(3)]

    def run(slots):
        pool = stack.pool(3)
        pool.reset([0, 1, 2])
        snapshots = pool.allocate_snapshots()
        op = lambda pool, layer, *given: ops.conventional_verify(pool, layer, *given, snapshots=snapshots[layer])  # noqa: E731
        outputs = []
        for first, count in ((0, 4), (2, 3), (5, 4)):  # accepts 2, then all 3
            chunks = [tuple(t[first : first + count] for t in tapes[slot]) for slot in slots]
            cycle = stack.cycle(pool, slots, chunks, [2 if first == 0 else count] * len(slots), op)
            outputs.append(dict(zip(slots, cycle, strict=True)))
        return outputs

    alone, together, turned = run([1]), run([0, 1, 2]), run([1, 2, 0])
    for one, three, other in zip(alone, together, turned, strict=True):
        assert same_bits(one[1], three[1]) and same_bits(one[1], other[1])


def test_cursors_and_counters(device):
    pool, snapshots = make_pool(device)
    for slots, counts, accepted in (([0, 1], [3, 2], [2, 2]), ([1, 0], [4, 1], [1, 1]), ([0, 1], [0, 4], [0, 4])):
        plan = pool.plan(slots, counts)
        verify(pool, plan, snapshots, device)
        pool.commit(plan, accepted)
    cursors = pool.cursors()
    assert cursors.tokens.tolist() == [3, 7]
    assert cursors.history.tolist() == [1, 4]  # snapshots 0 and 3 are live
    assert cursors.writes.tolist() == [2, 3]
    assert cursors.flags.tolist() == [8, 8]
    stats = pool.stats()
    assert stats["tokens"] == 10 and stats["flushes"] == 0
    assert stats["state_reads"] == 3  # the first two verifications started from zero
    assert stats["state_writes"] == 3 + 2 + 4 + 1 + 4
    assert stats["record_reads"] == stats["record_writes"] == 0


def test_accepting_nothing(device):
    """Harmless while the checkpoint is the state; afterwards the slot has overwritten what it would fall back to."""
    pool, snapshots = make_pool(device)
    plan = pool.plan([0, 1], 3)
    first = verify(pool, plan, snapshots, device)
    pool.commit(plan, [0, 1])
    assert pool.cursors().flags.tolist() == [0, 8] and pool.cursors().tokens.tolist() == [0, 1]
    plan = pool.plan([0, 1], 3)
    again = verify(pool, plan, snapshots, device)
    assert same_bits(again[:3], first[:3])
    pool.commit(plan, [3, 0])
    assert pool.cursors().flags.tolist() == [8, 2]
    with row_error(pool, "row 0: slot 1 .flags 2. is abandoned or half restored"):
        pool.plan(1)
    pool.reset(1)
    plan = pool.plan(1, 1)
    verify(pool, plan, snapshots, device)
    pool.commit(plan)
    assert pool.cursors(1).flags.item() == 8


def test_abandoned_verification(device):
    """Slots that began with the checkpoint, or brought no token, go on; the others need a reset."""
    pool, snapshots = make_pool(device, num_slots=3)
    for slot in (1, 2):
        plan = pool.plan(slot, 2)
        verify(pool, plan, snapshots, device)
        pool.commit(plan)
    plan = pool.plan([0, 1, 2], [2, 2, 0])
    verify(pool, plan, snapshots, device)
    pool.abandon(plan)
    assert pool.cursors().flags.tolist() == [0, 2, 8]
    plan = pool.plan(2)
    pool.abandon(plan)  # nothing consumed it
    assert pool.cursors(2).flags.item() == 8


def test_only_verification_reads_snapshots(device):
    pool, snapshots = make_pool(device, num_slots=3)
    plan = pool.plan(0, 2)
    verify(pool, plan, snapshots, device)
    pool.commit(plan)
    tokens, weights = random_tokens(SMALL, torch.float32, 2, device), Weights.random(SMALL, device)
    before, kept = pool.data.clone(), snapshots.clone()
    for op in (ops.step, ops.prefill, ops.conventional_step):
        plan = pool.plan([1, 0])
        with row_error(pool, "row 1: the state of slot 0 is a snapshot, expected ops.conventional_verify, or a reset"):
            op(pool, 0, plan, *tokens, *weights)
        pool.abandon(plan)
        assert pool.cursors(0).flags.item() == 8
        pool.reset(1)
    state, conv_tail = pool.materialize(0, 1)
    for use in (
        lambda: pool.materialize(0, 0),
        lambda: pool.copy(0, 1),
        lambda: pool.copy(1, 0),
        lambda: pool.restore(0, 0, state, conv_tail),
    ):
        with row_error(pool, "row 0: the state of slot 0 is a snapshot"):
            use()
    blob = pool.save(1)
    for use in (lambda: pool.save(0), lambda: pool.load(0, blob)):
        with pytest.raises(ValueError, match="got slot 0 whose state is a snapshot of ops.conventional_verify"):
            use()
    assert same_bits(pool.data[0, 0], before[0, 0]) and same_bits(snapshots, kept)
    pool.reset(0)
    assert pool.cursors(0).flags.item() == 0
    plan = pool.plan(0, 2)
    assert not ops.step(pool, 0, plan, *tokens, *weights).isnan().any()


def test_records_and_long_rows_are_refused(device):
    pool, snapshots = make_pool(device)
    tokens, weights = random_tokens(SMALL, torch.float32, 6, device), Weights.random(SMALL, device)
    plan = pool.plan(1, 2)
    ops.step(pool, 0, plan, *tokens.span(0, 2), *weights)
    pool.commit(plan)
    plan = pool.plan(1)
    with row_error(pool, "row 0: slot holds 2 records, expected none: conventional_step and _verify read none"):
        verify(pool, plan, snapshots, device)
    pool.abandon(plan)
    assert pool.cursors().flags.tolist() == [0, 0]
    plan = pool.plan(0, 5)
    with pytest.raises(ValueError, match="at most max_step_tokens = 4 tokens a row, got 5 in row 0; use ops.prefill"):
        verify(pool, plan, snapshots, device)
    assert plan.use is None
    plan.begin(None)  # as if only the device knew them
    with row_error(pool, "row 0: brings 5 tokens, expected at most 4"):
        ops.conventional_verify(pool, 0, plan, *tokens.span(0, 5), *weights, snapshots=snapshots[0])
    assert snapshots.isnan().all()


@pytest.mark.parametrize(
    "change, error, match",
    [
        (lambda s: s[:1], ValueError, r"snapshots: expected shape \(2, 4, 4, 16, 64\), got \(1, 4, 4, 16, 64\)"),
        (lambda s: s[:, :3], ValueError, r"snapshots: expected shape \(2, 4, 4, 16, 64\), got \(2, 3, 4, 16, 64\)"),
        (lambda s: s.half(), TypeError, "snapshots: expected torch.float32, got torch.float16"),
        (lambda s: s.to("meta"), ValueError, "snapshots: expected a tensor on .*, got one on meta"),
        (lambda s: s.mT.contiguous().mT, ValueError, "snapshots: expected contiguous slots, got strides"),
        (lambda s: s[:1].expand(2, -1, -1, -1, -1), ValueError, "snapshots: expected a slot stride of at least"),
        (lambda s: None, TypeError, "snapshots: expected a torch.Tensor, got NoneType"),
    ],
)
def test_wrong_snapshots(device, change, error, match):
    pool, snapshots = make_pool(device)
    plan = pool.plan([0, 1], 2)
    tokens, weights = random_tokens(SMALL, torch.float32, 4, device), Weights.random(SMALL, device)
    with pytest.raises(error, match=match):
        ops.conventional_verify(pool, 0, plan, *tokens, *weights, snapshots=change(snapshots[0]))
    assert snapshots.isnan().all()


def test_snapshots_between_other_memory(device):
    """Slots apart from each other, as in a buffer of [slots, layers, ...]."""
    pool, snapshots = make_pool(device, num_layers=1)
    strided = torch.full((2, 2, *snapshots.shape[2:]), float("nan"), device=device)
    outputs = []
    for target in (snapshots[0], strided[:, 1]):
        pool.reset([0, 1])
        for count in (3, 2):
            plan = pool.plan([0, 1], count)
            tokens = random_tokens(SMALL, torch.float32, 2 * count, device, seed=count)
            out = ops.conventional_verify(pool, 0, plan, *tokens, *Weights.random(SMALL, device), snapshots=target)
            outputs.append(out)
            pool.commit(plan)
    assert same_bits(outputs[0], outputs[2]) and same_bits(outputs[1], outputs[3])
    assert strided[:, 0].isnan().all() and same_bits(strided[:, 1], snapshots[0])
