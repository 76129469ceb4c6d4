# SPDX-License-Identifier: Apache-2.0
"""A row's bits depend on nothing but its own sequence; memory that is not the row's own is neither read nor written."""

import pytest
import torch
from mixer import NANO_TP8, SMALL, SUPER_TP8, Stack, same_bits

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

GENERIC = MambaGeometry(num_heads=4, head_dim=24, num_groups=2, state_dim=64)
COPY = {"checkpoint": "fp16", "read_copy": "nvfp4"}
SR, NVFP4 = {"checkpoint": "fp16_sr"}, {"read_copy": "nvfp4"}
CASES = [
    (SUPER_TP8, "bf16", {}),
    (NANO_TP8, "fp16", {}),
    (SUPER_TP8, "bf16", {"checkpoint": "fp16", "window": 16}),
    (NANO_TP8, "fp16", {"checkpoint": "bf16", "window": 16}),
    (GENERIC, "bf16", {}),
    (SMALL, "fp32", {}),
    (MambaGeometry(num_heads=6, head_dim=48, num_groups=1, state_dim=128), "bf16", COPY),
]


def stack_of(geometry, activation, device, window=8, **config):
    return Stack(geometry, ReplayConfig(window, max_step_tokens=4, activation=activation, **config), device=device)


def solo(stack, seed, schedule):
    """Outputs of a sequence alone in a pool of one slot. schedule: (op, count, accepted) a cycle."""
    pool = stack.pool()
    pool.reset(0)
    tape, first, outputs = stack.tape(seed, 200), 0, []
    for op, count, accepted in schedule:
        chunk = tuple(tensor[first : first + count] for tensor in tape)
        outputs.append(stack.cycle(pool, [0], [chunk], [accepted], op)[0])
        first += accepted
    return outputs, pool


PREFILL, STEP = ops.prefill, ops.step
SCHEDULES = [
    [(PREFILL, 11, 11), (STEP, 1, 1), (STEP, 4, 2), (STEP, 4, 4), (STEP, 1, 1), (STEP, 4, 3), (PREFILL, 5, 5)],
    [(PREFILL, 1, 1), (STEP, 4, 4), (STEP, 4, 0), (STEP, 4, 4), (STEP, 2, 1), (STEP, 1, 1), (PREFILL, 9, 9)],
    [(PREFILL, 3, 3), (STEP, 2, 2), (STEP, 1, 1), (STEP, 3, 1), (STEP, 4, 2), (STEP, 4, 4), (PREFILL, 2, 2)],
]


@pytest.mark.parametrize("geometry, activation, formats", CASES)
def test_batch_slot_and_padding_leave_a_row_its_bits(device, geometry, activation, formats):
    """A01, A27: three rows among five padded ones in a pool of 0xFF bytes equal three solo runs; no NaN appears."""
    stack = stack_of(geometry, activation, device, **formats)
    seeds = [1, 2, 3]
    expected = [solo(stack, seed, schedule) for seed, schedule in zip(seeds, SCHEDULES, strict=True)]
    pool = stack.pool(9)
    slots = [7, 2, 5]
    pool.reset(slots)
    tapes, firsts = [stack.tape(seed, 200) for seed in seeds], [0, 0, 0]
    for cycle in range(len(SCHEDULES[0])):
        layout = [-1, 0, -1, 1, -1, -1, 2, -1] if cycle % 2 else [2, -1, -1, -1, 1, 0, -1, -1]
        chunks, accepted = [], []
        for row in layout:
            _, count, take = SCHEDULES[row][cycle] if row >= 0 else (None, 1 + cycle % 3, 0)
            chunk = [t[firsts[row] : firsts[row] + count] for t in tapes[row]] if row >= 0 else stack.tape(99, count)
            chunks.append([t * float("nan") for t in chunk] if row < 0 else chunk)
            accepted.append(take if row >= 0 else -5)
        op = SCHEDULES[0][cycle][0]
        plan_slots = torch.tensor([slots[row] if row >= 0 else -1 for row in layout], dtype=torch.int32, device=device)
        accepted_rows = torch.tensor(accepted, dtype=torch.int32, device=device)
        outputs = stack.cycle(pool, plan_slots, chunks, accepted_rows, op)
        pool.validate()
        for row, out in zip(layout, outputs, strict=True):
            if row < 0:
                assert not out.any()
            else:
                assert out.isfinite().all()
                assert same_bits(out, expected[row][0][cycle]), f"cycle {cycle}, row {row}"
                firsts[row] += SCHEDULES[row][cycle][2]
    for slot, (_, alone) in zip(slots, expected, strict=True):
        for layer in range(2):
            pairs = zip(pool.materialize(layer, slot), alone.materialize(layer, 0), strict=True)
            assert all(same_bits(a, b) for a, b in pairs)
    unused = [slot for slot in range(9) if slot not in slots]
    assert pool.data[:, unused].eq(0xFF).all()
    assert not any(field[unused].any() for field in pool.cursors())


