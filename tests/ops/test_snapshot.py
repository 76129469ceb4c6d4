# SPDX-License-Identifier: Apache-2.0
"""Sequences that move: materialize and restore, copy, save and load, in this process and another."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from mixer import NANO_TP8, SMALL, SUPER_TP8, Stack, array, recur, same_bits, zero_state

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

CONFIG = ReplayConfig(window=8, max_step_tokens=4, activation="fp32")
CASES = [(SMALL, "fp32"), (SUPER_TP8, "bf16"), (NANO_TP8, "fp16")]


def stack_of(device, geometry=SMALL, activation="fp32", **config):
    return Stack(geometry, replace(CONFIG, activation=activation, **config), device=device)


def decode(stack, pool, slot, tape, cycles, first):
    """Steps of 4 tokens of which 3 are accepted. Returns outputs and the next position."""
    outputs = []
    for _ in range(cycles):
        chunk = tuple(t[first : first + 4] for t in tape)
        outputs.append(stack.cycle(pool, [slot], [chunk], [3])[0])
        first += 3
    return torch.cat(outputs, dim=1), first


def warm(stack, pool, slot, tape, cycles):
    """A prompt of 10 and some cycles, so that the slot stands in mid-window."""
    stack.cycle(pool, [slot], [tuple(t[:10] for t in tape)], op=ops.prefill)
    return decode(stack, pool, slot, tape, cycles, 10)[1] if cycles else 10


def move_by_save(source, slot, target, target_slot):
    target.load([target_slot], source.save([slot]))


def move_by_copy(source, slot, target, target_slot):
    spare = source.num_slots - 1
    source.copy([slot], [spare])
    target.load([target_slot], source.save(torch.tensor([spare])))


@pytest.mark.parametrize("move", [move_by_save, move_by_copy])
@pytest.mark.parametrize("cycles", [0, 1, 2, 3])
@pytest.mark.parametrize("geometry, activation", CASES)
def test_moved_sequence_continues_bit_for_bit(device, geometry, activation, cycles, move):
    """At any place of the window, into another slot of another pool; flushes fall where they would have."""
    stack = stack_of(device, geometry, activation)
    tape = stack.tape(1, 120)
    pool, other = stack.pool(5), stack.pool(3)
    pool.reset([0, 1, 2, 3], streams=[5, 6, 7, 8])
    first = warm(stack, pool, 2, tape, cycles)
    move(pool, 2, other, 1)
    assert all(torch.equal(a, b) for a, b in zip(pool.cursors(2), other.cursors(1), strict=True))
    expected, _ = decode(stack, pool, 2, tape, 12, first)
    moved, _ = decode(stack, other, 1, tape, 12, first)
    assert same_bits(moved, expected)
    assert all(torch.equal(a, b) for a, b in zip(pool.cursors(2), other.cursors(1), strict=True))
    assert same_bits(pool.materialize(1, 2)[0], other.materialize(1, 1)[0])


def test_saved_slots_are_copies(device):
    """A24: 50 steps in the same slot leave a saved prefix unchanged; loaded back, it continues from where it stood."""
    stack = stack_of(device)
    tape = stack.tape(1, 300)
    pool = stack.pool(2)
    pool.reset([0, 1])
    first = warm(stack, pool, 1, tape, 2)
    blob, state = pool.save([1]), pool.materialize(0, 1)
    kept_blob, kept_state = blob.clone(), [t.clone() for t in state]
    expected, _ = decode(stack, pool, 1, tape, 17, first)
    assert torch.equal(blob, kept_blob) and all(same_bits(a, b) for a, b in zip(state, kept_state, strict=True))
    pool.load([1], blob)
    assert all(same_bits(a, b) for a, b in zip(pool.materialize(0, 1), kept_state, strict=True))
    assert same_bits(decode(stack, pool, 1, tape, 17, first)[0], expected)


def test_many_slots_at_once_in_any_order(device):
    stack = stack_of(device)
    pool = stack.pool(6)
    slots = [4, 0, 3]
    pool.reset(slots, streams=[40, 0, 30])
    firsts = [warm(stack, pool, slot, stack.tape(slot, 90), cycles) for cycles, slot in enumerate(slots)]
    blob = pool.save(slots)
    pool.reset(list(range(6)))
    pool.data.fill_(0xFF)
    pool.load([1, 2, 5], blob)
    assert pool.cursors([1, 2, 5]).stream.tolist() == [40, 0, 30]
    reference = stack.pool(3)
    reference.load([2, 1, 0], blob)
    for slot, mirror, seed, first in zip([1, 2, 5], [2, 1, 0], slots, firsts, strict=True):
        tape = stack.tape(seed, 90)
        outputs = decode(stack, pool, slot, tape, 9, first)[0]
        assert same_bits(outputs, decode(stack, reference, mirror, tape, 9, first)[0])
    assert pool.data[:, 3].eq(0xFF).all()


CHILD = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from mixer import SMALL, Stack
from trtllm_replayssm import ReplayConfig
stack = Stack(SMALL, ReplayConfig(window=8, max_step_tokens=4, activation="fp32"), device=sys.argv[2])
saved = torch.load(sys.argv[3])
pool = stack.pool(7)
pool.load([5], saved["blob"])
tape, first, outputs = stack.tape(1, 200), saved["first"], []
for _ in range(40):
    outputs.append(stack.cycle(pool, [5], [tuple(t[first : first + 4] for t in tape)], [3])[0].cpu())
    first += 3
torch.save(torch.cat(outputs, dim=1), sys.argv[4])
"""


