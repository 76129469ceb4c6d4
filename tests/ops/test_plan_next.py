# SPDX-License-Identifier: Apache-2.0
"""plan_next, the commit of the last step and the plan of the next in one, against plan and commit of single slots."""

import random

import pytest
import torch
from mixer import SMALL, row_order

from trtllm_replayssm import ReplayConfig, StatePool, _core

WINDOW, MOST, SLOTS = 8, 3, 5
CONFIG = ReplayConfig(window=WINDOW, max_step_tokens=MOST, activation="fp32")
ACCEPT_ALL, NEW_SEQUENCE = -1, -2
FLUSH = 1


def make_pool(device, num_slots=SLOTS):
    return StatePool(SMALL, CONFIG, num_slots, 0, device)


def plan_next(pool, slots, counts, accepted, row_tokens):
    """The plan's rows as int32 [rows, 16], its header and order of rows."""
    slots, counts, accepted = (
        torch.tensor(values, dtype=torch.int32, device=pool.device) for values in (slots, counts, accepted)
    )
    rows = slots.numel()
    buffer = torch.zeros(_core.plan_bytes(rows), dtype=torch.uint8, device=pool.device)
    torch.ops.trtllm_replayssm.plan_next(pool.table, pool.spec, slots, counts, accepted, row_tokens, buffer)
    return parse(buffer, rows)


def parse(buffer, rows):
    words = buffer.cpu().view(torch.int32)
    header = words[:4].tolist()
    return words[16 : 16 + 16 * rows].view(rows, 16), header, words[16 + 16 * rows :][:rows].tolist()


def cursor(pool, slot):
    return [int(field[0]) for field in pool.cursors(slot)]


class Reference:
    """A pool in which every slot is planned and committed alone."""

    def __init__(self, device):
        self.pool = make_pool(device)
        self.plans = {}  # of steps, by slot
        self.pool.reset(range(SLOTS), streams=range(SLOTS))

    def settle(self, slot, accepted):
        if accepted == NEW_SEQUENCE:
            self.plans.pop(slot, None)
            self.pool.reset([slot], streams=[0])
        elif slot in self.plans:
            self.pool.commit(self.plans.pop(slot), None if accepted == ACCEPT_ALL else [accepted])

    def plan(self, slot, count, folded):
        plan = self.pool.plan([slot], count)
        row = parse(plan.buffer, 1)[0][0]
        plan.note_use("folded" if folded else "stepped", 0)
        if folded or count == 0:
            self.pool.commit(plan)
        else:
            self.plans[slot] = plan
        return row


@pytest.mark.parametrize("seed", range(3))
def test_is_commit_and_plan(device, seed):
    """200 batches of random slots, counts and acceptance, prefills and new sequences among them: same rows, same
    cursors, same traffic. A10, A11, A14."""
    rng = random.Random(seed)
    pool, reference = make_pool(device), Reference(device)
    pool.reset(range(SLOTS), streams=range(SLOTS))
    flushes = 0
    for _ in range(200):
        folded = rng.random() < 0.03
        row_tokens = rng.randint(MOST + 1, 9) if folded else rng.randint(1, MOST)
        slots = [slot if rng.random() < 0.8 else -1 for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS))]
        counts = [rng.randint(0, row_tokens) for _ in slots]
        accepted = []
        for slot in slots:
            pending = reference.plans[slot].counts[0] if slot in reference.plans else 0
            kept = rng.choice([rng.randint(0, pending), rng.randint(0, pending), ACCEPT_ALL])
            accepted.append(NEW_SEQUENCE if rng.random() < 0.01 else kept)
        rows, header, order = plan_next(pool, slots, counts, accepted, row_tokens)

        expected = torch.zeros_like(rows)
        for row, (slot, count, kept) in enumerate(zip(slots, counts, accepted, strict=True)):
            if slot >= 0:
                reference.settle(slot, kept)
                expected[row] = reference.plan(slot, count, folded)
            else:
                expected[row, 6], expected[row, 8] = -1, count
            expected[row, 7] = row * row_tokens
            if folded:
                expected[row, 10] &= ~FLUSH
        assert torch.equal(rows, expected)
        flagged = [row for row in range(len(slots)) if expected[row, 10] & FLUSH]
        live = sum(slot >= 0 for slot in slots)
        assert header == [len(slots), len(slots) * row_tokens, live, len(flagged)]
        assert order == row_order(rows)
        flushes += len(flagged)
        for slot in range(SLOTS):
            tokens, stream, writes, history, flags = cursor(pool, slot)
            assert [tokens, stream, writes, history, flags & 1] == cursor(reference.pool, slot)
            assert flags >> 8 == (reference.plans[slot].counts[0] if slot in reference.plans else 0)

    # a row of no tokens settles
    plan_next(pool, range(SLOTS), [0] * SLOTS, [ACCEPT_ALL] * SLOTS, 1)
    for slot in range(SLOTS):
        reference.settle(slot, ACCEPT_ALL)
        assert cursor(pool, slot) == cursor(reference.pool, slot)
    assert flushes > 15 and pool.stats() == reference.pool.stats()