@pytest.mark.parametrize("geometry, activation, formats", CASES)
def test_guards_around_memory_stay_intact(device, geometry, activation, formats):
    """Nothing is written beside the pool, the table, the outputs, the plan, and nothing beside them is read."""
    stack = stack_of(geometry, activation, device, **formats)
    expected = [solo(stack, seed, SCHEDULES[0])[0] for seed in (1, 2)]
    pool = StatePool(geometry, stack.config, 2, 2, device)
    guard = 1 << 16
    guarded = []

    def between_guards(tensor):
        outer = torch.full((guard + tensor.numel() * tensor.element_size() + guard,), 0xFF, dtype=torch.uint8)
        outer = outer.to(device)
        inner = outer[guard:-guard].view(tensor.dtype).view(tensor.shape)
        inner.copy_(tensor)
        guarded.append(outer)
        return inner

    pool.data = between_guards(pool.data)
    pool.table = between_guards(pool.table)
    pool.reset([0, 1])
    tapes, first = [stack.tape(seed, 200) for seed in (1, 2)], 0
    for cycle, (op, count, accepted) in enumerate(SCHEDULES[0]):
        plan = pool.plan([0, -1, 1], [count, 2, count])
        plan.buffer = between_guards(plan.buffer)
        raw, dt = (
            between_guards(torch.cat([a[first : first + count], b[:2] * float("nan"), b[first : first + count]]))
            for a, b in zip(*tapes, strict=True)
        )
        for layer, mixer in enumerate(stack.mixers):
            xBC, out = (
                between_guards(torch.full(shape, float("nan"), dtype=pool.activation, device=device))
                for shape in (raw.shape, (len(raw), geometry.num_heads, geometry.head_dim))
            )
            ops.conv_step(pool, layer, plan, raw, mixer.conv_weight, mixer.conv_bias, out=xBC)
            op(pool, layer, plan, *mixer.split(xBC), dt, *mixer.weights, out=out)
            assert out[count : count + 2].isnan().all() and xBC[count : count + 2].isnan().all()
            assert same_bits(out[:count], expected[0][cycle][layer])
            assert same_bits(out[count + 2 :], expected[1][cycle][layer])
        pool.commit(plan, [accepted, 0, accepted])
        first += accepted
    pool.validate()
    for outer in guarded:
        assert outer[:guard].eq(0xFF).all() and outer[-guard:].eq(0xFF).all()


def test_gaps_between_sections_stay_unused(device):
    """A13: the bytes between sections, and rings of other slots, hold NaN and keep it."""
    geometry = MambaGeometry(num_heads=3, head_dim=8, num_groups=1, state_dim=64)  # sections end off their alignment
    stack = stack_of(geometry, "bf16", device)
    expected, _ = solo(stack, 1, SCHEDULES[0])
    pool = stack.pool(3)
    used = torch.zeros(pool.layout.slot_stride, dtype=torch.bool)
    for section in pool.layout.sections.values():
        used[section.offset : section.offset + section.bytes] = True
    assert not used.all()
    pool.reset(1)
    tape, first = stack.tape(1, 200), 0
    for cycle, (op, count, accepted) in enumerate(SCHEDULES[0]):
        chunk = tuple(t[first : first + count] for t in tape)
        assert same_bits(stack.cycle(pool, [1], [chunk], [accepted], op)[0], expected[cycle])
        first += accepted
    assert pool.data[:, 1][:, ~used].eq(0xFF).all()
    assert pool.data[:, [0, 2]].eq(0xFF).all()


@pytest.mark.parametrize("geometry, activation, formats", CASES)
def test_nan_in_dead_records_changes_nothing(device, geometry, activation, formats):
    """Ring rows outside the last `history` records are skipped, never multiplied by zero."""
    stack = stack_of(geometry, activation, device, **formats)
    tape = stack.tape(1, 60)
    pools = [stack.pool(), stack.pool()]
    for pool in pools:
        pool.reset(0)
    ring_rows = pools[0].layout.ring_rows
    first = 0
    for cycle in range(24):
        count, accepted = (4, 3) if cycle % 3 == 0 else (2, 2)
        chunk = tuple(t[first : first + count] for t in tape)
        outputs = [stack.cycle(pool, [0], [chunk], [accepted])[0] for pool in pools]
        assert same_bits(*outputs) and outputs[0].isfinite().all()
        first += accepted
        history = int(pools[1].cursors().history[0])
        live = {(first - 1 - back) % ring_rows for back in range(history)}
        dead = [row for row in range(ring_rows) if row not in live]
        for name in ("x_ring", "b_ring", "delta_ring"):
            section = pools[1].layout.sections[name]
            ring = pools[1].data[:, :, section.offset : section.offset + section.bytes]
            ring = ring.view(torch.float32 if name == "delta_ring" else pools[1].activation)
            ring.unflatten(2, section.shape)[:, :, :, dead] = float("nan")
    assert pools[0].stats()["flushes"] > 0