def test_hand_over_to_another_process(device, tmp_path, pytestconfig):
    """A26: prefill here, 40 steps with T = 4 there, in another slot; the same bits as without the move."""
    stack = stack_of(device)
    tape = stack.tape(1, 200)
    pool = stack.pool()
    pool.reset(0, streams=77)
    first = warm(stack, pool, 0, tape, 1)
    torch.save({"blob": pool.save(0), "first": first}, tmp_path / "saved.pt")
    tests = str(pytestconfig.rootpath / "tests")
    files = [str(tmp_path / "saved.pt"), str(tmp_path / "outputs.pt")]
    subprocess.run([sys.executable, "-c", CHILD, tests, str(device), *files], check=True, timeout=240, cwd=tmp_path)
    expected = decode(stack, pool, 0, tape, 40, first)[0]
    assert same_bits(torch.load(tmp_path / "outputs.pt"), expected)


@pytest.mark.parametrize("geometry, activation", CASES)
@pytest.mark.parametrize("cycles", [0, 1, 2])
def test_materialized_state_is_the_oracles(device, geometry, activation, cycles):
    """State and convolution inputs at any place of the window; asking disturbs nothing."""
    stack = stack_of(device, geometry, activation)
    tape = stack.tape(3, 60)
    pool = stack.pool(3)
    pool.reset([0, 1, 2])
    mixer = stack.mixers[1]
    first = warm(stack, pool, 2, tape, cycles)
    data, cursors = pool.data.clone(), pool.cursors()
    state, tail = pool.materialize(1, [2, -1, 0])
    again = pool.materialize(1, 2, A_log=mixer.weights.A_log)
    assert same_bits(pool.data, data) and all(map(torch.equal, pool.cursors(), cursors))
    assert same_bits(state[:1], again[0]) and same_bits(tail[:1], again[1])
    assert not state[1:].any() and not tail[1:].any()
    assert torch.equal(tail[0], tape[0][first - 3 : first].float())

    # The scan's own inputs: the convolution of a one-shot prefill has the bits of the steps' convolutions.
    probe = stack.pool()
    probe.reset(0)
    plan = probe.plan(0, first)
    raw, dt = (t[:first] for t in tape)
    x, B, C = mixer.split(ops.conv_step(probe, 1, plan, raw, mixer.conv_weight, mixer.conv_bias))
    states = recur(zero_state(geometry), (x, B, C, dt), mixer.weights)[1]
    assert oracle.relative_error(array(state[0]), states[-1]) < 2e-6


def test_restored_sequence_continues(device):
    """State and tail of 19 tokens, restored into a dirty slot of another pool: equal to the oracle's tolerance."""
    stack = stack_of(device)
    tape = stack.tape(1, 120)
    pool, other = stack.pool(), stack.pool(4)
    pool.reset(0)
    other.reset(3, streams=9)
    first = warm(stack, pool, 0, tape, 3)
    snapshots = [pool.materialize(layer, 0) for layer in range(2)]
    for layer, (state, tail) in enumerate(snapshots):
        other.restore(layer, [3], state, tail)
        for a, b in zip(other.materialize(layer, 3) if layer else (state, tail), (state, tail), strict=True):
            assert same_bits(a, b)
    assert [int(f[0]) for f in other.cursors(3)] == [3, 9, 1, 0, 0]
    expected, _ = decode(stack, pool, 0, tape, 20, first)
    restored, _ = decode(stack, other, 3, tape, 20, first)
    assert oracle.relative_error(array(restored), array(expected)) < 5e-6


