# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts: ops.step with several tokens a row, whatever is accepted, against the float64 oracle."""

import warnings

import numpy as np
import oracle
import pytest
import torch
from mixer import (
    FP32_FACTOR,
    FP32_FLOOR,
    Stack,
    Tokens,
    Weights,
    array,
    assert_accurate,
    random_tokens,
    recur,
    same_bits,
    zero_state,
)

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

SMALLEST = MambaGeometry(num_heads=2, head_dim=8, num_groups=1, state_dim=64)


def configured(window, max_step_tokens, activation="fp32"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of windows below 2 * max_step_tokens
        return ReplayConfig(window=window, max_step_tokens=max_step_tokens, activation=activation)


def batched(tokens, rows):
    """Packed tokens of `rows` equal rows as [rows, T, ...]."""
    return Tokens(*(tensor.unflatten(0, (rows, -1)) for tensor in tokens))


@pytest.mark.parametrize(
    "window, max_step_tokens, geometry, activation",
    [
        (16, 16, SMALLEST, "fp32"),
        (24, 16, SMALLEST, "fp32"),
        (32, 16, SMALLEST, "fp32"),
        (17, 16, SMALLEST, "fp32"),
        (7, 5, SMALLEST, "fp32"),
        (1, 1, SMALLEST, "fp32"),
        (16, 16, MambaGeometry(2, 64, 1, 128), "bf16"),
        (23, 16, MambaGeometry(1, 80, 1, 128), "fp16"),
        (33, 9, MambaGeometry(3, 16, 1, 128), "bf16"),
    ],
)
def test_every_history_and_every_step_length(device, window, max_step_tokens, geometry, activation):
    """Row h holds h records; all rows verify T tokens for T = 1..T_max, then rows of different T share a batch.

    Rows of a mixed batch have the very bits of the uniform one, so all mixes are right if the uniform batches are.
    """
    histories = window + 1
    config = configured(window, max_step_tokens, activation)
    pool = StatePool(geometry, config, 2 * histories, 1, device)
    pool.data.fill_(0xFF)
    weights = Weights.random(geometry, device, max_decay=32.0 if activation == "fp32" else 8.0)
    begin, work = list(range(histories)), list(range(histories, 2 * histories))
    pool.reset(begin)
    # A prompt of 3 tokens, so that there is a checkpoint, then h records for row h.
    prompt = random_tokens(geometry, pool.activation, 3 * histories, device, seed=1)
    plan = pool.plan(begin, 3)
    ops.prefill(pool, 0, plan, *prompt, *weights)
    pool.commit(plan)
    exact = [recur(zero_state(geometry), prompt.span(3 * h, 3 * h + 3), weights)[1][-1] for h in begin]
    single = [recur(zero_state(geometry), prompt.span(3 * h, 3 * h + 3), weights, np.float32)[1][-1] for h in begin]
    for t in range(window):
        tokens = random_tokens(geometry, pool.activation, histories, device, seed=10 + t)
        plan = pool.plan([h if h > t else -1 for h in begin])
        ops.step(pool, 0, plan, *tokens, *weights)
        pool.commit(plan)
        for h in begin[t + 1 :]:
            exact[h] = recur(exact[h], tokens.span(h, h + 1), weights)[1][-1]
            single[h] = recur(single[h], tokens.span(h, h + 1), weights, np.float32)[1][-1]
    assert pool.cursors(begin).history.tolist() == begin

    new = batched(random_tokens(geometry, pool.activation, histories * max_step_tokens, device, seed=2), histories)
    expected = recur(np.stack(exact), new, weights)[0]
    conventional = recur(np.stack(single), new, weights, np.float32)[0]

    def verify(counts):
        """Outputs of each row, from the slots as they were."""
        pool.copy(begin, work)
        plan = pool.plan(work, counts)
        packed = (torch.cat([row[:count] for row, count in zip(t, counts, strict=True)]) for t in new)
        outputs = ops.step(pool, 0, plan, *packed, *weights)
        pool.abandon(plan)
        pool.reset(work)
        return outputs.split(counts)

    uniform = {}
    for count in range(1, max_step_tokens + 1):
        uniform[count] = verify([count] * histories)
        outputs = torch.stack(uniform[count])
        for token in range(count):
            assert_accurate(outputs[:, token], expected[:, token], conventional[:, token])
        for h in begin:
            assert_accurate(outputs[h], expected[h, :count], conventional[h, :count])
    for shift in range(max_step_tokens):
        counts = [(h + shift) % max_step_tokens + 1 for h in begin]
        for h, outputs in enumerate(verify(counts)):
            assert same_bits(outputs, uniform[counts[h]][h]), f"history {h}, {counts[h]} tokens"
    pool.validate()


@pytest.mark.parametrize("window", [16, 13])
def test_ten_thousand_steps_of_any_acceptance(device, window):
    """One row a pattern of acceptance; every output and, every 1,000 steps, every state against the oracle.

    The bound is the same in every block of 1,000 steps: the error does not grow.
    """
    steps, most, block = 10_000, 4, 1_000
    names = ["none for 40 steps", "all", "random", "rejected where the ring wraps", "another length every step"]
    rows, rng = len(names), np.random.default_rng(window)
    pool = StatePool(SMALLEST, configured(window, most), rows, 1, device)
    pool.data.fill_(0xFF)
    pool.reset(list(range(rows)))
    weights = Weights.random(SMALLEST, device)
    ring, period = pool.layout.ring_rows, 211  # distinct batches of tokens
    tape = random_tokens(SMALLEST, torch.float32, period * rows * most, device)
    numpy_tape = Tokens(*(array(t).reshape(period, rows, most, *t.shape[1:]) for t in tape))
    numpy_weights = [array(w) for w in weights]
    numpy_single = [Tokens(*(t.astype(np.float32) for t in numpy_tape)), [w.astype(np.float32) for w in numpy_weights]]
    exact, single = (np.zeros((rows, 2, 8, 64), dtype) for dtype in (np.float64, np.float32))
    tokens = np.zeros(rows, np.int64)
    wraps, error, error_single, norm = 0, 0.0, 0.0, 0.0
    plan = None
    for step in range(steps):
        counts = np.array([most, most, most, most, 1 + step % most])
        wrapping = tokens[3] % ring + most >= ring
        wraps += wrapping
        accepted = np.array(
            [most * (step % 41 == 40), most, rng.integers(0, most + 1), wraps % 2 if wrapping else most, 0]
        )
        accepted[4] = rng.integers(0, counts[4] + 1)
        batch = step % period
        first = batch * rows * most
        given = tape.span(first, first + int(counts.sum()))  # the last row's tokens end the batch
        plan = pool.plan(list(range(rows)), counts.tolist(), out=plan)
        outputs = array(ops.step(pool, 0, plan, *given, *weights))
        pool.commit(plan, accepted.tolist())

        y, states = oracle.recur(exact, *(t[batch] for t in numpy_tape), *numpy_weights)
        y32, states32 = oracle.recur(single, *(t[batch] for t in numpy_single[0]), *numpy_single[1], dtype=np.float32)
        y, y32 = (a.reshape(rows * most, 2, 8)[: len(outputs)] for a in (y, y32))
        exact, single = states[accepted, range(rows)], states32[accepted, range(rows)]
        tokens += accepted
        error += np.sum((outputs - y) ** 2)
        error_single += np.sum((y32 - y) ** 2)
        norm += np.sum(y**2)
        if step % block == block - 1:
            assert error**0.5 <= max(FP32_FLOOR * norm**0.5, FP32_FACTOR * error_single**0.5), f"outputs to {step}"
            error, error_single, norm = 0.0, 0.0, 0.0
            state = array(pool.materialize(0, list(range(rows)))[0])
            for row, name in enumerate(names):
                bound = max(FP32_FLOOR, FP32_FACTOR * oracle.relative_error(single[row], exact[row]))
                assert oracle.relative_error(state[row], exact[row]) <= bound, f"{name}: state after step {step}"
    pool.validate()
    assert pool.cursors().tokens.tolist() == tokens.tolist()
    assert tokens[0] == most * (steps // 41) and tokens[1] == most * steps
    assert wraps > 500


@pytest.mark.parametrize("right", range(4))
def test_drafter_that_is_right_k_of_3_times(device, right):
    """A14: k right drafts commit k + 1 tokens a step, always; a perfect drafter all 4. The outputs are the tape's.

    What is accepted follows from comparing the drafts with the tape, as an engine does it.
    """
    cycles, config = 60, configured(16, 4)
    tape = random_tokens(SMALLEST, torch.float32, cycles * 4 + 4, device, seed=1)
    wrong = random_tokens(SMALLEST, torch.float32, cycles * 4, device, seed=2)
    weights, pool = Weights.random(SMALLEST, device), StatePool(SMALLEST, config, 1, 1, device)
    pool.reset(0)
    position, outputs = 0, []
    for cycle in range(cycles):
        drafts = tape.span(position + 1, position + 1 + right)
        misses = wrong.span(4 * cycle, 4 * cycle + 3 - right)
        parts = zip(tape.span(position, position + 1), drafts, misses, strict=True)
        given = Tokens(*(torch.cat(part) for part in parts))
        plan = pool.plan(0, 4)
        out = ops.step(pool, 0, plan, *given, *weights)
        equal = (given.x == tape.x[position : position + 4]).all((1, 2)).tolist()
        accepted = (equal + [False]).index(False)
        pool.commit(plan, accepted)
        assert accepted == right + 1
        outputs.append(out[:accepted])
        position += accepted
    assert pool.cursors(0).tokens.item() == cycles * (right + 1)
    whole = tape.span(0, position)
    y, states = recur(zero_state(SMALLEST), whole, weights)
    y32, states32 = recur(zero_state(SMALLEST), whole, weights, np.float32)
    assert_accurate(torch.cat(outputs), y, y32)
    assert_accurate(pool.materialize(0, 0)[0][0], states[-1], states32[-1])


@pytest.mark.parametrize("geometry, activation", [(SMALLEST, "fp32"), (MambaGeometry(2, 64, 1, 128), "bf16")])
def test_rows_without_drafts_among_rows_with_drafts(device, geometry, activation):
    """A09: draft counts {3, 0, 1, 3}, random acceptance of the drafts, 200 steps; the counts move through the rows."""
    rng, rows = np.random.default_rng(9), 4
    pool = StatePool(geometry, configured(16, 4, activation), rows, 1, device)
    pool.data.fill_(0xFF)
    pool.reset(list(range(rows)))
    weights = Weights.random(geometry, device)
    exact, single = [zero_state(geometry)] * rows, [zero_state(geometry)] * rows
    outputs, expected, conventional = [], [], []
    for cycle in range(200):
        drafts = np.roll([3, 0, 1, 3], cycle // 7)
        accepted = 1 + rng.integers(0, drafts + 1)
        counts = (1 + drafts).tolist()
        tokens = random_tokens(geometry, pool.activation, sum(counts), device, seed=cycle)
        plan = pool.plan(list(range(rows)), counts)
        outputs.append(ops.step(pool, 0, plan, *tokens, *weights))
        pool.commit(plan, accepted.tolist())
        for row, end in enumerate(np.cumsum(counts).tolist()):
            mine = tokens.span(end - counts[row], end)
            y, states = recur(exact[row], mine, weights)
            y32, states32 = recur(single[row], mine, weights, np.float32)
            exact[row], single[row] = states[accepted[row]], states32[accepted[row]]
            expected.append(y)
            conventional.append(y32)
    pool.validate()
    assert_accurate(torch.cat(outputs), np.concatenate(expected), np.concatenate(conventional))
    state = pool.materialize(0, list(range(rows)))[0]
    bound = max(FP32_FLOOR, FP32_FACTOR * oracle.relative_error(np.stack(single), np.stack(exact)))
    assert oracle.relative_error(array(state), np.stack(exact)) <= bound


def test_failed_step_and_abandon_leave_every_other_slot_right(device):
    """A step fails in its second layer. Abandoned, it is as if it had never been, but for the slot that it flushed."""
    stack = Stack(SMALLEST, configured(6, 3), device=device)
    pool, twin = stack.pool(4), stack.pool(4)
    tapes = [stack.tape(slot, 40) for slot in range(4)]
    position = [2, 5, 6, 0]  # committed records; with 3 more tokens slots 1 and 2 flush

    def cycle(pool, slots, op=ops.step):
        chunks = [tuple(t[position[s] : position[s] + 3] for t in tapes[s]) for s in slots]
        return stack.cycle(pool, slots, chunks, [2] * len(slots), op)

    for each in (pool, twin):
        each.reset([0, 1, 2, 3])
        for slot in range(4):
            stack.run(each, slot, tuple(t[: position[slot]] for t in tapes[slot]))

    plans = []

    def fails_in_layer_1(pool, layer, plan, x, *arguments):
        plans.append(plan)
        return ops.step(pool, layer, plan, x.double() if layer == 1 else x, *arguments)

    with pytest.raises(TypeError, match="x: expected torch.float32, got torch.float64"):
        cycle(pool, [0, 1, 3], fails_in_layer_1)
    assert pool.cursors().flags.tolist() == [1, 1, 0, 1]
    pool.abandon(plans[-1])
    assert pool.cursors().flags.tolist() == [0, 2, 0, 0]  # slot 1 was flushed in one layer and not in the other
    pool.reset(1, streams=1)
    stack.run(pool, 1, tuple(t[: position[1]] for t in tapes[1]))
    for _ in range(8):
        assert all(map(same_bits, cycle(pool, [0, 1, 2, 3]), cycle(twin, [0, 1, 2, 3])))
        position = [p + 2 for p in position]
    for layer in range(2):
        here, there = (each.materialize(layer, [0, 1, 2, 3]) for each in (pool, twin))
        assert all(map(same_bits, here, there))