@pytest.mark.parametrize(
    "slots, counts, accepted, row_tokens, match",
    [
        ([0, SLOTS], [1, 1], [0, 0], 2, f"row 1: slot is {SLOTS}, expected -1 .padded row. or less than {SLOTS}"),
        ([0, -2], [1, 1], [0, 0], 2, "row 1: slot is -2"),
        ([0, 2, 2], [1, 1, 1], [0, 0, 0], 1, "row 2: slot 2 has an outstanding plan or is named twice"),
        ([0, 2], [1, -1], [0, 0], 1, "row 1: token count is -1"),
        ([0, 2], [1, 3], [0, 0], 2, "row 1: its tokens end at 5, expected at most the 4"),
        ([0, 1], [1, 1], [0, 3], 1, "row 1: accepted is 3, expected 0..2"),
        ([0, 1], [1, 1], [0, -3], 1, "row 1: accepted is -3, expected 0..2"),
        ([0, 2], [1, 1], [0, 1], 1, "row 1: accepted is 1, expected 0..0"),
        ([0, 3], [1, 1], [0, -1], 1, "row 1: slot 3 has an outstanding plan"),
        ([0, 4], [1, 1], [0, 0], 1, "row 1: slot 4 .flags 2. is abandoned"),
    ],
)
def test_bad_rows_are_idle_rows(device, slots, counts, accepted, row_tokens, match):
    """A bad value leaves its slot as it was and its row idle; on the CPU nothing of the whole call is done."""
    pool = make_pool(device)
    pool.reset(range(SLOTS))
    plan_next(pool, [1], [2], [0], 2)  # slot 1: a step of 2 tokens is outstanding
    held = pool.plan([3])  # slot 3: opened by a plan that only commit ends
    abandoned = pool.plan([4], MOST + 1)
    abandoned.note_use("folded", 0)
    pool.abandon(abandoned)
    before = [cursor(pool, slot) for slot in range(SLOTS)]
    with pytest.raises(ValueError, match=match):
        rows, header, _ = plan_next(pool, slots, counts, accepted, row_tokens)
        assert rows[:, 6].tolist() == [0] + [2 if slots[1:] == [2, 2] else -1] + [-1] * (len(slots) - 2)
        assert rows[:, 7].tolist() == [row * row_tokens for row in range(len(slots))]
        pool.validate()
    changed = {slot for slot in range(SLOTS) if cursor(pool, slot) != before[slot]}
    assert changed == (set() if device.type == "cpu" else {0, 2} if slots[1:] == [2, 2] else {0})
    pool.commit(held)


@pytest.mark.parametrize("garbage", [0xA5, 0x7F])
def test_new_sequence_takes_any_slot(device, garbage):
    """NEW_SEQUENCE needs no reset before: open, abandoned and garbage cursors begin anew."""
    pool = make_pool(device)
    pool.table[_cursors(pool)] = garbage
    rows, header, _ = plan_next(pool, [2, 0], [3, 1], [NEW_SEQUENCE, NEW_SEQUENCE], 3)
    assert rows[:, :6].eq(0).all() and rows[:, 10].tolist() == [2, 2] and header[2] == 2  # no tokens, EMPTY
    assert cursor(pool, 2) == [0, 0, 0, 0, 1 | 3 << 8]
    plan_next(pool, [2], [0], [2], 1)
    assert cursor(pool, 2) == [2, 0, 0, 2, 0]


def _cursors(pool):
    start = pool._core.cursors_offset
    return slice(start, start + SLOTS * _core.CURSOR_BYTES)


def test_outstanding_slots_are_open_to_other_ops(device):
    """What needs a closed slot refuses one with an outstanding step; a reset takes it."""
    pool = make_pool(device)
    pool.reset([0, 1])
    plan_next(pool, [0], [2], [0], 2)
    with pytest.raises(ValueError, match="slot 0 has an outstanding plan"):
        pool.plan([0])
        pool.validate()
    with pytest.raises(ValueError, match="slots: expected closed, valid slots, got slot 0 with an outstanding plan"):
        pool.save([0])
    pool.reset([0], streams=[7])
    assert cursor(pool, 0) == [0, 7, 0, 0, 0]


@pytest.mark.parametrize("row_tokens", [0, -1, 2**31 - 1])
def test_row_tokens_out_of_range(device, row_tokens):
    pool = make_pool(device)
    with pytest.raises(ValueError, match="row_tokens: expected at least 1"):
        plan_next(pool, [0, 1], [1, 1], [0, 0], row_tokens)


def test_many_rows(device):
    """More rows than the CUDA kernel has threads, one slot named by rows that are far apart."""
    pool = make_pool(device, 1300)
    slots = [*range(1299, -1, -1), 5]
    with pytest.raises(ValueError, match="row 1300: slot 5 has an outstanding plan or is named twice"):
        rows, header, order = plan_next(pool, slots, [2] * 1301, [0] * 1301, 2)
        assert rows[:1300, 6].tolist() == slots[:1300] and rows[1300, 6] == -1 and header[2] == 1300
        assert order == row_order(rows)
        pool.validate()
    assert set(pool.cursors().flags.tolist()) == {0 if device.type == "cpu" else 1 | 2 << 8}