def test_half_restored_slot_is_refused(device):
    stack = stack_of(device)
    pool = stack.pool(2)
    pool.reset([0, 1])
    warm(stack, pool, 0, stack.tape(1, 40), 1)
    state, tail = pool.materialize(0, 0)
    pool.restore(1, 1, state, tail)
    assert int(pool.cursors(1).flags) == 4
    for use in (lambda: pool.plan(1), lambda: pool.copy(1, 0), lambda: pool.materialize(1, 1)):
        with pytest.raises(ValueError, match=r"row 0: slot 1 \(flags 4\) is abandoned or half restored"):
            use()
            pool.validate()
    with pytest.raises(ValueError, match="got slot 1 that is half restored"):
        pool.save(1)
    pool.restore(1, 1, state, tail)
    assert int(pool.cursors(1).flags) == 4
    pool.restore(0, 1, state, tail)
    assert int(pool.cursors(1).flags) == 0
    pool.restore(0, 1, state, tail)  # a second round starts anew
    assert int(pool.cursors(1).flags) == 4
    pool.reset(1)
    assert int(pool.cursors(1).flags) == 0


def test_restart_from_every_cached_boundary(device):
    """A22: a prompt of 160 in chunks of 36, 52, 51, 21; each boundary's state is that of its token count."""
    stack = stack_of(device)
    tape = stack.tape(8, 170)
    pool = stack.pool()
    pool.reset(0)
    stored, end = {0: None}, 0
    for chunk in (36, 52, 51, 21):
        stack.cycle(pool, [0], [tuple(t[end : end + chunk] for t in tape)], op=ops.prefill)
        end += chunk
        stored[end] = [pool.materialize(layer, 0) for layer in range(2)]
    expected = stack.cycle(pool, [0], [tuple(t[160:164] for t in tape)])[0]
    for boundary, snapshot in stored.items():
        fresh = stack.pool()
        fresh.reset(0)
        for layer, parts in enumerate(snapshot or []):
            fresh.restore(layer, 0, *parts)
        if boundary < 160:
            stack.cycle(fresh, [0], [tuple(t[boundary:160] for t in tape)], op=ops.prefill)
        assert same_bits(stack.cycle(fresh, [0], [tuple(t[160:164] for t in tape)])[0], expected), boundary


def test_materialize_without_decay_names_it(device):
    stack = stack_of(device)
    pool, other = stack.pool(), stack.pool()
    pool.reset(0)
    warm(stack, pool, 0, stack.tape(1, 40), 1)
    other.load(0, pool.save(0))
    with pytest.raises(ValueError, match="row 0: slot holds 3 records, expected A_log"):
        other.materialize(0, 0)
        other.validate()
    assert same_bits(other.materialize(0, 0, stack.mixers[0].weights.A_log)[0], pool.materialize(0, 0)[0])


@pytest.mark.parametrize(
    "src, dst, match",
    [
        ([0, 1], [2, 2], r"dst_slots\[1\]: expected distinct slots, got 2 again"),
        ([0, 1], [2, 0], "row 1: slot 0"),
        ([0, 1], [2], "dst_slots: expected 2 rows, got 1"),
        ([9], [2], r"src_slots\[0\]: expected 0..3, got 9"),
        ([-1], [2], r"src_slots\[0\]: expected 0..3, got -1"),
    ],
)
def test_copies_that_are_refused(device, src, dst, match):
    stack = stack_of(device)
    pool = stack.pool(4)
    pool.reset([0, 1, 2, 3])
    with pytest.raises(ValueError, match=match):
        pool.copy(src, dst)
        pool.validate()
    if device.type == "cpu":
        assert pool.data.eq(0xFF).all()


def test_open_slots_stay_where_they_are(device):
    stack = stack_of(device)
    pool = stack.pool(3)
    pool.reset([0, 1, 2])
    blob = pool.save(1)
    state, tail = pool.materialize(0, 1)
    plan = pool.plan(0)
    with pytest.raises(ValueError, match="got slot 0 with an outstanding plan"):
        pool.save([1, 0])
    with pytest.raises(ValueError, match="expected closed slots, got slot 0 with an outstanding plan"):
        pool.load(0, blob)
    for use in (
        lambda: pool.copy(0, 1),
        lambda: pool.copy(1, 0),
        lambda: pool.materialize(0, 0),
        lambda: pool.restore(0, 0, state, tail),
    ):
        with pytest.raises(ValueError, match="row 0: slot 0 has an outstanding plan"):
            use()
            pool.validate()
    assert pool.data.eq(0xFF).all()
    pool.abandon(plan)
    pool.load(0, blob)


def change(blob, position, value):
    blob = blob.clone()
    blob[position] = value
    return blob


