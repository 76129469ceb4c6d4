# SPDX-License-Identifier: Apache-2.0
"""ops.conv_step against the float64 oracle: any chunks, any taps, rejected tokens."""

import numpy as np
import oracle
import pytest
import torch
from mixer import SMALL, array, same_bits

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

FORMATS = {"fp32": (torch.float32, 2e-6), "bf16": (torch.bfloat16, 2.0**-8), "fp16": (torch.float16, 2.0**-11)}


def weights(geometry, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((geometry.conv_channels, geometry.conv_kernel), generator=generator)
    return weight.to(dtype).to(device), torch.randn(geometry.conv_channels, generator=generator).to(dtype).to(device)


def inputs(geometry, dtype, count, device, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, geometry.conv_channels), generator=generator).to(dtype).to(device)


def pool_of(geometry, device, slots=1, **config):
    pool = StatePool(geometry, ReplayConfig(**config), slots, 1, device)
    pool.data.fill_(0xFF)
    pool.reset(list(range(slots)))
    return pool


def run(pool, raw, weight, bias, chunks, slot=0):
    """Feeds `raw` in chunks, all committed; ops.prefill closes each plan."""
    outputs, first = [], 0
    for chunk in chunks:
        plan = pool.plan(slot, chunk)
        outputs.append(ops.conv_step(pool, 0, plan, raw[first : first + chunk], weight, bias))
        plan.note_use("folded", 0)
        pool.commit(plan)
        first += chunk
    assert first == len(raw)
    return torch.cat(outputs)