@pytest.mark.parametrize("geometry, activation, formats", CASES)
def test_nan_in_a_token_stays_behind_the_tokens_before(device, geometry, activation, formats):
    """Of 4 tokens the third is NaN: the first two have the bits of a step without it; so has the other row."""
    stack = stack_of(geometry, activation, device, **formats)
    pools = [stack.pool(2), stack.pool(2)]
    tape, other = stack.tape(1, 20), stack.tape(2, 20)
    outputs = []
    for broken, pool in enumerate(pools):
        pool.reset([0, 1])
        stack.run(pool, 0, tuple(t[:5] for t in tape))
        stack.run(pool, 1, tuple(t[:5] for t in other))
        raw, dt = (t[5:9].clone() for t in tape)
        if broken:
            raw[2], dt[2] = float("nan"), float("nan")
        outputs.append(stack.cycle(pool, [1, 0], [tuple(t[5:9] for t in other), (raw, dt)], [4, 2]))
    assert outputs[1][1][:, 2:].isnan().all()
    assert same_bits(outputs[0][1][:, :2], outputs[1][1][:, :2]) and same_bits(outputs[0][0], outputs[1][0])
    last = tuple(t[9:12] for t in tape)
    assert same_bits(stack.cycle(pools[0], [0], [last])[0], stack.cycle(pools[1], [0], [last])[0])


@pytest.mark.parametrize(
    "head_dim, most, formats",
    [(64, 4, {}), (80, 4, {}), (64, 4, SR | NVFP4), (64, 2, SR), (16, 1, SR | NVFP4), (48, 1, SR)],
)
def test_rows_of_large_batches_have_the_bits_of_small_ones(device, head_dim, most, formats):
    """However many heads a large batch makes a CTA take. Rows stand at different histories; some flush. On a GPU of
    up to 148 multiprocessors the batch is so large that jobs are of four heads and dealt out, and warps take several.
    """
    geometry = MambaGeometry(num_heads=9, head_dim=head_dim, num_groups=1, state_dim=128)
    rows = 260 if device.type == "cpu" else 800
    picked = [3, 100, rows - 1]
    stack = Stack(geometry, ReplayConfig(window=8, max_step_tokens=most, **formats), num_layers=1, device=device)
    pools = [stack.pool(rows), stack.pool(rows)]
    every = list(range(rows))
    for pool in pools:
        pool.reset(every)
    raw, dt = (tensor.unflatten(0, (rows, most)) for tensor in stack.tape(1, most * rows))
    for cycle in range(16 // most):
        counts = [1 + (row + cycle) % most for row in every]
        chunks = [(raw[row, :n], dt[row, :n]) for row, n in zip(every, counts, strict=True)]
        whole = stack.cycle(pools[0], every, chunks)
        for row in picked:
            assert same_bits(stack.cycle(pools[1], [row], [chunks[row]])[0], whole[row]), f"cycle {cycle}, row {row}"
    for row in picked:
        assert same_bits(pools[0].data[:, row], pools[1].data[:, row])
    assert pools[1].stats()["flushes"] > 0


def test_recycled_slot_carries_nothing_over(device):
    """A11: request A leaves mid-window; B takes its slot with a shorter prompt and equals a run in a fresh pool."""
    stack = stack_of(SUPER_TP8, "bf16", device)
    pool = stack.pool()
    pool.reset(0, streams=7)
    tape = stack.tape(1, 40)
    stack.cycle(pool, [0], [tuple(t[:30] for t in tape)], op=ops.prefill)
    for t in range(30, 35):
        stack.cycle(pool, [0], [tuple(tensor[t : t + 1] for tensor in tape)])
    assert pool.cursors().history.tolist() == [5]
    pool.reset(0, streams=8)
    assert [int(field[0]) for field in pool.cursors()] == [0, 8, 0, 0, 0]
    schedule = [(PREFILL, 2, 2)] + [(STEP, 4, 3)] * 9
    expected, alone = solo(stack, 2, schedule)
    tape, first = stack.tape(2, 200), 0
    for cycle, (op, count, accepted) in enumerate(schedule):
        chunk = tuple(t[first : first + count] for t in tape)
        assert same_bits(stack.cycle(pool, [0], [chunk], [accepted], op)[0], expected[cycle])
        first += accepted
    assert same_bits(pool.materialize(1, 0)[0], alone.materialize(1, 0)[0])


def test_an_abandoned_draft_leaves_no_trace(device):
    """A plan that flagged no flush, run and then abandoned, as if it had never been."""
    stack = stack_of(SMALL, "fp32", device)
    pools = [stack.pool(), stack.pool()]
    tape, other = stack.tape(1, 40), stack.tape(2, 4)
    for index, pool in enumerate(pools):
        pool.reset(0, streams=1)
        stack.cycle(pool, [0], [tuple(t[:9] for t in tape)], op=ops.prefill)
        if index:
            plan = pool.plan(0, 4)
            for layer, mixer in enumerate(stack.mixers):
                mixer(pool, layer, plan, *other, ops.step)
            pool.abandon(plan)
    outputs = [stack.run(pool, 0, tuple(t[9:] for t in tape), chunk=3) for pool in pools]
    assert same_bits(*outputs)
