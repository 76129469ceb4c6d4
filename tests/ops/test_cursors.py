# SPDX-License-Identifier: Apache-2.0
"""The cursors: their arithmetic against a list of tokens, and everything that plan, commit and abandon refuse."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer import SMALL, SUPER_TP8, Weights, random_tokens, row_order

from trtllm_replayssm import ReplayConfig, StatePool, ops

WINDOW, MOST = 8, 3
CONFIG = ReplayConfig(window=WINDOW, max_step_tokens=MOST, activation="fp32")


def make_pool(device, num_slots=4, num_layers=1):
    return StatePool(SMALL, CONFIG, num_slots, num_layers, device)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@contextmanager
def row_error(pool, match):
    """The error of a bad value on the device: at once on the CPU, from the error word on CUDA."""
    with pytest.raises(ValueError, match=match):
        yield
        pool.validate()


def step(pool, plan, device, seed=0):
    tokens = random_tokens(SMALL, torch.float32, plan.num_tokens, device, seed)
    return ops.step(pool, 0, plan, *tokens, *Weights.random(SMALL, device))


def cursor(pool, slot):
    return [int(field[0]) for field in pool.cursors(slot)]


class Model:
    """A slot as lists: tokens in the checkpoint, tokens held as records."""

    def __init__(self, stream):
        self.folded, self.records, self.stream, self.writes, self.flushes = [], [], stream, 0, 0

    def step(self, new, accepted):
        if self.records and len(self.records) + len(new) > WINDOW:
            self.folded += self.records
            self.records, self.writes, self.flushes = [], self.writes + 1, self.flushes + 1
        self.records += new[:accepted]

    def fold(self, new):
        if new:
            self.folded += self.records + new
            self.records, self.writes = [], self.writes + 1

    def cursor(self):
        return [len(self.folded) + len(self.records), self.stream, self.writes, len(self.records), 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "fold", "reset", "abandon"]),
            st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=3, max_size=3),
        ),
        max_size=25,
    )
)
def test_cursor_arithmetic_of_a_list(moves):
    """A10, A14: tokens, history, writes and counters of three slots through any order of moves."""
    pool = StatePool(SMALL, CONFIG, 3, 0)
    pool.reset([0, 1, 2], streams=[10, 11, 12])
    models = [Model(10), Model(11), Model(12)]
    tokens = flushes = 0
    for move, rows in moves:
        if move == "reset":
            flushes += models[0].flushes
            pool.reset(0, streams=99)
            models[0] = Model(99)
            continue
        most = 12 if move == "fold" else MOST
        counts = [min(count, most) for count, _ in rows]
        accepted = [min(take, count) for (_, take), count in zip(rows, counts, strict=True)]
        plan = pool.plan([2, 0, 1], counts)
        if move == "abandon":
            whole = [not (m.records and len(m.records) + n > WINDOW) for m, n in zip_rows(models, counts)]
            pool.abandon(plan)
            for slot, keeps, model in zip([2, 0, 1], whole, [models[2], models[0], models[1]], strict=True):
                assert cursor(pool, slot)[4] == (0 if keeps else 2)
                if not keeps:
                    flushes += model.flushes
                    pool.reset(slot, streams=model.stream)
                    models[slot] = Model(model.stream)
            continue
        pool.commit(plan, accepted if move == "step" else None)
        for (model, count), take in zip(zip_rows(models, counts), accepted, strict=True):
            new = list(range(count))
            model.step(new, take) if move == "step" else model.fold(new)
            tokens += take if move == "step" else count
    for slot, model in enumerate(models):
        assert cursor(pool, slot) == model.cursor()
    assert pool.stats()["tokens"] == tokens
    assert pool.stats()["flushes"] == flushes + sum(model.flushes for model in models)


def zip_rows(models, counts):
    return zip([models[2], models[0], models[1]], counts, strict=True)


def test_standard_decoding_flushes_once_a_window(device):
    """The count of flushes, states and records that a run of T = 1 moves."""
    pool = make_pool(device, 1)
    pool.reset(0)
    for t in range(2 * WINDOW + 1):
        plan = pool.plan(0)
        step(pool, plan, device, t)
        pool.commit(plan)
        assert cursor(pool, 0) == [t + 1, 0, t // WINDOW, t % WINDOW + 1, 0]
    stats = pool.stats()
    state, record = 4 * 16 * 64 * 4, 4 * 4 + 4 * 16 * 4 + 2 * 64 * 4
    records_read = 2 * sum(range(WINDOW)) + 2 * WINDOW
    assert stats == {
        "tokens": 17,
        "flushes": 2,
        "state_reads": 8,  # none until the first flush, which starts from zero
        "state_writes": 2,
        "record_reads": records_read,
        "record_writes": 17,
        "step_reads": 7,
        "state_bytes_read": 8 * state,
        "state_bytes_written": 2 * state,
        "record_bytes_read": records_read * record,
        "record_bytes_written": 17 * record,
    }


def test_perfect_and_partial_drafts(device):
    """A14: a perfect drafter commits T a step; one that is right k of 2 times commits k + 1."""
    for right in range(MOST):
        pool = make_pool(device, 1)
        pool.reset(0)
        for cycle in range(6):
            plan = pool.plan(0, MOST)
            step(pool, plan, device)
            pool.commit(plan, right + 1)
            assert cursor(pool, 0)[0] == (cycle + 1) * (right + 1)


def test_readmitted_request_flushes_a_window_after_its_prompt(device):
    """A10: prompt + 21 tokens prefilled again; positions come from the tokens, the first flush from the records."""
    pool = make_pool(device, 1)
    pool.reset(0)
    plan = pool.plan(0, 26)
    tokens = random_tokens(SMALL, torch.float32, 26, device)
    ops.prefill(pool, 0, plan, *tokens, *Weights.random(SMALL, device))
    pool.commit(plan)
    for t in range(WINDOW + 1):
        plan = pool.plan(0)
        step(pool, plan, device)
        pool.commit(plan)
        assert cursor(pool, 0)[2:4] == ([1, t + 1] if t < WINDOW else [2, 1])


def test_plan_in_place(device):
    pool = make_pool(device)
    pool.reset([0, 1, 2, 3])
    plan = pool.plan([0, 1])
    address = plan.buffer.data_ptr()
    with pytest.raises(ValueError, match="out: expected a plan that was committed .* got an outstanding one"):
        pool.plan([2, 3], out=plan)
    step(pool, plan, device)
    pool.commit(plan)
    assert pool.plan([2, 3], [2, 0], out=plan) is plan
    assert plan.buffer.data_ptr() == address and (plan.num_tokens, plan.max_count) == (2, 2)
    step(pool, plan, device)
    pool.commit(plan, [1, 0])
    with pytest.raises(ValueError, match="out: expected a plan of this pool with 3 rows, got one of 2 rows"):
        pool.plan([0, 1, 2], out=plan)
    with pytest.raises(ValueError, match="out: expected a plan of this pool"):
        make_pool(device).plan([0, 1], out=plan)
    assert pool.cursors().tokens.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "slots, match",
    [
        ([0, 4], r"slots\[1\]: expected -1..3, got 4"),
        ([-2], r"slots\[0\]: expected -1..3, got -2"),
        ([1, -1, 1], r"slots\[2\]: expected distinct slots, got 1 again \(first in row 0\)"),
    ],
)
def test_host_slots_are_checked_at_once(device, slots, match):
    pool = make_pool(device)
    with pytest.raises(ValueError, match=match):
        pool.plan(slots)
    assert pool.cursors().flags.tolist() == [0] * 4


@pytest.mark.parametrize(
    "slots, counts, match",
    [
        ([0, 4], 1, "row 1: slot is 4, expected -1 .padded row. or less than 4"),
        ([0, -2], 1, "row 1: slot is -2, expected -1 .padded row. or less than 4"),
        ([2, 1, 2], 1, "row 2: slot 2 has an outstanding plan or is named twice"),
        ([0, 1], [1, -3], "row 1: token count is -3, expected 0 or more"),
    ],
)
def test_bad_device_values_touch_nothing(device, slots, counts, match):
    pool = make_pool(device)
    counts = int32(counts, device) if isinstance(counts, list) else counts
    with row_error(pool, match):
        pool.plan(int32(slots, device), counts)
    pool.validate()  # the word is cleared
    if device.type == "cpu":
        assert pool.cursors().flags.tolist() == [0] * 4
    plan = pool.plan(3)
    step(pool, plan, device)
    pool.commit(plan)
    assert cursor(pool, 3)[0] == 1


def test_second_plan_on_an_open_slot(device):
    pool = make_pool(device)
    pool.reset([0, 1])
    plan = pool.plan([0, 1])
    step(pool, plan, device)
    before = pool.data.clone()
    with row_error(pool, "row 1: slot 1 has an outstanding plan"):
        pool.plan([2, 1])
    if device.type == "cpu":
        assert pool.cursors().flags.tolist() == [1, 1, 0, 0]
    pool.commit(plan)
    assert pool.cursors([0, 1]).tokens.tolist() == [1, 1]
    assert torch.equal(pool.data, before)


def test_order_of_rows(device):
    """1,100 rows, more than the CUDA kernel has threads, of which a third are padded and some flush."""
    rows, flushes = 1100, 0
    pool = make_pool(device, num_slots=rows)
    pool.reset(range(rows))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2 * WINDOW // MOST):
        slots = torch.randperm(rows, generator=generator).int()
        slots[torch.rand(rows, generator=generator) < 1 / 3] = -1
        counts = torch.randint(MOST + 1, (rows,), generator=generator).int()
        plan = pool.plan(slots.to(device), counts.to(device))
        words = plan.buffer.cpu().view(torch.int32)
        planned, order = words[16 : 16 + 16 * rows].view(rows, 16), words[16 + 16 * rows :][:rows].tolist()
        assert planned[:, 6].tolist() == slots.tolist()
        assert order == row_order(planned)
        assert words[:4].tolist() == [rows, counts.sum(), (slots >= 0).sum(), (planned[:, 10] & 1).sum()]
        flushes += int(words[3])
        plan.note_use("stepped", 0)
        pool.commit(plan)
    assert flushes > 100


def test_commit_needs_its_outstanding_plan(device):
    pool, other = make_pool(device), make_pool(device)
    pool.reset([0, 1])
    plan = pool.plan([0, 1])
    with pytest.raises(ValueError, match="plan of this pool, got a plan of another pool|expected a plan of this pool"):
        other.commit(plan)
    with pytest.raises(ValueError, match="expected one that ops.step or ops.prefill consumed, got one that none did"):
        pool.commit(plan)
    step(pool, plan, device)
    pool.commit(plan)
    for end in (pool.commit, pool.abandon, lambda plan: step(pool, plan, device)):
        with pytest.raises(ValueError, match="expected an outstanding plan, got one that was committed, abandoned"):
            end(plan)
    assert pool.cursors([0, 1]).tokens.tolist() == [1, 1]


def test_stale_plan_of_a_slot_that_was_reset_and_planned_again(device):
    pool = make_pool(device, 1)
    pool.reset(0, streams=1)
    stale = pool.plan(0)
    step(pool, stale, device)
    pool.reset(0, streams=2)
    plan = pool.plan(0)
    step(pool, plan, device)
    with row_error(pool, "row 0: slot 0 was not opened by this plan"):
        pool.commit(stale)
    pool.commit(plan)
    assert cursor(pool, 0)[0] == 1


def test_commit_of_a_slot_that_was_reset_meanwhile(device):
    pool = make_pool(device)
    pool.reset([0, 1])
    plan = pool.plan([0, 1])
    step(pool, plan, device)
    pool.reset(1)
    with row_error(pool, "row 1: slot 1 was not opened by this plan"):
        pool.commit(plan)
    assert cursor(pool, 1)[0] == 0


@pytest.mark.parametrize(
    "accepted, match",
    [
        ([1, 3], r"accepted\[1\]: expected 0..2, the row's tokens, got 3"),
        ([-1, 0], r"accepted\[0\]: expected 0..\d+, got -1"),
        ([1], r"accepted: expected 2 rows, got 1"),
        ([1.5, 1], "accepted: expected ints"),
    ],
)
def test_host_accepted_is_checked_at_once(device, accepted, match):
    pool = make_pool(device)
    plan = pool.plan([0, 1], 2)
    step(pool, plan, device)
    with pytest.raises((ValueError, TypeError), match=match):
        pool.commit(plan, accepted)
    assert pool.cursors([0, 1]).flags.tolist() == [1, 1]
    pool.commit(plan, [2, 1])
    assert pool.cursors([0, 1]).tokens.tolist() == [2, 1]


@pytest.mark.parametrize("accepted", [[1, 3], [1, -1]])
def test_device_accepted_out_of_range(device, accepted):
    pool = make_pool(device)
    plan = pool.plan([0, 1], 2)
    step(pool, plan, device)
    with row_error(pool, f"row 1: accepted is {accepted[1]}, expected 0..2"):
        pool.commit(plan, int32(accepted, device))
    assert cursor(pool, 1)[0] == 0


def test_commit_check_raises_what_the_device_found(device):
    pool = make_pool(device)
    plan = pool.plan([0, 1], 2)
    step(pool, plan, device)
    with pytest.raises(ValueError, match="row 0: accepted is 9, expected 0..2"):
        pool.commit(plan, int32([9, 1], device), check=True)
    pool.validate()


@pytest.mark.parametrize("op", [ops.prefill, ops.conventional_step])
def test_folded_tokens_cannot_be_rejected(device, op):
    pool = make_pool(device)
    plan = pool.plan([0], 3)
    op(pool, 0, plan, *random_tokens(SMALL, torch.float32, 3, device), *Weights.random(SMALL, device))
    with row_error(pool, "row 0: accepted is 2, expected 0..3 .exactly the upper limit after prefill."):
        pool.commit(plan, 2)


def test_one_plan_one_use(device):
    pool = make_pool(device)
    tokens, weights = random_tokens(SMALL, torch.float32, 1, device), Weights.random(SMALL, device)
    plan = pool.plan(0)
    ops.step(pool, 0, plan, *tokens, *weights)
    for op in (ops.prefill, ops.conventional_step):
        with pytest.raises(ValueError, match="expected one that is not stepped yet, got one for an op of folded plans"):
            op(pool, 0, plan, *tokens, *weights)
    plan = pool.plan(1)
    ops.prefill(pool, 0, plan, *tokens, *weights)
    with pytest.raises(ValueError, match="expected one that is not folded yet, got one for an op of stepped plans"):
        ops.step(pool, 0, plan, *tokens, *weights)


def test_refused_op_leaves_plan_and_records(device):
    """conventional_step of a slot with records is refused; the plan can still be stepped and nothing is lost."""
    pool = make_pool(device)
    tokens, weights = random_tokens(SMALL, torch.float32, 1, device), Weights.random(SMALL, device)
    plan = pool.plan(0)
    ops.step(pool, 0, plan, *tokens, *weights)
    pool.commit(plan)
    plan = pool.plan(0)
    with row_error(pool, "holds 1 records"):
        ops.conventional_step(pool, 0, plan, *tokens, *weights)
    if device.type == "cpu":
        ops.step(pool, 0, plan, *tokens, *weights)
        pool.commit(plan)
        assert cursor(pool, 0)[3] == 2


def test_long_row_is_never_committed_as_stepped(device):
    """conv_step treats a long row as a prompt and keeps its last inputs only: there is no way back but abandon."""
    pool = make_pool(device)
    plan = pool.plan(int32([0], device), int32([9], device))
    raw = torch.zeros((9, SMALL.conv_channels), device=device)
    ops.conv_step(pool, 0, plan, raw, torch.zeros((SMALL.conv_channels, 4), device=device))
    plan.note_use("stepped", 0)
    with row_error(pool, "row 0: accepted is 0"):
        pool.commit(plan, int32([0], device))
    plan.open = True
    pool.abandon(plan)
    assert pool.cursors([0]).flags.tolist() == [2]


def test_step_refuses_long_rows(device):
    pool = make_pool(device)
    tokens, weights = random_tokens(SMALL, torch.float32, 6, device), Weights.random(SMALL, device)
    plan = pool.plan([0, 1], [2, 4])
    with pytest.raises(ValueError, match=r"at most max_step_tokens = 3 tokens a row, got 4 in row 1; use ops.prefill"):
        ops.step(pool, 0, plan, *tokens, *weights)
    ops.prefill(pool, 0, plan, *tokens, *weights)
    pool.commit(plan)
    if device.type == "cuda":
        plan = pool.plan([0, 1], int32([2, 4], device))
        ops.step(pool, 0, plan, *tokens, *weights)
        with pytest.raises(ValueError, match="row 1: brings 4 tokens, expected at most 3"):
            pool.validate()


@pytest.mark.parametrize("most", [2, 5])
def test_a_bound_of_counts_that_only_the_device_knows(device, most):
    pool = make_pool(device)
    tokens, weights = random_tokens(SMALL, torch.float32, 5, device), Weights.random(SMALL, device)
    counts = int32([2, 3], device)
    if device.type == "cpu":  # where the host knows them, too
        if most == 2:
            with pytest.raises(ValueError, match=r"tokens_per_row\[1\]: expected at most most = 2, got 3"):
                pool.plan([0, 1], counts, most=most)
            assert not pool.cursors().flags.any()
        else:
            assert pool.plan([0, 1], counts, most=most).max_count == 3
        return
    plan = pool.plan([0, 1], counts, most=most)
    if most == 2:
        ops.step(pool, 0, plan, *tokens, *weights)
        with pytest.raises(ValueError, match="row 1: brings 3 tokens, expected at most 2"):
            pool.validate()
    else:
        with pytest.raises(ValueError, match="at most max_step_tokens = 3 tokens a row, got 5; use ops.prefill"):
            ops.step(pool, 0, plan, *tokens, *weights)


def test_tokens_beyond_the_tensors(device):
    """Counts that only the device knows and that ask for more tokens than were given."""
    pool = make_pool(device)
    tokens, weights = random_tokens(SMALL, torch.float32, 3, device), Weights.random(SMALL, device)
    plan = pool.plan([0, 1], int32([2, 2], device))
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"x: expected shape \(4, 4, 16\), got \(3, 4, 16\)"):
            ops.step(pool, 0, plan, *tokens, *weights)
        plan.begin(None)  # as on a device
    before = pool.data[0, 1].clone()
    with row_error(pool, "row 1: its tokens end at 4, expected at most the 3 tokens"):
        ops.step(pool, 0, plan, *tokens, *weights)
    assert torch.equal(pool.data[0, 1], before)


@pytest.mark.parametrize("checkpoint, read_copy", [("fp32", "none"), ("fp16_sr", "none"), ("fp16_sr", "nvfp4")])
def test_tokens_of_a_row_that_flushes_alone_beyond_the_tensors(device, checkpoint, read_copy):
    """Such a row is reported, too, where all CTAs of a launch fold."""
    config = ReplayConfig(window=WINDOW, max_step_tokens=2, checkpoint=checkpoint, read_copy=read_copy)
    pool, weights = StatePool(SUPER_TP8, config, 1, 1, device), Weights.random(SUPER_TP8, device)
    pool.reset([0])
    tokens = random_tokens(SUPER_TP8, torch.bfloat16, 2, device)
    for _ in range(WINDOW // 2):
        plan = pool.plan([0], 2)
        ops.step(pool, 0, plan, *tokens, *weights)
        pool.commit(plan)
    plan = pool.plan([0], int32([2], device))
    if device.type == "cpu":
        plan.begin(None)  # as on a device
    before = pool.data.clone()
    with row_error(pool, "row 0: its tokens end at 2, expected at most the 1 tokens"):
        ops.step(pool, 0, plan, *tokens.span(0, 1), *weights)
    assert torch.equal(pool.data, before)


def test_abandoned_flush_needs_a_reset(device):
    pool = make_pool(device, 2)
    pool.reset([0, 1])
    for _ in range(WINDOW):
        plan = pool.plan(0)
        step(pool, plan, device)
        pool.commit(plan)
    plan = pool.plan([0, 1])
    step(pool, plan, device)
    pool.abandon(plan)
    assert pool.cursors().flags.tolist() == [2, 0]
    for use in (lambda: pool.plan(0), lambda: pool.materialize(0, 0), lambda: pool.copy(0, 1)):
        with row_error(pool, r"row 0: slot 0 \(flags 2\) is abandoned or half restored"):
            use()
    with pytest.raises(ValueError, match="expected closed, valid slots, got slot 0 that was abandoned"):
        pool.save([1, 0])
    pool.reset(0)
    plan = pool.plan([0, 1])
    step(pool, plan, device)
    pool.commit(plan)
    assert pool.cursors().tokens.tolist() == [1, 1]


def test_pool_without_layers(device):
    """A08: a pipeline rank without Mamba layers has a pool of no bytes whose cursors move all the same."""
    pool = make_pool(device, 2, num_layers=0)
    assert pool.data.numel() == 0
    pool.reset([0, 1])
    plan = pool.plan([0, 1], 20)
    pool.commit(plan)
    plan = pool.plan([0, 1], 3)
    pool.commit(plan, [1, 3])
    assert pool.cursors().tokens.tolist() == [21, 23]
    pool.load([1], pool.save([0]))
    pool.copy(1, 0)
    assert pool.cursors().tokens.tolist() == [21, 21]
    assert pool.stats()["state_bytes_read"] == 0
    tokens, weights = random_tokens(SMALL, torch.float32, 1, device), Weights.random(SMALL, device)
    with pytest.raises(ValueError, match="layer: expected .* of 0 layers, got 0"):
        ops.step(pool, 0, pool.plan(0), *tokens, *weights)


def test_every_slot_live_at_once(device):
    """A07: as many live rows as slots, with padded rows besides, for 100 steps."""
    pool = make_pool(device, 8)
    pool.reset(list(range(8)))
    rng = np.random.default_rng(0)
    expected = np.zeros(8, int)
    for cycle in range(100):
        order = rng.permutation(8)
        plan = pool.plan([*order.tolist(), -1, -1], MOST)
        step(pool, plan, device, cycle)
        accepted = rng.integers(0, MOST + 1, 8)
        pool.commit(plan, [*accepted.tolist(), 0, 0])
        expected[order] += accepted
    assert pool.cursors().tokens.tolist() == expected.tolist()
    assert pool.cursors().history.max() <= WINDOW


def test_streams(device):
    pool = make_pool(device)
    pool.reset([0, 1])
    pool.reset([2, -1, 3])
    assert pool.cursors().stream.tolist() == [0, 1, 2, 4]
    pool.reset([1, 2], streams=[2**64 - 1, 5])
    pool.reset([3], streams=torch.tensor([2**62], device=device))
    assert pool.cursors().stream.tolist() == [0, -1, 5, 2**62]
    with pytest.raises(ValueError, match=r"streams\[0\]: expected 0\.\.18446744073709551615, got -1"):
        pool.reset(0, streams=-1)
    with pytest.raises(ValueError, match="streams: expected 2 rows, got 1"):
        pool.reset([0, 1], streams=[3])