@pytest.mark.parametrize("activation", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("taps", [2, 3, 4, 8])
def test_chunks_of_any_length_equal_the_oracle_and_one_another(device, activation, taps):
    geometry = MambaGeometry(2, 8, 1, 64, conv_kernel=taps)
    dtype, bound = FORMATS[activation]
    weight, bias = weights(geometry, device)
    raw = inputs(geometry, dtype, 60, device)
    expected = oracle.convolve(np.zeros((0, geometry.conv_channels)), array(raw), array(weight), array(bias))
    whole = None
    as_taps = [taps - 1] * (60 // (taps - 1)) + [1] * (60 % (taps - 1))
    for chunks in ([60], [1] * 60, [1, 2, 57], as_taps, [5, 4, 4, 47]):
        pool = pool_of(geometry, device, window=8, max_step_tokens=4, activation=activation)
        out = run(pool, raw, weight, bias, chunks)
        assert np.all(np.abs(array(out) - expected) <= bound * np.abs(expected) + 2e-6)
        whole = out if whole is None else whole
        assert same_bits(out, whole)
        tail = pool.materialize(0, 0)[1][0]
        assert torch.equal(tail, raw[60 - taps + 1 :].float())


def test_rejected_tokens_leave_no_trace(device):
    """300 steps of 1..4 tokens with random acceptance, between them prompt chunks."""
    rng = np.random.default_rng(0)
    pool = pool_of(SMALL, device, window=16, max_step_tokens=4, activation="fp32")
    weight, bias = weights(SMALL, device)
    committed = np.zeros((0, SMALL.conv_channels))
    for cycle in range(300):
        prompt = cycle % 17 == 5
        count = int(rng.integers(5, 12)) if prompt else int(rng.integers(0, 5))
        accepted = count if prompt else int(rng.integers(0, count + 1))
        raw = inputs(SMALL, torch.float32, count, device, seed=cycle)
        plan = pool.plan(0, count)
        out = array(ops.conv_step(pool, 0, plan, raw, weight, bias))
        plan.note_use("folded" if prompt else "stepped", 0)
        pool.commit(plan, accepted)
        expected = oracle.convolve(committed, array(raw), array(weight), array(bias))
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
        committed = np.concatenate([committed, array(raw)[:accepted]])
    assert pool.cursors().tokens.tolist() == [len(committed)]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_tail_of_a_short_prompt_is_zero_before_its_first_token(device, count):
    pool = pool_of(SMALL, device, window=8, max_step_tokens=1, activation="fp32")
    raw = inputs(SMALL, torch.float32, count, device)
    run(pool, raw, *weights(SMALL, device), [count])
    tail = pool.materialize(0, 0)[1][0]
    assert torch.equal(tail[3 - count :], raw)
    assert not tail[: 3 - count].any()


@pytest.mark.parametrize("taps", [2, 3, 4, 7, 8])
def test_inf_reaches_the_next_taps_only(device, taps):
    geometry = MambaGeometry(2, 8, 1, 64, conv_kernel=taps)
    pool = pool_of(geometry, device, window=8, max_step_tokens=4, activation="fp32")
    weight, bias = weights(geometry, device)
    raw = inputs(geometry, torch.float32, 40, device)
    raw[[5, 23]] = float("inf")
    finite = torch.isfinite(run(pool, raw, weight, bias, [16, 4, 1, 19])).all(-1)
    reached = [any(0 <= t - hit < taps for hit in (5, 23)) for t in range(40)]
    assert not finite[reached].any()
    assert finite[[not r for r in reached]].all()


def test_nan_in_unused_rows_changes_nothing(device):
    """Rows of the conv ring that no live input occupies may hold NaN, as after another sequence."""
    weight, bias = weights(SMALL, device)
    raw = inputs(SMALL, torch.float32, 9, device)
    outputs = []
    for poison in (0.0, float("nan")):
        pool = pool_of(SMALL, device, window=8, max_step_tokens=4, activation="fp32")
        section = pool.layout.sections["conv_ring"]
        ring = pool.data[0, 0, section.offset : section.offset + section.bytes].view(torch.float32).view(7, -1)
        ring.fill_(poison)
        out = [run(pool, raw[:2], weight, bias, [2])]
        ring[2:] = poison
        out.append(run(pool, raw[2:6], weight, bias, [4]))
        ring[6:] = poison
        ring[:3] = poison  # inputs 0..2: behind the last three
        out.append(run(pool, raw[6:], weight, bias, [3]))
        outputs.append(torch.cat(out))
    assert outputs[0].isfinite().all()
    assert same_bits(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_formats_strides_and_absent_bias(device, dtype):
    weight, bias = weights(SMALL, device, torch.bfloat16)
    weight, bias = weight.float().half().float(), bias.float().half().float()  # exact in both 16-bit formats
    weight, bias = weight.bfloat16().float(), bias.bfloat16().float()
    raw = inputs(SMALL, torch.bfloat16, 6, device)

    def once(raw, weight, bias, out=None):
        pool = pool_of(SMALL, device, slots=2, window=8, max_step_tokens=4)
        plan = pool.plan([1, -1, 0], [2, 1, 3])
        return ops.conv_step(pool, 0, plan, raw, weight, bias, out=out)

    reference = once(raw, weight, bias)
    assert reference[2].eq(0).all() and reference[[0, 1, 3, 4, 5]].ne(0).any(1).all()
    assert same_bits(once(raw, weight.to(dtype), bias.to(dtype)), reference)
    assert same_bits(once(raw, weight, None), once(raw, weight, torch.zeros_like(bias)))
    wide = torch.full((6, 2 * SMALL.conv_channels + 3), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 3 : 3 + SMALL.conv_channels] = raw
    out = torch.full((6, SMALL.conv_channels + 5), 7.0, dtype=torch.bfloat16, device=device)
    once(wide[:, 3 : 3 + SMALL.conv_channels], weight, bias, out=out[:, 1 : 1 + SMALL.conv_channels])
    live = torch.tensor([0, 1, 3, 4, 5], device=device)
    assert same_bits(out[live, 1 : 1 + SMALL.conv_channels], reference[live])
    assert out[2].eq(7).all() and out[:, 0].eq(7).all() and out[:, 1 + SMALL.conv_channels :].eq(7).all()


@pytest.mark.parametrize("most", [1, 4])
def test_a_row_of_many_does_not_depend_on_the_others(device, most):
    """So many that a CTA takes several one after another, some of them of no slot, of which outputs stay."""
    geometry, rows = MambaGeometry(2, 8, 1, 64), 1500
    config = dict(window=8, max_step_tokens=4)
    weight, bias = weights(geometry, device, torch.bfloat16)
    rng = np.random.default_rng(0)
    prompt = inputs(geometry, torch.bfloat16, 2 * rows, device)
    counts = rng.integers(1, most + 1, rows)
    raw = inputs(geometry, torch.bfloat16, int(counts.sum()), device, seed=2)
    first = counts.cumsum() - counts
    slots = rng.permutation(rows)
    slots[rng.random(rows) < 0.2] = -1

    def two_chunks(pool, slots, prompt, raw, counts):
        everyone = list(range(pool.num_slots))
        plan = pool.plan(everyone, [2] * len(everyone))
        ops.conv_step(pool, 0, plan, prompt, weight, bias)
        plan.note_use("folded", 0)
        pool.commit(plan)
        out = torch.full_like(raw, 7.0)
        return ops.conv_step(pool, 0, pool.plan(slots, counts, most=most), raw, weight, bias, out=out)

    whole = two_chunks(pool_of(geometry, device, rows, **config), slots.tolist(), prompt, raw, counts.tolist())
    for row in (0, 1, 2, 3, 4, 5, 6, 700, 701, 702, 1497, 1498, 1499):
        slot, part = slots[row], slice(first[row], first[row] + counts[row])
        if slot < 0:
            assert whole[part].eq(7).all()
            continue
        pool, its_prompt = pool_of(geometry, device, **config), prompt[2 * slot : 2 * slot + 2]
        assert same_bits(two_chunks(pool, [0], its_prompt, raw[part], [counts[row]]), whole[part])
