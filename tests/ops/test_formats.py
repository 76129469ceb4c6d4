# SPDX-License-Identifier: Apache-2.0
"""Every pair of checkpoint and read copy in the ops: what steps read, what the recurrence continues from, and what is
counted, refused and reported. The formats themselves: test_number_formats.py, test_stochastic_rounding.py.
"""

import math
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from mixer import (
    COPIES,
    FP32_FLOOR,
    PAIRS,
    SMALL,
    Stack,
    Weights,
    all_pairs,
    array,
    assert_accurate,
    config_of,
    flush_then_step,
    random_tokens,
    recur,
    same_bits,
    zero_state,
)

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

GEOMETRY = MambaGeometry(num_heads=2, head_dim=8, num_groups=1, state_dim=64)
# Relative L2 error of a cast of states that are sums of products of normal numbers: at most this, at least a tenth.
CAST_ERROR = {"bf16": 2.5e-3, "fp16": 3e-4, "fp16_sr": 6e-4, "fp8": 0.032, "fp8_sr": 0.055}
CAST_ERROR |= {"nvfp4_amax": 0.12, "nvfp4": 0.1, "e2m2": 0.055}


def stored_state(pool, name="checkpoint", slot=0) -> np.ndarray:
    """What a slot of layer 0 holds, in float64."""
    return pool.layout.state(pool.data[0, slot].cpu().numpy(), name).astype(np.float64)


def read_by_steps(pool, slot=0) -> np.ndarray:
    return stored_state(pool, "checkpoint" if pool.config.read_copy == "none" else "read_copy", slot)


def checkpoint_rule(checkpoint) -> str:
    """Checkpoints of NVFP4 have the scales of the copy "nvfp4_amax"."""
    return "nvfp4_amax" if checkpoint == "nvfp4" else checkpoint


def assert_cast(stored, exact, kind):
    """`stored` is the cast of a state computed in fp32 that is `exact`."""
    error = oracle.relative_error(stored, exact)
    if kind == "fp32":
        assert error < FP32_FLOOR
    else:
        assert CAST_ERROR[kind] / 10 < error < CAST_ERROR[kind], f"{kind}: relative error {error:.2e}"


class Windows:
    """A sequence in slot 0, checked window by window.

    The outputs of a step must be those of the recurrence that starts from what the slot's read copy (or checkpoint)
    holds and runs through the tokens committed since it was written; a written state must be the cast of the one that
    the recurrence reaches from the checkpoint before.
    """

    def __init__(self, pool, weights):
        self.pool, self.weights = pool, weights
        pool.data.fill_(0xFF)
        pool.reset(0, streams=5)
        self.read = self.checkpoint = zero_state(pool.geometry)
        self.since = random_tokens(pool.geometry, torch.float32, 0, pool.device)
        self.writes = 0

    def feed(self, op, tokens, accepted=None):
        plan = self.pool.plan(0, len(tokens.x))
        out = op(self.pool, 0, plan, *tokens, *self.weights)
        self.pool.commit(plan, accepted)
        written = self.pool.cursors(0).writes.item() > self.writes
        folded = op is ops.prefill
        new = type(tokens)(*(torch.cat(parts) for parts in zip(self.since, tokens, strict=True)))
        if written and not folded:
            self._write(self.since)
            self.since, new = self.since.span(0, 0), tokens
        start = self.checkpoint if folded else self.read
        assert_accurate(out, *(recur(start, new, self.weights, dtype=d)[0][len(self.since.x) :] for d in FLOATS))
        self.since = new.span(0, len(self.since.x) + (len(tokens.x) if accepted is None else accepted))
        if folded:
            self._write(self.since)
            self.since = self.since.span(0, 0)
        return out

    def _write(self, tokens):
        exact = recur(self.checkpoint, tokens, self.weights)[1][-1]
        self.writes += 1
        self.checkpoint, self.read = stored_state(self.pool), read_by_steps(self.pool)
        assert_cast(self.checkpoint, exact, checkpoint_rule(self.pool.config.checkpoint))
        if self.pool.config.read_copy != "none":
            assert_cast(self.read, exact, self.pool.config.read_copy)


FLOATS = (np.float64, np.float32)
SIXTEEN_BIT_PAIRS = [
    *(("fp16_sr", "nvfp4"), ("fp32", "fp8"), ("fp32", "e2m2"), ("fp16", "nvfp4_amax")),
    *(("fp8_sr", "none"), ("fp8_sr", "nvfp4"), ("nvfp4", "none"), ("fp16_sr", "none"), ("bf16", "none")),
]


