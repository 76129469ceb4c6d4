# SPDX-License-Identifier: Apache-2.0
"""ops.step against the float64 oracle."""

import warnings

import numpy as np
import oracle
import pytest
import torch
from mixer import (
    FP32_FACTOR,
    FP32_FLOOR,
    NANO_TP8,
    SMALL,
    SUPER,
    SUPER_TP8,
    Tokens,
    Weights,
    array,
    assert_accurate,
    flush_then_step,
    random_tokens,
    recur,
    same_bits,
    zero_state,
)

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 16, 24, 32])
def test_two_thousand_steps_in_all_phases(device, window):
    """Every step of a 2,000-step run, rows in different phases of their windows, |A| up to 32, fp32."""
    steps, rows = 2000, 4
    geometry = MambaGeometry(num_heads=4, head_dim=8, num_groups=2, state_dim=64)
    with warnings.catch_warnings(record=True) as caught:
        config = ReplayConfig(window=window, activation="fp32")
    assert len(caught) == (window < 2)
    pool = StatePool(geometry, config, rows, 1, device)
    pool.data.fill_(0xFF)
    weights = Weights.random(geometry, device, seed=window, max_decay=32.0)
    tokens = random_tokens(geometry, torch.float32, steps * rows, device, seed=window)
    joins = [0, 1, window // 2 + 1, 2 * window]  # the step at which each row's sequence starts
    slots = torch.arange(rows, dtype=torch.int32)
    pool.reset(list(range(rows)))
    outputs, plan = [], None
    for step in range(steps):
        live = torch.where(torch.tensor(joins) <= step, slots, -1).int().to(device)
        plan = pool.plan(live, out=plan)
        outputs.append(ops.step(pool, 0, plan, *tokens.span(step * rows, (step + 1) * rows), *weights))
        pool.commit(plan)
    pool.validate()
    outputs = array(torch.stack(outputs))

    exact = conventional = np.stack([zero_state(geometry)] * rows)
    worst_conventional = 0.0
    for step in range(steps):
        batch = Tokens(*(t[:, None] for t in tokens.span(step * rows, (step + 1) * rows)))
        live = np.array(joins) <= step
        y, states = recur(exact, batch, weights)
        y32, states32 = recur(conventional, batch, weights, dtype=np.float32)
        exact = np.where(live[:, None, None, None], states[-1], 0)
        conventional = np.where(live[:, None, None, None], states32[-1], np.float32(0))
        expected = y[live, 0]
        worst_conventional = max(worst_conventional, oracle.relative_error(y32[live, 0], expected))
        error = oracle.relative_error(outputs[step, live], expected)
        assert error <= max(FP32_FLOOR, FP32_FACTOR * worst_conventional), f"step {step}: {error:.2e}"
        assert not outputs[step, ~live].any()
    assert pool.stats()["tokens"] == steps * rows - sum(joins)
    assert pool.stats()["flushes"] == sum((steps - join - 1) // window for join in joins)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("activation", ["bf16", "fp16"])
def test_two_thousand_steps_of_the_tuned_kernels(device, head_dim, activation):
    """16-bit activations and the head sizes that have kernels of their own, every step judged by itself (A04, A17)."""
    steps, rows = 2000, 2
    geometry = MambaGeometry(num_heads=2, head_dim=head_dim, num_groups=1, state_dim=128)
    pool = StatePool(geometry, ReplayConfig(window=16, activation=activation), rows, 1, device)
    pool.data.fill_(0xFF)
    weights = Weights.random(geometry, device, max_decay=32.0)
    tokens = random_tokens(geometry, pool.activation, steps * rows, device)
    outputs, plan = [], None
    for step in range(steps):
        slots = torch.tensor([0, 1 if step >= 7 else -1], dtype=torch.int32, device=device)
        plan = pool.plan(slots, out=plan)
        outputs.append(ops.step(pool, 0, plan, *tokens.span(step * rows, (step + 1) * rows), *weights))
        pool.commit(plan)
    pool.validate()
    exact = np.stack([zero_state(geometry)] * rows)
    for step in range(steps):
        live = slice(0, 2 if step >= 7 else 1)
        batch = Tokens(*(t[live, None] for t in tokens.span(step * rows, (step + 1) * rows)))
        y, states = recur(exact[live], batch, weights)
        exact[live] = states[-1]
        assert_accurate(outputs[step][live], y[:, 0])
    assert pool.stats()["flushes"] == (steps - 1) // 16 + (steps - 8) // 16


@pytest.mark.parametrize(
    "geometry, activation, checkpoint",
    [
        (SUPER_TP8, "bf16", "fp32"),
        (SUPER_TP8, "fp16", "fp16"),
        (NANO_TP8, "bf16", "fp16"),
        (NANO_TP8, "bf16", "fp32"),  # A04: head_dim 80, rows 64..79 included
        (NANO_TP8, "fp16", "fp32"),
        (SUPER, "bf16", "fp32"),
        (SMALL, "fp32", "fp32"),
        (SMALL, "bf16", "fp32"),
        (MambaGeometry(2, 8, 1, 128), "fp32", "fp32"),
        (MambaGeometry(3, 24, 3, 64), "bf16", "fp32"),
        (MambaGeometry(2, 40, 2, 128), "fp16", "fp32"),
        (MambaGeometry(2, 56, 1, 64), "fp32", "fp32"),
        (MambaGeometry(6, 80, 2, 64), "fp32", "fp32"),
        (MambaGeometry(2, 104, 1, 128), "bf16", "fp32"),
        (MambaGeometry(4, 128, 2, 128), "fp32", "fp32"),
    ],
)
def test_speculative_steps_with_random_acceptance(device, geometry, activation, checkpoint):
    """Rows bring 0..4 tokens each (A09: drafts of 3, 0, 1, 3 in one batch) and accept any prefix; window 16."""
    rng = np.random.default_rng(7)
    cycles = 12 if geometry == SUPER else 60
    config = ReplayConfig(window=16, max_step_tokens=4, activation=activation, checkpoint=checkpoint)
    run_speculative(device, geometry, config, cycles, lambda: rng.choice([0, 1, 2, 4], 4, p=[0.1, 0.2, 0.2, 0.5]), rng)


@pytest.mark.parametrize("window, max_step_tokens", [(32, 16), (16, 8), (24, 5), (5, 2), (3, 1)])
def test_any_step_length(device, window, max_step_tokens):
    rng = np.random.default_rng(window)
    config = ReplayConfig(window=window, max_step_tokens=max_step_tokens, activation="fp32")
    geometry = MambaGeometry(num_heads=4, head_dim=8, num_groups=2, state_dim=64)
    run_speculative(device, geometry, config, 200, lambda: rng.integers(1, max_step_tokens + 1, 4), rng)


def test_longest_steps_in_the_shortest_window(device):
    with pytest.warns(UserWarning, match="window 16 < 2"):
        config = ReplayConfig(window=16, max_step_tokens=16, activation="fp32")
    rng = np.random.default_rng(3)
    geometry = MambaGeometry(num_heads=4, head_dim=8, num_groups=2, state_dim=64)
    run_speculative(device, geometry, config, 60, lambda: np.array([16, 16, 15, 1]), rng)


def run_speculative(device, geometry, config, cycles, draw_counts, rng):
    """Four sequences against the oracle: outputs of every token of every step, and the cursors' arithmetic."""
    rows = 4
    pool = StatePool(geometry, config, rows, 1, device)
    pool.data.fill_(0xFF)
    weights = Weights.random(geometry, device, max_decay=32.0 if config.activation == "fp32" else 8.0)
    pool.reset(list(range(rows)))
    states = [zero_state(geometry)] * rows
    single = [zero_state(geometry)] * rows
    committed = np.zeros(rows, np.int64)
    order = rng.permutation(rows)
    given, expected, conventional = [], [], []
    for cycle in range(cycles):
        counts = draw_counts()
        accepted = rng.integers(0, counts + 1)
        tokens = random_tokens(geometry, pool.activation, int(counts.sum()), device, seed=cycle)
        plan = pool.plan(order.tolist(), counts.tolist())
        out = ops.step(pool, 0, plan, *tokens, *weights)
        pool.commit(plan, accepted.tolist())
        ends = np.cumsum(counts)
        for row, (slot, end, count) in enumerate(zip(order, ends, counts, strict=True)):
            if count == 0:
                continue
            mine = tokens.span(int(end - count), int(end))
            y, after = recur(states[slot], mine, weights)
            y32, after32 = recur(single[slot], mine, weights, dtype=np.float32)
            states[slot], single[slot] = after[accepted[row]], after32[accepted[row]]
            given.append(out[int(end - count) : int(end)])
            expected.append(y)
            conventional.append(y32)
        committed[order] += accepted
    pool.validate()
    assert pool.cursors(list(range(rows))).tokens.tolist() == committed.tolist()
    assert pool.stats()["flushes"] > 0
    for part in (slice(0, len(given) // 4), slice(-len(given) // 4, None), slice(None)):
        assert_accurate(torch.cat(given[part]), np.concatenate(expected[part]), np.concatenate(conventional[part]))
    state = pool.materialize(0, list(range(rows)))[0]
    bound = max(FP32_FLOOR, FP32_FACTOR * oracle.relative_error(np.stack(single), np.stack(states)))
    assert oracle.relative_error(array(state), np.stack(states)) <= (1e-3 if config.checkpoint == "fp16" else bound)


def test_rejecting_every_draft_is_standard_decoding(device):
    """A17: of 4 tokens a step only the first is ever accepted. The error does not grow over 1,000 tokens."""
    geometry = MambaGeometry(num_heads=4, head_dim=8, num_groups=2, state_dim=64)
    config = ReplayConfig(window=16, max_step_tokens=4, activation="fp32")
    pool = StatePool(geometry, config, 1, 1, device)
    pool.reset(0)
    weights, steps = Weights.random(geometry, device), 1000
    tokens = random_tokens(geometry, torch.float32, steps, device, seed=1)
    drafts = random_tokens(geometry, torch.float32, 3 * steps, device, seed=2)
    outputs, plan = [], None
    for t in range(steps):
        parts = zip(tokens.span(t, t + 1), drafts.span(3 * t, 3 * t + 3), strict=True)
        plan = pool.plan(0, 4, out=plan)
        outputs.append(ops.step(pool, 0, plan, *(torch.cat(part) for part in parts), *weights)[:1])
        pool.commit(plan, 1)
    assert pool.stats()["flushes"] == (steps - 14) // 13 + 1  # 13 committed records and 4 new ones exceed 16
    outputs = torch.cat(outputs)
    expected = recur(zero_state(geometry), tokens, weights)[0]
    conventional = recur(zero_state(geometry), tokens, weights, dtype=np.float32)[0]
    for first in range(0, steps, 250):
        part = slice(first, first + 250)
        assert_accurate(outputs[part], expected[part], conventional[part])


def test_fp16_checkpoint_keeps_its_accuracy(device):
    """A long run on a fp16 checkpoint: the output error stays at the format's rounding."""
    geometry = MambaGeometry(num_heads=4, head_dim=16, num_groups=1, state_dim=64)
    pool = StatePool(geometry, ReplayConfig(window=16, checkpoint="fp16", activation="fp32"), 1, 1, device)
    pool.reset(0)
    weights = Weights.random(geometry, device)
    tokens = random_tokens(geometry, torch.float32, 500, device)
    outputs, plan = [], None
    for t in range(500):
        plan = pool.plan(0, out=plan)
        outputs.append(ops.step(pool, 0, plan, *tokens.span(t, t + 1), *weights))
        pool.commit(plan)
    expected = recur(zero_state(geometry), tokens, weights)[0]
    outputs = array(torch.cat(outputs))
    for block in range(0, 500, 100):
        assert oracle.relative_error(outputs[block : block + 100], expected[block : block + 100]) < 1e-3


@pytest.mark.parametrize(
    "checkpoint, activation", [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "bf16"), ("bf16", "fp16")]
)
@pytest.mark.parametrize("head_dim, heads", [(64, 2), (80, 1), (16, 5)])
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.filterwarnings('ignore:checkpoint "bf16"')
def test_steps_read_every_value_of_16_bits(device, checkpoint, activation, head_dim, heads, tokens):
    """With steps of size 0 an output is S C, and C picks a column: the stored value, rounded to the activations."""
    geometry = MambaGeometry(heads, head_dim, 1, 128)
    config = ReplayConfig(window=32, max_step_tokens=tokens, checkpoint=checkpoint, activation=activation)
    pool, weights = StatePool(geometry, config, 1, 1, device), Weights.random(geometry, device)
    stored = getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[checkpoint])
    generator = torch.Generator().manual_seed(heads)
    states = torch.randn((1, heads, head_dim, 128), generator=generator).to(stored).float()
    pool.reset(0)
    pool.restore(0, 0, states.to(device), torch.zeros((1, 3, geometry.conv_channels), device=device))
    for first in range(0, 128, tokens):
        inputs = random_tokens(geometry, pool.activation, tokens, device)
        C = torch.zeros_like(inputs.C)
        picked = torch.arange(first, first + tokens, device=device) % 128
        C[torch.arange(tokens), 0, picked] = 1.0
        plan = pool.plan(0, tokens)
        inputs = inputs._replace(x=torch.zeros_like(inputs.x), C=C)
        out = ops.step(pool, 0, plan, *inputs, *weights, dt_limit=(0.0, 0.0))
        pool.commit(plan, 0)
        assert torch.equal(out, states[0, :, :, picked.cpu()].permute(2, 0, 1).to(pool.activation).to(device))


def test_bf16_checkpoint_works_but_warns(device):
    with pytest.warns(UserWarning, match="bf16"):
        config = ReplayConfig(window=8, checkpoint="bf16", activation="fp32")
    pool = StatePool(SMALL, config, 1, 1, device)
    pool.reset(0)
    weights, tokens = Weights.random(SMALL, device), random_tokens(SMALL, torch.float32, 40, device)
    outputs = []
    for t in range(40):
        plan = pool.plan(0)
        outputs.append(ops.step(pool, 0, plan, *tokens.span(t, t + 1), *weights))
        pool.commit(plan)
    error = oracle.relative_error(array(torch.cat(outputs)), recur(zero_state(SMALL), tokens, weights)[0])
    assert 1e-5 < error < 2e-2  # the flushes do round to bf16


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.001, 0.1), (0.05, 0.05)])
@pytest.mark.parametrize("op", [ops.step, ops.prefill, ops.conventional_step])
def test_time_step_limit_is_the_only_clamp(device, op, limit):
    """A30: dt of -12 gives delta 6e-6, not the 0.001 floor of other libraries; dt above 20 passes through."""
    pool = StatePool(SMALL, ReplayConfig(window=8, max_step_tokens=4, activation="fp32"), 1, 1, device)
    pool.reset(0)
    weights = Weights.random(SMALL, device)._replace(dt_bias=torch.zeros(4, device=device))
    x, B, C, _ = random_tokens(SMALL, torch.float32, 4, device)
    dt = torch.tensor([-12.0, -4.0, 0.5, 25.0], device=device)[:, None].expand(4, 4)
    plan = pool.plan(0, 4)
    out = op(pool, 0, plan, x, B, C, dt, *weights, dt_limit=limit)
    expected = recur(zero_state(SMALL), Tokens(x, B, C, dt), weights, dt_limit=limit)[0]
    for t in range(4):
        assert oracle.relative_error(array(out[t]), expected[t]) < FP32_FLOOR
    if op is ops.step:
        delta = pool.layout.unpack(pool.data[0].cpu().numpy())["delta_ring"][0, :, :4]
        exact = np.clip(np.log1p(np.exp(np.array([-12.0, -4.0, 0.5, 25.0]))), *limit)
        np.testing.assert_allclose(delta, np.broadcast_to(exact[:, None], (2, 4, 2)), rtol=1e-6)