@pytest.mark.parametrize(
    "pool_change, match",
    [
        (dict(geometry=MambaGeometry(4, 16, 1, 64)), "num_groups = 1, got 2|slot_stride"),
        (dict(geometry=MambaGeometry(4, 16, 2, 64, conv_kernel=3)), "blob: expected (slot_stride|conv_kernel)"),
        (dict(config=replace(CONFIG, window=9)), "blob: expected (slot_stride|window)"),
        (dict(config=replace(CONFIG, activation="bf16")), "blob: expected (slot_stride|activation)"),
        (dict(config=replace(CONFIG, checkpoint="fp16")), "blob: expected (slot_stride|checkpoint)"),
        (dict(config=replace(CONFIG, seed=1)), "blob: expected seed = 1, got 0"),
        (dict(num_layers=3), "blob: expected num_layers = 3, got 2"),
    ],
)
def test_load_into_another_kind_of_pool(device, pool_change, match):
    stack = stack_of(device)
    source = stack.pool()
    source.reset(0)
    warm(stack, source, 0, stack.tape(1, 40), 1)
    kind = dict(geometry=SMALL, config=CONFIG, num_layers=2) | pool_change
    pool = StatePool(num_slots=1, device=device, **kind)
    with pytest.raises(ValueError, match=match):
        pool.load(0, source.save(0))
    assert not pool.data.any() and not pool.table.any()


def test_damaged_blobs(device):
    stack = stack_of(device)
    pool = stack.pool(2)
    pool.reset([0, 1])
    warm(stack, pool, 0, stack.tape(1, 40), 1)
    blob = pool.save(0)
    cursor_offset = next(o for o in range(0, len(blob), 256) if blob[o] == 13 and not blob[o + 1 : o + 8].any())
    data, cursors = pool.data.clone(), pool.cursors()
    for damaged, error, match in [
        (blob[:-1], ValueError, rf"blob: expected {len(blob)} bytes, got {len(blob) - 1}"),
        (torch.cat([blob, blob[:1]]), ValueError, rf"blob: expected {len(blob)} bytes, got {len(blob) + 1}"),
        (blob[:8], ValueError, "blob: expected at least 16 bytes, got 8"),
        (blob[:100], ValueError, "blob: expected a header of"),
        (change(blob, 0, 0), ValueError, "expected saved slots .magic"),
        (change(blob, 8, 9), ValueError, "expected format version 1, got 9"),
        (change(blob, cursor_offset + 24, 99), ValueError, "saved slot 0 has impossible cursors"),
        (change(blob, cursor_offset + 28, 1), ValueError, "saved slot 0 has impossible cursors"),
        (blob.float(), TypeError, "blob: expected a torch.uint8 tensor, got torch.float32"),
        (bytes(blob.tolist()), TypeError, "blob: expected a torch.uint8 tensor, got bytes"),
        (blob[None], ValueError, r"blob: expected a 1-D CPU tensor, got shape \(1, "),
    ]:
        with pytest.raises(error, match=match):
            pool.load(1, damaged)
    with pytest.raises(ValueError, match="blob: expected slots = 2, got 1"):
        pool.load([0, 1], blob)
    assert same_bits(pool.data, data) and all(map(torch.equal, pool.cursors(), cursors))
    odd = torch.cat([blob[:3], blob])[3:]  # a view that starts at an odd address
    pool.load(1, odd)
    assert np.array_equal(pool.data[:, 0].cpu(), pool.data[:, 1].cpu())


def test_misshapen_states(device):
    stack = stack_of(device)
    pool = stack.pool(2)
    pool.reset([0, 1])
    state, tail = pool.materialize(0, [0, 1])
    for arguments, error, match in [
        ((0, [0], state, tail), ValueError, r"state: expected shape \(1, 4, 16, 64\), got \(2, 4, 16, 64\)"),
        ((0, [0, 1], state, tail[:, 1:]), ValueError, "conv_tail: expected shape"),
        ((0, [0, 1], state.double(), tail), TypeError, "state: expected torch.float32, got torch.float64"),
        ((0, [0, 1], state.mT.contiguous().mT, tail), ValueError, "state: expected a contiguous tensor"),
        ((2, [0, 1], state, tail), ValueError, "layer: expected 0..1 of 2 layers, got 2"),
        ((0, [0, 0], state, tail), ValueError, r"slots\[1\]: expected distinct slots, got 0 again"),
    ]:
        with pytest.raises(error, match=match):
            pool.restore(*arguments)
    assert not pool.cursors().flags.any() and pool.data.eq(0xFF).all()