@all_pairs
@pytest.mark.parametrize("max_step_tokens", [1, 4])
def test_steps_read_what_is_stored(device, checkpoint, read_copy, max_step_tokens):
    """A chunked prompt, then steps with random acceptance: outputs are exact in what they read, fp32 throughout."""
    pool = StatePool(GEOMETRY, config_of(checkpoint, read_copy, 8, max_step_tokens), 1, 1, device)
    windows, rng = Windows(pool, Weights.random(GEOMETRY, device, max_decay=2.0)), np.random.default_rng(0)

    def tokens(count):
        return random_tokens(GEOMETRY, torch.float32, count, device, seed=int(rng.integers(1 << 30)))

    windows.feed(ops.prefill, tokens(7))
    windows.feed(ops.prefill, tokens(3))
    for _ in range(30):
        count = int(rng.integers(1, max_step_tokens + 1))
        windows.feed(ops.step, tokens(count), int(rng.integers(0, count + 1)) if max_step_tokens > 1 else 1)
    windows.feed(ops.prefill, tokens(5))  # continues from checkpoint and records, not from the copy
    windows.feed(ops.step, tokens(1), 1)
    pool.validate()
    assert windows.writes == pool.cursors(0).writes.item() >= 6
    state, _ = pool.materialize(0, 0)
    exact = recur(windows.checkpoint, windows.since, windows.weights)[1][-1]
    assert oracle.relative_error(array(state[0]), exact) < FP32_FLOOR


