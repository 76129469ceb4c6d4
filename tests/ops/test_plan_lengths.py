# SPDX-License-Identifier: Apache-2.0
"""plan_lengths, a plan from two lengths a sequence, against plans of a pool that did the same prefills and steps."""

import random

import pytest
import torch
from mixer import SMALL, row_order

from trtllm_replayssm import ReplayConfig, StatePool, _core

SLOTS, WINDOW = 7, 5
CONFIG = ReplayConfig(window=WINDOW, max_step_tokens=1, activation="fp32")
FLUSH = 1


def make_pool(device, num_slots=SLOTS):
    return StatePool(SMALL, CONFIG, num_slots, 0, device)


def plan_lengths(pool, slots, prompts, sequences=None, ends=None):
    """The plan's rows as int32 [rows, 16], its header, order of rows and error word. sequences None: of prompts."""
    if ends is None:
        counts = prompts if sequences is None else [1] * len(slots)
        ends = [sum(counts[: row + 1]) for row in range(len(counts))]
    given = [
        None if values is None else torch.tensor(values, dtype=torch.int32, device=pool.device)
        for values in (slots, prompts, sequences, ends)
    ]
    rows = len(slots)
    buffer = torch.full((_core.plan_bytes(rows),), 0x55, dtype=torch.uint8, device=pool.device)
    error = torch.full((8,), 0x5555, dtype=torch.int32, device=pool.device)
    torch.ops.trtllm_replayssm.plan_lengths(error, pool.spec, *given, sequences is None, buffer)
    words = buffer.cpu().view(torch.int32)
    header = words[:4].tolist()
    return (
        words[16 : 16 + 16 * rows].view(rows, 16),
        header,
        words[16 + 16 * rows :][:rows].tolist(),
        error.tolist(),
    )


@pytest.mark.parametrize("seed", range(2))
def test_is_the_plan_of_a_pool_that_did_all_steps(device, seed):
    """150 batches in which sequences begin, decode for several windows and give their slots to others, idle rows among
    them: the rows are those of a pool with cursors; those that flush come first in the order. A10, A11."""
    rng = random.Random(seed)
    pool, reference = make_pool(device), make_pool(device)
    prompts, decoded = {}, {}
    flushes = 0
    for _ in range(150):
        begin = not decoded or rng.random() < 0.2
        slots = rng.sample(range(SLOTS) if begin else sorted(decoded), rng.randint(1, SLOTS if begin else len(decoded)))
        slots += [-1] * rng.randint(0, 2)
        rng.shuffle(slots)
        if begin:
            for slot in slots:
                if slot >= 0:
                    prompts[slot], decoded[slot] = rng.choice([1, 2, rng.randint(3, 40)]), 0
                    reference.reset([slot], streams=[0])
        counts = [(prompts[slot] if begin else 1) if slot >= 0 else rng.randint(0, 2) for slot in slots]
        ends = [sum(counts[: row + 1]) for row in range(len(counts))]
        lengths = [prompts.get(slot, -7) for slot in slots]
        sequences = None if begin else [prompts[slot] + decoded[slot] + 1 if slot >= 0 else -9 for slot in slots]
        rows, header, order, error = plan_lengths(pool, slots, lengths, sequences, ends)

        plan = reference.plan(slots, torch.tensor(counts, dtype=torch.int32, device=pool.device))
        expected = plan.buffer.cpu().view(torch.int32)[16 : 16 + 16 * len(slots)].view(-1, 16).clone()
        plan.note_use("folded" if begin else "stepped", 0)
        reference.commit(plan)
        for row, slot in enumerate(slots):
            if slot < 0:
                expected[row, 8] = 0  # an idle row brings no tokens, wherever the next row begins
            elif not begin:
                decoded[slot] += 1
        assert torch.equal(rows, expected)
        flagged = [row for row in range(len(slots)) if expected[row, 10] & FLUSH]
        assert header == [len(slots), ends[-1], sum(slot >= 0 for slot in slots), len(flagged)]
        assert order == row_order(rows)
        assert error == [0] * 8
        flushes += len(flagged)
    assert flushes > 10


@pytest.mark.parametrize(
    "slots, prompts, sequences, ends, expected",
    [
        ([0, SLOTS], [3, 4], None, None, (1, 1, SLOTS, SLOTS)),
        ([0, -2], [3, 4], None, None, (1, 1, -2, SLOTS)),
        ([3, 2, 3], [3, 4, 5], None, None, (2, 2, 3, 0)),
        ([3, 2], [3, 0], None, None, (13, 1, 0, 1)),
        ([3, 2], [-2, 4], None, [0, 4], (13, 0, -2, 1)),
        ([3, 2], [3, 4], [4, 4], None, (13, 1, 0, 1)),  # a decode step before the prompt gave its first token
        ([3, 2], [3, 4], None, [3, 9], (5, 1, 9, 7)),  # a chunk of a prompt, or drafts beside it
        ([3, 2], [3, 4], [4, 5], [1, 3], (5, 1, 3, 2)),  # drafts in a decode step
    ],
)
def test_a_bad_row_is_named_and_does_nothing(device, slots, prompts, sequences, ends, expected):
    """On the host the call is refused; on the device the other rows are planned."""
    pool = make_pool(device)
    bad = expected[1]
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"row {bad}: "):
            plan_lengths(pool, slots, prompts, sequences, ends)
        return
    rows, header, order, error = plan_lengths(pool, slots, prompts, sequences, ends)
    code, row, given, _, limit, _ = error[:6]
    assert (code, row, given, limit) == expected
    assert rows[bad, 6] == -1 and rows[bad, 8] == 0
    assert header[2] == len(slots) - 1 and order == row_order(rows)
    assert [int(slot) for slot in rows[:, 6] if slot >= 0] == slots[:bad] + slots[bad + 1 :]


def test_batches_larger_than_a_tile(device):
    """1100 rows: packing, order and refusals reach across the tiles of the kernel."""
    rows = 1100
    pool = make_pool(device, num_slots=rows)
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [1 + slot % 9 for slot in slots]
    sequences = [prompt + 1 + slot % (2 * WINDOW) for prompt, slot in zip(prompts, slots, strict=True)]
    planned, header, order, _ = plan_lengths(pool, slots, prompts, sequences)
    expected = [row for row, slot in enumerate(slots) if slot % (2 * WINDOW) == WINDOW]
    assert order == row_order(planned) and order[: len(expected)] == expected
    assert header == [rows, rows, rows, len(expected)]
    assert planned[:, 6].tolist() == slots and planned[:, 7].tolist() == list(range(rows))
    if device.type != "cpu":
        slots[1099] = slots[3]
        planned, header, order, error = plan_lengths(pool, slots, prompts, sequences)
        assert error[:3] == [2, 1099, slots[3]] and header[2] == rows - 1 and order == row_order(planned)
        assert planned[1099, 6] == -1 and planned[3, 6] == slots[3]