@pytest.mark.parametrize("op", [ops.step, ops.prefill])
def test_softplus_over_its_whole_range(device, op):
    """delta for dt from -30 to 30 (the formula changes at 20), read back from a state that started at zero."""
    geometry = MambaGeometry(num_heads=64, head_dim=8, num_groups=1, state_dim=64)
    dt = torch.linspace(-30, 30, 64, device=device)[None]
    weights = Weights.random(geometry, device)._replace(dt_bias=torch.zeros(64, device=device))
    tokens = random_tokens(geometry, torch.float32, 1, device)._replace(dt=dt)
    pool = StatePool(geometry, ReplayConfig(activation="fp32"), 1, 1, device)
    plan = pool.plan(0)
    op(pool, 0, plan, *tokens, *weights)
    pool.commit(plan)
    state = array(pool.materialize(0, 0)[0][0])
    expected = recur(zero_state(geometry), tokens, weights)[1][-1]
    for head in range(64):
        assert oracle.relative_error(state[head], expected[head]) < 1e-6, f"dt = {float(dt[0, head])}"


@pytest.mark.parametrize("dt_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_delta_is_never_rounded_to_the_activation(device, dt_dtype):
    """A18: dt in steps of one bf16 ulp around 0.03; the delta of step's records and prefill's own are fp32."""
    geometry = MambaGeometry(num_heads=8, head_dim=8, num_groups=1, state_dim=64)
    ulp = 2.0**-13
    dt = (0.03125 + ulp * torch.arange(8)).to(dt_dtype).to(device)[None]
    weights = Weights.random(geometry, device)._replace(dt_bias=torch.full((8,), -1.0, device=device))
    tokens = random_tokens(geometry, torch.bfloat16, 1, device)._replace(dt=dt)
    pool = StatePool(geometry, ReplayConfig(window=8), 2, 1, device)
    pool.reset([0, 1])
    for slot, op in ((0, ops.step), (1, ops.prefill)):
        plan = pool.plan(slot)
        op(pool, 0, plan, *tokens, *weights)
        pool.commit(plan)
    exact = np.log1p(np.exp(array(dt)[0] - 1.0))
    recorded = pool.layout.unpack(pool.data[0].cpu().numpy())["delta_ring"][0, :, 0].ravel()
    np.testing.assert_allclose(recorded, exact, rtol=1e-6)
    stepped, folded = array(pool.materialize(0, [0, 1])[0])
    assert oracle.relative_error(folded, stepped) < 1e-6
    assert oracle.relative_error(stepped, recur(zero_state(geometry), tokens, weights)[1][-1]) < 1e-6


@pytest.mark.parametrize("padding", [0, 8, 1])
@pytest.mark.parametrize("op", [ops.step, ops.prefill, ops.conventional_step])
def test_strided_inputs_give_the_bits_of_contiguous_ones(device, op, padding):
    """A03: x, B and C are slices of one buffer (rows padded by 8, and by 1: no alignment), dt a strided slice."""
    g = SUPER_TP8
    weights = Weights.random(g, device)
    tokens = random_tokens(g, torch.bfloat16, 6, device)
    outputs = []
    for strided in (False, True):
        pool = StatePool(g, ReplayConfig(window=16, max_step_tokens=4), 2, 1, device)
        pool.reset([0, 1])
        arguments, out = tuple(tokens), None
        if strided:
            buffer = torch.full((6, g.conv_channels + padding), float("nan"), dtype=torch.bfloat16, device=device)
            buffer[:, : g.conv_channels] = torch.cat([t.flatten(1) for t in tokens[:3]], 1)
            sizes = [g.num_heads * g.head_dim, g.state_dim, g.state_dim]
            x, B, C = buffer[:, : g.conv_channels].split(sizes, 1)
            dt = torch.zeros((g.num_heads, 6, 3), dtype=torch.bfloat16, device=device)
            dt[:, :, 1] = tokens.dt.T
            arguments = (x.unflatten(1, (g.num_heads, -1)), B[:, None], C[:, None], dt[:, :, 1].T)
            out = torch.zeros((6, g.num_heads, g.head_dim + padding), dtype=torch.bfloat16, device=device)
            out = out[:, :, : g.head_dim]
        plan = pool.plan([1, 0], [4, 2])
        outputs.append(op(pool, 0, plan, *arguments, *weights, out=out))
        pool.commit(plan)
        outputs.append(pool.materialize(0, [0, 1])[0])
    assert outputs[0].abs().sum() > 0
    assert same_bits(outputs[0], outputs[2]) and same_bits(outputs[1], outputs[3])


@pytest.mark.parametrize("geometry, count", [(SMALL, 3), (SUPER_TP8, 1), (SUPER_TP8, 3)])
@pytest.mark.parametrize("op", [ops.step, ops.prefill, ops.conventional_step])
def test_weights_of_any_float_format_and_absent_ones(device, op, geometry, count):
    """Formats that hold the same values give the same bits; no D and no dt_bias count as zero."""
    tokens = random_tokens(geometry, torch.bfloat16, count, device)
    zeros = torch.zeros(geometry.num_heads, device=device)
    A_log = Weights.random(geometry, device).A_log.bfloat16().float()

    def run(*weights):
        pool = StatePool(geometry, ReplayConfig(window=8, max_step_tokens=4), 1, 1, device)
        pool.reset(0)
        return op(pool, 0, pool.plan(0, count), *tokens, *weights)

    reference = run(A_log, zeros, zeros)
    assert same_bits(run(A_log.bfloat16(), None, None), reference)
    assert same_bits(run(A_log, zeros.half(), zeros.bfloat16()), reference)
    assert not same_bits(run(A_log, zeros + 1, None), reference)
    assert not same_bits(run(A_log, None, zeros + 1), reference)


@pytest.mark.parametrize("checkpoint", ["fp32", "fp16"])
@pytest.mark.parametrize("geometry, activation", [(SMALL, "fp32"), (SUPER_TP8, "bf16"), (NANO_TP8, "fp16")])
def test_flush_then_step_is_step(device, geometry, activation, checkpoint):
    """Flush and outputs as two nodes give the bits, in outputs and memory, of the one that does both.

    So with a fp16 checkpoint the outputs of a flushing step read what was stored, not what was accumulated.
    """
    config = ReplayConfig(window=8, max_step_tokens=2, checkpoint=checkpoint, activation=activation)
    weights = Weights.random(geometry, device)
    pools = [StatePool(geometry, config, 3, 1, device) for _ in range(2)]
    for pool in pools:
        pool.reset([0, 1, 2])
    for cycle in range(9):
        counts = [2, 1, 2 if cycle > 3 else 0]
        tokens = random_tokens(geometry, pools[0].activation, sum(counts), device, seed=cycle)
        plans = [pool.plan([0, 1, 2], counts) for pool in pools]
        whole = ops.step(pools[0], 0, plans[0], *tokens, *weights)
        split = flush_then_step(pools[1], plans[1], tokens, weights)
        for pool, plan in zip(pools, plans, strict=True):
            pool.commit(plan)
        assert same_bits(whole, split)
        assert same_bits(pools[0].data, pools[1].data)
    assert pools[0].stats()["flushes"] > 0
    assert pools[1].stats() == pools[0].stats()


def test_rows_without_tokens_change_nothing(device):
    pool = StatePool(SMALL, ReplayConfig(window=4, max_step_tokens=2, activation="fp32"), 2, 1, device)
    pool.reset([0, 1])
    weights, tokens = Weights.random(SMALL, device), random_tokens(SMALL, torch.float32, 2, device)
    plan = pool.plan([0, 1], 1)
    ops.step(pool, 0, plan, *tokens, *weights)
    pool.commit(plan)
    before, cursors = pool.data.clone(), pool.cursors()
    for op in (ops.step, ops.prefill):
        plan = pool.plan([0, 1], 0)
        out = op(pool, 0, plan, *tokens.span(0, 0), *weights)
        pool.commit(plan)
        assert out.shape == (0, SMALL.num_heads, SMALL.head_dim)
        assert same_bits(pool.data, before)
        assert all(torch.equal(a, b) for a, b in zip(pool.cursors(), cursors, strict=True))
    plan = pool.plan([0, 1], [0, 2])
    ops.step(pool, 0, plan, *tokens, *weights)
    pool.commit(plan)
    assert same_bits(pool.data[0, 0], before[0, 0])
    assert pool.cursors().tokens.tolist() == [1, 3]