@pytest.mark.parametrize("activation", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(
    "checkpoint, read_copy",
    [("fp16_sr", "nvfp4"), ("fp32", "fp8"), ("fp8_sr", "none"), ("fp32", "e2m2"), ("fp16_sr", "none")],
)
def test_16_bit_activations(device, checkpoint, read_copy, head_dim, activation):
    """The head sizes of Nemotron 3, several rows in other phases of their windows."""
    geometry = MambaGeometry(num_heads=4, head_dim=head_dim, num_groups=2, state_dim=128)
    pool = StatePool(geometry, config_of(checkpoint, read_copy, 8, 2, activation), 3, 1, device)
    pool.data.fill_(0xFF)
    pool.reset([0, 1, 2])
    weights, rng = Weights.random(geometry, device), np.random.default_rng(1)
    read = [zero_state(geometry)] * 3
    since = [random_tokens(geometry, pool.activation, 0, device)] * 3
    writes = [0] * 3
    for cycle in range(16):
        counts = rng.integers(1, 3, 3)
        tokens = random_tokens(geometry, pool.activation, int(counts.sum()), device, seed=cycle)
        plan = pool.plan([0, 1, 2], counts.tolist())
        out = ops.step(pool, 0, plan, *tokens, *weights)
        pool.commit(plan)
        for slot, end in enumerate(np.cumsum(counts)):
            mine = tokens.span(int(end - counts[slot]), int(end))
            if (now := pool.cursors(slot).writes.item()) > writes[slot]:
                read[slot], writes[slot], since[slot] = read_by_steps(pool, slot), now, mine.span(0, 0)
            new = type(mine)(*(torch.cat(parts) for parts in zip(since[slot], mine, strict=True)))
            expected = recur(read[slot], new, weights)[0][len(since[slot].x) :]
            assert_accurate(out[int(end - counts[slot]) : int(end)], expected)
            since[slot] = new
    assert min(writes) >= 2


@pytest.mark.filterwarnings("ignore:window 16 < 2")
@pytest.mark.parametrize("checkpoint, read_copy", SIXTEEN_BIT_PAIRS)
@pytest.mark.parametrize(
    "head_dim, activation, window, max_step_tokens",
    [(16, "bf16", 16, 16), (48, "fp16", 20, 9), (64, "bf16", 24, 4), (112, "fp16", 40, 8), (128, "bf16", 8, 3)],
)
def test_steps_of_any_length_and_head_size(
    device, checkpoint, read_copy, head_dim, activation, window, max_step_tokens
):
    """Random counts and acceptance, in 16 bits; flushes by steps, from their own checkpoints."""
    geometry = MambaGeometry(num_heads=3, head_dim=head_dim, num_groups=1, state_dim=128)
    pool = StatePool(geometry, config_of(checkpoint, read_copy, window, max_step_tokens, activation), 1, 1, device)
    windows, rng = Windows(pool, Weights.random(geometry, device, max_decay=2.0)), np.random.default_rng(head_dim)
    windows.feed(ops.prefill, random_tokens(geometry, pool.activation, 5, device))
    for cycle in range(3 + 5 * window // max_step_tokens):
        count = int(rng.integers(1, max_step_tokens + 1))
        tokens = random_tokens(geometry, pool.activation, count, device, seed=1 + cycle)
        windows.feed(ops.step, tokens, int(rng.integers(0, count + 1)) if cycle % 2 else count)
    pool.validate()
    assert windows.writes >= 3


@pytest.mark.parametrize("C_size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("read_copy", COPIES)
def test_queries_of_any_size(device, read_copy, C_size):
    """C far from one, with one value far above the others, and of zeros; of BF16, so that no product overflows."""
    geometry = MambaGeometry(num_heads=2, head_dim=32, num_groups=1, state_dim=128)
    pool = StatePool(geometry, config_of("fp32", read_copy, 8, 4, "bf16"), 1, 1, device)
    weights = Weights.random(geometry, device, max_decay=2.0)
    windows = Windows(pool, weights)
    windows.feed(ops.prefill, random_tokens(geometry, pool.activation, 5, device))
    tokens = random_tokens(geometry, pool.activation, 4, device, seed=1)
    C = tokens.C * C_size
    C[1, 0, 7] *= 1e3
    C[2] = 0
    windows.feed(ops.step, tokens._replace(C=C))


@pytest.mark.parametrize("read_copy", COPIES)
def test_read_error_is_the_copys_and_does_not_accumulate(device, read_copy):
    """Of 40 windows, the state that steps read is as far from the exact one as the exact one's own cast."""
    pool = StatePool(GEOMETRY, config_of("fp32", read_copy), 1, 1, device)
    scratch = StatePool(GEOMETRY, config_of("fp32", read_copy), 1, 1, device)
    tail = torch.zeros((1, 3, GEOMETRY.conv_channels), device=device)
    weights = Weights.random(GEOMETRY, device, max_decay=0.02)  # slow heads: an error in the state would stay
    tokens, exact = random_tokens(GEOMETRY, torch.float32, 320, device), zero_state(GEOMETRY)
    errors = []
    for first in range(0, 320, 8):
        plan = pool.plan(0, 8)
        ops.prefill(pool, 0, plan, *tokens.span(first, first + 8), *weights)
        pool.commit(plan)
        exact = recur(exact, tokens.span(first, first + 8), weights)[1][-1]
        scratch.restore(0, 0, torch.from_numpy(exact).float()[None].to(device), tail)
        own = oracle.relative_error(read_by_steps(scratch), exact)
        errors.append(oracle.relative_error(read_by_steps(pool), exact))
        assert errors[-1] == pytest.approx(own, rel=0.01)
    assert max(errors[-10:]) < 1.2 * max(errors[:10]) < CAST_ERROR[read_copy] * 1.2


@pytest.mark.parametrize(
    "geometry, activation, window",
    [(GEOMETRY, "fp32", 16), (MambaGeometry(num_heads=2, head_dim=64, num_groups=1, state_dim=128), "bf16", 40)],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("checkpoint", ["fp32", "fp16_sr"])
def test_ten_thousand_tokens_do_not_see_the_copy(device, checkpoint, geometry, activation, window):
    """The recurrence of (checkpoint, nvfp4) and (checkpoint, none): the same bits all along, by steps of 1 to 8."""
    configs = [config_of(checkpoint, copy, window, 8, activation) for copy in ("none", "nvfp4")]
    pools = [StatePool(geometry, config, 1, 1, device) for config in configs]
    weights, rng = Weights.random(geometry, device, max_decay=0.1), np.random.default_rng(0)
    tokens = random_tokens(geometry, pools[0].activation, 10_016, device)
    for pool in pools:
        pool.reset(0, streams=1)
    committed, plans, differ = 0, [None, None], False
    while committed < 10_000:
        count = int(rng.integers(1, 9))
        accepted = int(rng.integers(1, count + 1))
        outputs = []
        for index, pool in enumerate(pools):
            plans[index] = plan = pool.plan(0, count, out=plans[index])
            outputs.append(ops.step(pool, 0, plan, *tokens.span(committed, committed + count), *weights))
            pool.commit(plan, accepted)
        committed += accepted
        differ = differ or not same_bits(*outputs)
    assert differ  # the copy is what was read
    assert pools[0].stats()["flushes"] > 10_000 / window
    size = pools[0].layout.sections["checkpoint"].bytes
    assert same_bits(*(pool.data[0, 0, :size] for pool in pools))
    assert same_bits(*(pool.materialize(0, 0)[0] for pool in pools))


@all_pairs
@pytest.mark.parametrize("geometry, activation", [(SMALL, "fp32"), (replace(SMALL, state_dim=128), "bf16")])
def test_flush_then_step_is_step(device, checkpoint, read_copy, geometry, activation):
    """Flush and outputs as two nodes give the bits, in outputs and memory, of the one that does both."""
    config = config_of(checkpoint, read_copy, 4, 2, activation)
    weights = Weights.random(geometry, device)
    pools = [StatePool(geometry, config, 2, 1, device) for _ in range(2)]
    for pool in pools:
        pool.reset([0, 1], streams=[3, 4])
    for cycle in range(7):
        tokens = random_tokens(geometry, pools[0].activation, 3, device, seed=cycle)
        plans = [pool.plan([0, 1], [2, 1]) for pool in pools]
        whole = ops.step(pools[0], 0, plans[0], *tokens, *weights)
        split = flush_then_step(pools[1], plans[1], tokens, weights)
        for pool, plan in zip(pools, plans, strict=True):
            pool.commit(plan)
        assert same_bits(whole, split)
        assert same_bits(pools[0].data, pools[1].data)
    assert pools[0].stats()["flushes"] >= 4


@all_pairs
def test_moved_slots_continue_bit_for_bit(device, checkpoint, read_copy):
    """Copied, and saved and loaded into another pool (as pre-emption does), against one that stayed."""
    stack = Stack(GEOMETRY, config_of(checkpoint, read_copy, 6, 2), 2, device)
    pool, other = stack.pool(2), stack.pool(3)
    tape, more = stack.tape(0, 25), stack.tape(1, 20)
    pool.reset(0, streams=8)
    stack.run(pool, 0, [t[:9] for t in tape], ops.prefill, chunk=5)
    stack.run(pool, 0, [t[9:] for t in tape])
    pool.copy(0, 1)
    other.load([2], pool.save([0]))
    outputs = [stack.run(p, slot, more) for p, slot in ((pool, 0), (pool, 1), (other, 2))]
    assert same_bits(outputs[0], outputs[1]) and same_bits(outputs[0], outputs[2])
    assert same_bits(pool.data[:, 0], pool.data[:, 1]) and same_bits(pool.data[:, 0], other.data[:, 2])
    assert pool.cursors(0).writes.item() > 5


@all_pairs
def test_hand_over_takes_the_exact_state(device, checkpoint, read_copy):
    """materialize gives checkpoint and records, not the copy; restore casts it anew."""
    pool = StatePool(GEOMETRY, config_of(checkpoint, read_copy), 2, 1, device)
    pool.reset([0, 1])
    weights, tokens = Weights.random(GEOMETRY, device, max_decay=1.0), random_tokens(GEOMETRY, torch.float32, 8, device)
    for op, part in ((ops.prefill, tokens.span(0, 5)), *((ops.step, tokens.span(t, t + 1)) for t in range(5, 8))):
        plan = pool.plan(0, len(part.x))
        op(pool, 0, plan, *part, *weights)
        pool.commit(plan)
    state, tail = pool.materialize(0, 0)
    exact = recur(stored_state(pool), tokens.span(5, 8), weights)[1][-1]
    assert oracle.relative_error(array(state[0]), exact) < FP32_FLOOR
    pool.restore(0, 1, state, tail)
    assert_cast(stored_state(pool, slot=1), array(state[0]), checkpoint_rule(checkpoint))
    again, _ = pool.materialize(0, 1)
    np.testing.assert_array_equal(array(again[0]), stored_state(pool, slot=1))
    if read_copy != "none":
        assert_cast(read_by_steps(pool, 1), array(state[0]), read_copy)


# ---- counted, refused, reported --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "checkpoint, read_copy",
    [("fp16_sr", "nvfp4"), ("fp32", "fp8"), ("bf16", "e2m2"), ("fp16", "nvfp4_amax"), ("nvfp4", "none")],
)
def test_traffic_is_counted_in_the_formats_bytes(device, checkpoint, read_copy):
    """A prompt and 20 steps with windows of 8: two flushes."""
    pool = StatePool(SMALL, config_of(checkpoint, read_copy), 1, 1, device)
    pool.reset(0)
    weights, tokens = Weights.random(SMALL, device), random_tokens(SMALL, torch.float32, 24, device)
    for op, part in ((ops.prefill, tokens.span(0, 4)), *((ops.step, tokens.span(t, t + 1)) for t in range(4, 24))):
        plan = pool.plan(0, len(part.x))
        op(pool, 0, plan, *part, *weights)
        pool.commit(plan)
    values = 4 * 16 * 64  # of a state
    sizes = {"fp32": 4 * values, "fp16_sr": 2 * values, "fp16": 2 * values, "bf16": 2 * values, "none": 0}
    amax = values // 2 + values // 16 + 4 * 16
    sizes |= {"fp8": values + 4 * 16 * 4, "nvfp4_amax": amax, "nvfp4": amax + 4 * 64, "e2m2": amax + values // 8}
    stats = pool.stats()
    assert (stats["flushes"], stats["step_reads"], stats["state_reads"], stats["state_writes"]) == (2, 18, 20, 3)
    whole = sizes[checkpoint_rule(checkpoint)]
    by_steps = whole if read_copy == "none" else sizes[read_copy]
    assert stats["state_bytes_read"] == 18 * by_steps + 2 * whole
    assert stats["state_bytes_written"] == 3 * (whole + sizes[read_copy])


def test_states_rounded_once_a_window_have_smaller_errors(device):
    """Outputs after 1024 tokens, from an FP16 state that is rounded at each of them, or once a window of 16: sixteen
    times as many independent errors are four times as large."""
    tokens, delta, memory = 1024, 0.01, torch.tensor([64.0, 512.0])
    inputs = random_tokens(GEOMETRY, torch.float32, tokens, device)._replace(dt=torch.zeros(tokens, 2, device=device))
    values = -torch.log(memory * delta), torch.zeros(2), torch.full((2,), math.log(math.expm1(delta)))
    weights = Weights(*(value.to(device) for value in values))

    def outputs(op, checkpoint):
        pool, made = StatePool(GEOMETRY, config_of(checkpoint, "none", 16), 1, 1, device), []
        pool.reset(0)
        for t in range(tokens):
            plan = pool.plan(0)
            made.append(op(pool, 0, plan, *inputs.span(t, t + 1), *weights))
            pool.commit(plan)
        return torch.cat(made[-256:])

    exact = outputs(ops.conventional_step, "fp32")
    errors = [(outputs(op, "fp16") - exact).norm(dim=(0, 2)) for op in (ops.conventional_step, ops.step)]
    assert torch.all(errors[0] > 3 * errors[1])


@pytest.mark.parametrize("op", [ops.conventional_step, ops.conventional_verify])
@pytest.mark.parametrize("checkpoint, read_copy", [pair for pair in PAIRS if pair[1] != "none" or pair[0][-2:] == "sr"])
def test_conventional_ops_take_plain_formats_only(device, checkpoint, read_copy, op):
    pool = StatePool(SMALL, config_of(checkpoint, read_copy), 1, 1, device)
    pool.reset(0)
    before = pool.data.clone()
    message = f"{op.__name__}: expected .* got checkpoint='{checkpoint}', read_copy='{read_copy}'"
    more = {"snapshots": torch.zeros(pool.snapshots_shape, device=device)} if "verify" in op.__name__ else {}
    if more:
        with pytest.raises(NotImplementedError, match=message):
            pool.allocate_snapshots()
    with pytest.raises(NotImplementedError, match=message):
        op(
            pool,
            0,
            pool.plan(0),
            *random_tokens(SMALL, torch.float32, 1, device),
            *Weights.random(SMALL, device),
            **more,
        )
    assert same_bits(pool.data, before)


def poisoned(tokens, row, bad):
    x = tokens.x.clone()
    x[row, 1, 3] = bad
    return tokens._replace(x=x)


REPORT = "row {}: the state of head 1 in layer 0 was stored with a NaN or an infinity, expected finite values"


@all_pairs
@pytest.mark.parametrize(
    "geometry, activation, window",
    [
        (GEOMETRY, "fp32", 2),
        (MambaGeometry(num_heads=2, head_dim=64, num_groups=1, state_dim=128), "bf16", 2),
        (MambaGeometry(num_heads=6, head_dim=80, num_groups=1, state_dim=128), "fp16", 4),
    ],
)
def test_states_that_are_not_finite_are_reported(device, checkpoint, read_copy, geometry, activation, window):
    """By the flush of a step: the step runs on, other rows and heads are untouched, validate tells once."""
    weights, pools, outputs = Weights.random(geometry, device), [], []
    for bad in (0.0, float("nan")):
        pool = StatePool(geometry, config_of(checkpoint, read_copy, window, activation=activation), 2, 1, device)
        pool.reset([0, 1], streams=[1, 2])
        for step in range(window + 2):
            tokens = random_tokens(geometry, pool.activation, 2, device, seed=step)
            plan = pool.plan([0, 1])
            outputs.append(ops.step(pool, 0, plan, *(poisoned(tokens, 1, bad) if step == 0 else tokens), *weights))
            pool.commit(plan)
            if step < window:  # the record is not finite, but no state was stored
                pool.validate()
        pools.append(pool)
    fine, bad = torch.stack(outputs).unflatten(0, (2, window + 2))
    pools[0].validate()
    with pytest.raises(ValueError, match=REPORT.format(1)):
        pools[1].validate()
    pools[1].validate()
    assert same_bits(bad[:, 0], fine[:, 0]) and same_bits(pools[1].data[0, 0], pools[0].data[0, 0])
    assert same_bits(bad[:, 1, 0], fine[:, 1, 0])
    assert torch.isnan(bad[-1, 1, 1, 3])


@all_pairs
def test_prefill_reports_states_that_are_not_finite(device, checkpoint, read_copy):
    """The commit that raises is done, and a reset heals the slot."""
    weights, tokens = Weights.random(GEOMETRY, device), random_tokens(GEOMETRY, torch.float32, 5, device)
    pool = StatePool(GEOMETRY, config_of(checkpoint, read_copy), 2, 1, device)
    pool.reset([0, 1])
    plan = pool.plan([1, 0], [2, 3])
    ops.prefill(pool, 0, plan, *poisoned(tokens, 3, float("inf")), *weights)
    with pytest.raises(ValueError, match=REPORT.format(1)):
        pool.commit(plan, check=True)
    assert pool.cursors().tokens.tolist() == [3, 2]
    pool.reset(0)
    plan = pool.plan(0, 5)
    ops.prefill(pool, 0, plan, *tokens, *weights)
    pool.commit(plan, check=True)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    "geometry, activation",
    [
        (GEOMETRY, "fp32"),
        (MambaGeometry(num_heads=2, head_dim=64, num_groups=1, state_dim=128), "bf16"),
        (MambaGeometry(num_heads=160, head_dim=64, num_groups=1, state_dim=128), "bf16"),
        (MambaGeometry(num_heads=2, head_dim=80, num_groups=1, state_dim=128), "fp16"),
    ],
)
def test_conventional_states_that_are_not_finite_are_reported(device, verify, geometry, activation):
    pool = StatePool(geometry, ReplayConfig(8, 4, activation=activation), 2, 1, device)
    pool.reset([0, 1])
    tokens, weights = random_tokens(geometry, pool.activation, 4, device), Weights.random(geometry, device)
    plan = pool.plan([0, 1], 2)
    more = {"snapshots": pool.allocate_snapshots()[0]} if verify else {}
    op = ops.conventional_verify if verify else ops.conventional_step
    op(pool, 0, plan, *poisoned(tokens, 3, float("inf")), *weights, **more)
    pool.commit(plan)
    with pytest.raises(ValueError, match=REPORT.format(1)):
        pool.validate()


def test_an_error_that_refuses_a_row_is_raised_beside_a_report():
    """On the CPU errors raise at once; the report of a bad state, which waits for validate, does not hide them."""
    pool = StatePool(GEOMETRY, ReplayConfig(8, 4, activation="fp32"), 2, 1)
    pool.reset([0, 1])
    tokens, weights = random_tokens(GEOMETRY, torch.float32, 1, "cpu"), Weights.random(GEOMETRY)
    plan = pool.plan(0)
    ops.prefill(pool, 0, plan, *poisoned(tokens, 0, float("nan")), *weights)
    with pytest.raises(ValueError, match="slot 0 has an outstanding plan"):
        pool.plan(0)
    pool.commit(plan)
