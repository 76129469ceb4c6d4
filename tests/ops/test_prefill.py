# SPDX-License-Identifier: Apache-2.0
"""ops.prefill and ops.conventional_step against the float64 oracle, and chunked against one-shot."""

import numpy as np
import oracle
import pytest
import torch
from mixer import (
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

WINDOW = 8


def fold(pool, slot, tokens, weights, chunks, op=ops.prefill):
    outputs, first = [], 0
    for chunk in chunks:
        plan = pool.plan(slot, chunk)
        outputs.append(op(pool, 0, plan, *tokens.span(first, first + chunk), *weights))
        pool.commit(plan)
        first += chunk
    assert first == len(tokens.x)
    return torch.cat(outputs)


def chunkings(length, taps=4):
    """One-shot, and in chunks of 1, K-2, K-1, window - 1, window, window + 1."""
    sizes = (length, 1, taps - 2, taps - 1, WINDOW - 1, WINDOW, WINDOW + 1)
    return [[size] * (length // size) + ([length % size] if length % size else []) for size in sizes]


@pytest.mark.parametrize("op", [ops.prefill, ops.conventional_step])
@pytest.mark.parametrize(
    "geometry, activation",
    [
        (SUPER_TP8, "bf16"),
        (NANO_TP8, "fp16"),
        (SMALL, "fp32"),
        (MambaGeometry(2, 8, 1, 128), "fp32"),
        (MambaGeometry(4, 40, 2, 64), "bf16"),
        (MambaGeometry(2, 128, 2, 128), "fp32"),
    ],
)
def test_prompt_against_the_oracle(device, op, geometry, activation):
    pool = StatePool(geometry, ReplayConfig(window=WINDOW, max_step_tokens=4, activation=activation), 3, 1, device)
    pool.data.fill_(0xFF)
    weights = Weights.random(geometry, device, max_decay=32.0 if activation == "fp32" else 8.0)
    lengths = [70, 1, 29]
    tokens = random_tokens(geometry, pool.activation, sum(lengths), device)
    pool.reset([0, 1, 2])
    plan = pool.plan([2, 0, 1], lengths)
    out = op(pool, 0, plan, *tokens, *weights)
    pool.commit(plan)
    state = array(pool.materialize(0, [2, 0, 1])[0])
    first = 0
    for row, length in enumerate(lengths):
        mine = tokens.span(first, first + length)
        expected, states = recur(zero_state(geometry), mine, weights)
        conventional, states32 = recur(zero_state(geometry), mine, weights, dtype=np.float32)
        assert_accurate(out[first : first + length], expected, conventional)
        bound = max(2e-6, 1.25 * oracle.relative_error(states32[-1], states[-1]))
        assert oracle.relative_error(state[row], states[-1]) <= bound
        first += length
    cursors = pool.cursors([2, 0, 1])
    assert cursors.tokens.tolist() == lengths
    assert cursors.history.tolist() == [0, 0, 0] and cursors.writes.tolist() == [1, 1, 1]


@pytest.mark.parametrize("op", [ops.prefill, ops.conventional_step])
@pytest.mark.parametrize("activation", ["fp32", "bf16"])
def test_chunked_is_one_shot_bit_for_bit(device, op, activation):
    """With an fp32 checkpoint a chunk boundary rounds nothing: outputs and state keep their bits."""
    length = 41
    weights = Weights.random(SMALL, device)
    reference = None
    for chunks in chunkings(length):
        pool = StatePool(SMALL, ReplayConfig(window=WINDOW, max_step_tokens=2, activation=activation), 1, 1, device)
        pool.reset(0)
        tokens = random_tokens(SMALL, pool.activation, length, device)
        out = fold(pool, 0, tokens, weights, chunks, op)
        state = pool.materialize(0, 0)[0]
        reference = (out, state) if reference is None else reference
        assert same_bits(out, reference[0]), chunks
        assert same_bits(state, reference[1]), chunks


def test_chunked_mixer_is_one_shot_bit_for_bit(device):
    """The same through the convolution, two layers."""
    stack = Stack(SMALL, ReplayConfig(window=WINDOW, max_step_tokens=2, activation="fp32"), device=device)
    tape = stack.tape(5, 41)
    reference = None
    for chunk in (41, 1, 2, 3, WINDOW - 1, WINDOW, WINDOW + 1):
        pool = stack.pool()
        pool.reset(0)
        result = [stack.run(pool, 0, tape, ops.prefill, chunk), *pool.materialize(1, 0)]
        reference = result if reference is None else reference
        assert all(same_bits(a, b) for a, b in zip(result, reference, strict=True)), chunk


@pytest.mark.parametrize("first, second", [(32, 71), (64, 39), (96, 7)])
def test_a_cut_at_a_multiple_of_32_keeps_the_bits(device, first, second):
    """Where the tensor cores take a prompt in chunks of 32 tokens: elsewhere a cut keeps it to rounding."""
    weights = Weights.random(SUPER_TP8, device)
    tokens = random_tokens(SUPER_TP8, torch.bfloat16, 103, device)
    pool = StatePool(SUPER_TP8, ReplayConfig(window=WINDOW, max_step_tokens=2), 2, 1, device)
    pool.reset([0, 1])
    outputs = [fold(pool, slot, tokens, weights, chunks) for slot, chunks in ((0, [103]), (1, [first, second]))]
    assert same_bits(*outputs)
    assert same_bits(pool.data[0, 0], pool.data[0, 1])


@pytest.mark.parametrize("geometry, activation", [(SMALL, "fp32"), (NANO_TP8, "bf16")])
@pytest.mark.parametrize("history", [0, 1, 5, WINDOW])
def test_prefill_continues_from_records(device, history, geometry, activation):
    """A chunk after `history` stepped tokens (another turn of a chat), then steps again."""
    pool = StatePool(geometry, ReplayConfig(window=WINDOW, max_step_tokens=2, activation=activation), 1, 1, device)
    pool.data.fill_(0xFF)
    weights = Weights.random(geometry, device)
    tokens = random_tokens(geometry, pool.activation, 9 + history + 13 + 20, device)
    pool.reset(0)
    pieces = [(9, ops.prefill), *[(1, ops.step)] * history, (13, ops.prefill), *[(1, ops.step)] * 20]
    outputs, first = [], 0
    for count, op in pieces:
        plan = pool.plan(0, count)
        outputs.append(op(pool, 0, plan, *tokens.span(first, first + count), *weights))
        pool.commit(plan)
        first += count
    expected = recur(zero_state(geometry), tokens, weights)[0]
    conventional = recur(zero_state(geometry), tokens, weights, dtype=np.float32)[0]
    assert_accurate(torch.cat(outputs), expected, conventional)
    assert pool.cursors().tokens.tolist() == [len(tokens.x)]


@pytest.mark.parametrize("name", ["x", "B", "C", "dt"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_does_not_touch_those_before_it(device, name, value):
    weights = Weights.random(SUPER_TP8, device)
    tokens = random_tokens(SUPER_TP8, torch.bfloat16, 40, device)
    poisoned = tokens._replace(**{name: getattr(tokens, name).clone()})
    getattr(poisoned, name)[21].view(-1)[5] = value
    pool = StatePool(SUPER_TP8, ReplayConfig(window=WINDOW), 2, 1, device)
    pool.reset([0, 1])
    outputs = []
    for slot, given in ((0, tokens), (1, poisoned)):
        plan = pool.plan(slot, 40)
        outputs.append(ops.prefill(pool, 0, plan, *given, *weights))
    fine, bad = outputs
    assert same_bits(bad[:21], fine[:21])
    assert not bad[21].isfinite().all() and fine.isfinite().all()
    if name == "x":  # one row of one head
        others = torch.ones(16, 64, dtype=torch.bool)
        others[0, 5] = False
        assert same_bits(bad[:, others], fine[:, others])


def test_prefill_continues_after_a_rejection(device):
    """Rejected records lie in the ring when the next chunk folds the committed ones."""
    pool = StatePool(SMALL, ReplayConfig(window=WINDOW, max_step_tokens=4, activation="fp32"), 1, 1, device)
    weights = Weights.random(SMALL, device)
    pool.reset(0)
    drafts, chunk = random_tokens(SMALL, torch.float32, 4, device), random_tokens(SMALL, torch.float32, 7, device, 1)
    plan = pool.plan(0, 4)
    ops.step(pool, 0, plan, *drafts, *weights)
    pool.commit(plan, 1)
    plan = pool.plan(0, 7)
    out = ops.prefill(pool, 0, plan, *chunk, *weights)
    pool.commit(plan)
    state = recur(zero_state(SMALL), drafts.span(0, 1), weights)[1][-1]
    expected, states = recur(state, chunk, weights)
    assert_accurate(out, expected)
    assert oracle.relative_error(array(pool.materialize(0, 0)[0][0]), states[-1]) < 2e-6


def test_step_after_prefill_equals_prefill_alone(device):
    """Prefill and step are one recurrence: A18, the parts agree to fp32 rounding."""
    weights = Weights.random(SUPER_TP8, device)
    tokens = random_tokens(SUPER_TP8, torch.float32, 60, device)
    config = ReplayConfig(window=16, max_step_tokens=4, activation="fp32")
    pool = StatePool(SUPER_TP8, config, 2, 1, device)
    pool.reset([0, 1])
    whole = fold(pool, 0, tokens, weights, [60])
    parts = [fold(pool, 1, tokens.span(0, 20), weights, [20])]
    for first in range(20, 60, 4):
        plan = pool.plan(1, 4)
        parts.append(ops.step(pool, 0, plan, *tokens.span(first, first + 4), *weights))
        pool.commit(plan)
    assert oracle.relative_error(array(torch.cat(parts)), array(whole)) < 3e-6


def test_conventional_step_refuses_records(device):
    pool = StatePool(SMALL, ReplayConfig(window=WINDOW, max_step_tokens=4, activation="fp32"), 2, 1, device)
    weights, tokens = Weights.random(SMALL, device), random_tokens(SMALL, torch.float32, 2, device)
    pool.reset([0, 1])
    plan = pool.plan(1)
    ops.step(pool, 0, plan, *tokens.span(0, 1), *weights)
    pool.commit(plan)
    before = pool.data[0, 1].clone()
    plan = pool.plan([0, 1])
    with pytest.raises(ValueError, match=r"row 1: slot holds 1 records.*conventional_step"):
        ops.conventional_step(pool, 0, plan, *tokens, *weights)
        pool.validate()
    assert same_bits(pool.data[0, 1], before)
