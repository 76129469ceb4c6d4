# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: the bits by their definition, unbiased, and keyed by the sequence and nothing else."""

import numpy as np
import pytest
import torch
from mixer import Weights, random_tokens, same_bits

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

FORMATS = ["fp16_sr", "fp8_sr"]
GEOMETRY = MambaGeometry(num_heads=2, head_dim=8, num_groups=1, state_dim=64)
RANDOM_BITS = {"fp16_sr": 13, "fp8_sr": 16}


def make_pool(device, checkpoint, geometry=GEOMETRY, slots=1, layers=1, seed=0, first_head=0, **config) -> StatePool:
    config = ReplayConfig(8, 2, checkpoint, activation="fp32", seed=seed, **config)
    pool = StatePool(geometry, config, slots, layers, device, first_head)
    pool.data.fill_(0xFF)
    return pool


def restore(pool, slots, state, layer=0):
    """The same state [H, P, N] into all `slots`."""
    state = state[None].expand(len(slots), *state.shape).contiguous().to(pool.device)
    tail = torch.zeros((len(slots), 3, pool.geometry.conv_channels), device=pool.device)
    pool.restore(layer, slots, state, tail)


def codes(pool, slot=0, layer=0) -> np.ndarray:
    """Stored bits of the checkpoint, as integers [H, P, N]."""
    arrays = pool.layout.unpack(pool.data[layer, slot].cpu().numpy())
    return arrays["checkpoint"].view(np.uint16) if "checkpoint" in arrays else arrays["checkpoint.codes"]


def values(pool) -> np.ndarray:
    """Checkpoints of all slots of layer 0, float64 [slots, H, P, N]."""
    return pool.layout.state(pool.data[0].cpu().numpy()).astype(np.float64)


def state_of(seed, geometry=GEOMETRY) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((geometry.num_heads, geometry.head_dim, geometry.state_dim), generator=generator)


def philox(counter, key):
    """Philox4x32-7 on uint64 arrays of 32-bit values."""
    c, k, mask = [np.asarray(word, np.uint64) for word in counter], list(key), np.uint64(0xFFFFFFFF)
    for _ in range(7):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            b & mask,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            a & mask,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_philox_here_is_the_published_generator():
    """Known answers of Random123."""
    assert [int(w) for w in philox([0] * 4, [0] * 2)] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert [int(w) for w in philox(*pi)] == [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]


NEXT_RUN = 0xC680A74D


def fields(words, run) -> np.ndarray:
    """What the even and the odd columns of a run of eight take of its draw's words."""
    factor = np.array([pow(NEXT_RUN, r, 2**32) for r in range(8)], np.uint64)[run]
    words = words * factor % np.uint64(2**32)
    return np.stack([words, words >> np.uint64(16)]) & np.uint64(0x1FFF)


def random_bits(checkpoint, geometry, seed, stream, layer, head, writes) -> np.ndarray:
    """The random integers [P, N] of one write of a head, by docs/algorithm.md."""
    words = [seed % 2**32, seed >> 32], [stream % 2**32, stream >> 32, layer, head]
    key = [int(word) for word in philox(words[1], words[0])[:2]]
    p, n = np.meshgrid(np.arange(geometry.head_dim), np.arange(geometry.state_dim), indexing="ij")
    if checkpoint == "fp16_sr":
        drawn_p, draw, word = p - p % 2, n % 64 // 16, n % 8 // 2
    else:
        drawn_p, draw, word = p, n // 16, n % 16 // 4
    drawn = philox([drawn_p << 16 | draw, writes % 2**32 + 0 * p, (writes >> 32) + 0 * p, 0 * p], key)
    words = np.choose(word, drawn)
    if checkpoint == "fp16_sr":
        run = n // 64 * 4 + n // 8 % 2 * 2 + p % 2
        return fields(words, run)[n % 2, p, n]
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)])[n % 4 // 2, p, n]
    reversed_ = sum((halves >> np.uint64(bit) & np.uint64(1)) << np.uint64(15 - bit) for bit in range(16))
    return np.where(n % 2 == 0, halves, reversed_)


def step_of(checkpoint, exact: np.ndarray) -> np.ndarray:
    """Distance of the format's values around `exact`."""
    smallest, mantissa = {"fp16_sr": (-24, 10), "fp8_sr": (-9, 3)}[checkpoint]
    exponent = np.floor(np.log2(np.maximum(np.abs(exact), 1e-300)))
    return 2.0 ** np.maximum(exponent - mantissa, smallest)


def rounded(checkpoint, exact: np.ndarray, random: np.ndarray) -> np.ndarray:
    """`exact` rounded away from zero if its part of a step and the random bits make a carry, else towards it."""
    step = step_of(checkpoint, exact)
    below, part = np.divmod(np.abs(exact) / step, 1)
    carry = np.floor(part * 2.0 ** RANDOM_BITS[checkpoint]) + random >= 2.0 ** RANDOM_BITS[checkpoint]
    return np.sign(exact) * (below + carry) * step


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_rounding_by_its_definition(device, checkpoint):
    """Every value of two layers after restores of several sequences: normal and subnormal numbers, any key."""
    seed, streams, first_head = 2**63 + 12345, [0, 3, 2**64 - 5], 6
    state = state_of(0) * 0.3
    state[:, 1] *= 1e-5  # subnormal in fp16
    state[:, :, 1::2] *= 2e-3  # subnormal in E4M3, whose scale is the row's
    pool = make_pool(device, checkpoint, slots=3, layers=2, seed=seed, first_head=first_head)
    pool.reset([0, 1, 2], streams=streams)
    for layer in (0, 1):
        restore(pool, [0, 1, 2], state, layer)
    exact, scale = state.numpy().astype(np.float64), 1.0
    if checkpoint == "fp8_sr":
        scale = (state.abs().amax(-1, keepdim=True) / 448).numpy()
        exact = (state.numpy() / scale).astype(np.float64)
    for layer in (0, 1):
        read = pool.layout.state(pool.data[layer].cpu().numpy())
        for slot, stream in enumerate(streams):
            for head in (0, 1):
                writes = 0
                random = random_bits(checkpoint, GEOMETRY, seed, stream, layer, first_head + head, writes)
                expected = rounded(checkpoint, exact[head], random.astype(np.float64))
                factor = scale if checkpoint == "fp16_sr" else scale[head]
                np.testing.assert_array_equal(read[slot, head], (expected * factor).astype(np.float32))


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_mean_over_ten_thousand_keys_is_the_value(device, checkpoint):
    """100 seeds with 100 streams each: the mean of each value within 4 sigma, and that of all of them together."""
    state = state_of(1)
    state[1] *= 1e-6 if checkpoint == "fp16_sr" else 1.0
    state[1, :, 1:] *= 0.01  # subnormal against 448 in a row
    streams, total = 100, 0.0
    for seed in range(100):
        pool = make_pool(device, checkpoint, slots=streams, seed=seed)
        pool.reset(list(range(streams)))
        restore(pool, list(range(streams)), state)
        total = total + values(pool).sum(0)
    exact, scale = state.numpy().astype(np.float64), 1.0
    if checkpoint == "fp8_sr":
        scale = (state.abs().amax(-1, keepdim=True) / 448).numpy().astype(np.float64)
    step = scale * step_of(checkpoint, exact / scale)
    part = np.abs(exact) / step % 1
    tossed = (part > 0.01) & (part < 0.99)  # below 100 of 10,000 counts are not normally distributed
    assert tossed.mean() > 0.9
    error, sigma = ((total / 10_000 - exact) / step)[tossed], np.sqrt(part * (1 - part) / 10_000)[tossed]
    assert (np.abs(error) <= 4 * sigma).all()
    assert abs((np.sign(exact)[tossed] * error).sum()) <= 4 * np.sqrt((sigma**2).sum())


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_values_that_share_a_draw_round_independently(device, checkpoint):
    """Which of equal values go up: uncorrelated between the columns and rows of a draw, and a row and the next."""
    slots = list(range(256))
    mantissa = {"fp16_sr": 10, "fp8_sr": 3}[checkpoint]
    for parts in [(0.5, 0.3), (0.9, 0.0625)]:  # of a step, by head
        state = torch.ones((2, 8, 64)) + torch.tensor(parts)[:, None, None] * 2.0**-mantissa
        state[..., -1] = 448 / 256  # fp8: its scale is a power of two
        pool = make_pool(device, checkpoint, slots=len(slots))
        pool.reset(slots, streams=slots)
        restore(pool, slots, state)
        up = (values(pool) > 1)[..., :32].reshape(len(slots), 2, 4, 2, 8, 4)  # slots, heads, 4 x 2 rows, 8 x 4 columns
        for head, part in enumerate(parts):
            of_draw = np.moveaxis(up[:, head], (2, 4), (0, 1)).reshape(8, -1)  # each 8,192 times
            assert np.abs(of_draw.mean(1) - part).max() < 5 * np.sqrt(part * (1 - part) / of_draw.shape[1])
            correlation = np.corrcoef(of_draw) - np.eye(8)
            assert np.abs(correlation).max() < 0.06, (part, correlation)


def largest_correlation(first, second) -> float:
    """Of "first < a/256" and "second < b/256" over all a and b: what goes up of values, and what stays."""
    counts = np.histogram2d(first, second, bins=256, range=[(0, 8192), (0, 8192)])[0]
    both = counts.cumsum(0).cumsum(1) / len(first)
    covariance = (both - np.outer(both[:, -1], both[-1]))[:-1, :-1]
    part = np.arange(1, 256) / 256
    return np.abs(covariance / np.sqrt(np.outer(part * (1 - part), part * (1 - part)))).max()


def test_runs_of_a_draw_are_evenly_distributed_and_uncorrelated():
    """What the eight runs take of a word: of all that matters to lower fields, bits 0-12, of an even selection of what
    matters to upper ones, bits 0-28, and lower beside upper ones of random words."""
    runs = np.arange(8)[:, None]
    lower = fields(np.arange(2**13, dtype=np.uint64), runs)[0]
    upper = fields(np.arange(2**18, dtype=np.uint64) << np.uint64(11), runs)[1]
    for of_run in (*lower, *upper):
        counts = np.bincount(of_run.astype(np.int64))
        assert (counts == len(of_run) // 2**13).all()
    for i in range(8):
        for j in range(i):
            assert abs(np.corrcoef(lower[i], lower[j])[0, 1]) < 0.005
            assert abs(np.corrcoef(upper[i], upper[j])[0, 1]) < 0.001
            assert largest_correlation(lower[i], lower[j]) < 0.028  # of parts of 255/256: the field 0 stays 0
            assert largest_correlation(upper[i], upper[j]) < 0.01
    random = fields(np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint64), runs)
    for i in range(8):
        for j in range(8):
            assert largest_correlation(random[0, i], random[1, j]) < 0.02


def test_all_values_of_a_draw_are_uncorrelated():
    """The random numbers of a draw's 64 values, over 2^18 draws: means, variances and all pairs."""
    counter = np.arange(2**18, dtype=np.uint64)
    words = np.stack(philox([counter, 0 * counter, 0 * counter, 0 * counter], [1, 2]))
    values = np.concatenate(fields(words[:, None], np.arange(8)[:, None])).reshape(64, -1) / 8192
    sigma = 2**-9
    assert np.abs(values.mean(1) - 0.5).max() < 5 * sigma / np.sqrt(12)
    assert np.abs(values.var(1) * 12 - 1).max() < 5 * sigma
    assert np.abs(np.corrcoef(values) - np.eye(64)).max() < 0.01
    for part in (1 / 256, 0.1, 0.5, 0.9):
        assert np.abs((values >= 1 - part).mean(1) - part).max() < 5 * sigma * np.sqrt(part * (1 - part)) + 2**-13


def test_the_64_values_of_a_draw_round_independently(device):
    """Which of equal values go up: as often as they should, and uncorrelated between all that share a draw."""
    geometry, slots = MambaGeometry(num_heads=2, head_dim=64, num_groups=1, state_dim=128), list(range(128))
    for parts in [(0.5, 0.3), (0.9, 0.0625)]:  # of a step, by head
        state = torch.ones((2, 64, 128)) + torch.tensor(parts)[:, None, None] * 2.0**-10
        pool = make_pool(device, "fp16_sr", geometry, slots=len(slots))
        pool.reset(slots, streams=slots)
        restore(pool, slots, state)
        up = (values(pool) > 1).reshape(len(slots), 2, 32, 2, 2, 4, 16)  # slots, heads, 32 x 2 rows, 2 x 4 x 16 columns
        for head, part in enumerate(parts):
            of_draw = np.moveaxis(up[:, head], (2, 3, 5), (0, 1, 2)).reshape(64, -1)  # each 16,384 times
            assert np.abs(of_draw.mean(1) - part).max() < 5 * np.sqrt(part * (1 - part) / of_draw.shape[1])
            correlation = np.corrcoef(of_draw) - np.eye(64)
            assert np.abs(correlation).max() < 0.045, (part, np.abs(correlation).max())


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_bits_follow_the_key(device, checkpoint):
    """The same key gives the same bits; another seed, stream, layer, head, row, column or write gives others."""
    same = state_of(2)[:1, :1, :1].expand(2, 8, 64).clone() * torch.linspace(0.5, 1, 64)
    same[..., 1::2] = same[..., ::2]  # equal neighbours
    same[..., 0] = 1.0

    def bits(seed=0, stream=9, layer=0, restores=1):
        pool = make_pool(device, checkpoint, layers=2, seed=seed)
        pool.reset(0, streams=stream)
        for _ in range(restores):
            restore(pool, [0], same, 0)
            restore(pool, [0], same, 1)
        return codes(pool, layer=layer)

    reference = bits()
    np.testing.assert_array_equal(bits(), reference)
    for other in (
        dict(seed=1),
        dict(seed=2**40),
        dict(stream=10),
        dict(stream=2**40 + 9),
        dict(layer=1),
        dict(restores=2),
    ):
        assert (bits(**other) != reference).mean() > 0.1, other
    assert (bits(restores=2) != bits(restores=3)).mean() > 0.1
    assert (reference[0] != reference[1]).mean() > 0.1  # heads
    assert (reference[:, 0] != reference[:, 1]).mean() > 0.1  # rows
    assert (reference[..., 2::2] != reference[..., 3::2]).mean() > 0.1  # columns


def run(pool, slot, steps, weights, tokens, others=()):
    """A prompt of 5 tokens and `steps` tokens of one sequence beside those of `others`; outputs [5 + steps, H, P]."""
    slots, outputs = [*others, slot], []
    for start, end, op in [(0, 5, ops.prefill), *((5 + t, 6 + t, ops.step) for t in range(steps))]:
        mine = tokens.span(start, end)
        theirs = [random_tokens(pool.geometry, torch.float32, end - start, pool.device, seed=77 + start)] * len(others)
        plan = pool.plan(slots, end - start)
        out = op(pool, 0, plan, *(torch.cat(parts) for parts in zip(*theirs, mine, strict=True)), *weights)
        pool.commit(plan)
        outputs.append(out[len(others) * (end - start) :])
    return torch.cat(outputs)


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_bits_do_not_depend_on_slot_and_batch(device, checkpoint):
    weights, tokens = Weights.random(GEOMETRY, device), random_tokens(GEOMETRY, torch.float32, 30, device)
    alone, together = make_pool(device, checkpoint), make_pool(device, checkpoint, slots=5)
    alone.reset(0, streams=42)
    together.reset([4, 1, 3], streams=[6, 42, 7])
    outputs = run(alone, 0, 25, weights, tokens), run(together, 1, 25, weights, tokens, others=(4, 3))
    assert alone.cursors(0).writes.item() == 4
    assert same_bits(*outputs)
    np.testing.assert_array_equal(codes(alone, 0), codes(together, 1))


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_bits_do_not_depend_on_the_tensor_parallel_slice(device, checkpoint):
    """Two ranks with half of the heads each, against one with all; first_head is what makes it so."""
    whole = MambaGeometry(num_heads=4, head_dim=8, num_groups=2, state_dim=64)
    weights, tokens = Weights.random(whole, device), random_tokens(whole, torch.float32, 30, device)
    one = make_pool(device, checkpoint, whole)
    one.reset(0, streams=1)
    expected = run(one, 0, 25, weights, tokens)
    for first in (0, 2):
        heads, group = slice(first, first + 2), slice(first // 2, first // 2 + 1)
        x, B, C, dt = tokens
        mine = type(tokens)(x[:, heads], B[:, group], C[:, group], dt[:, heads])
        rank = make_pool(device, checkpoint, first_head=first)
        rank.reset(0, streams=1)
        given = run(rank, 0, 25, type(weights)(*(w[heads].contiguous() for w in weights)), mine)
        assert same_bits(given, expected[:, heads])
        np.testing.assert_array_equal(codes(rank), codes(one)[heads])
    with pytest.raises(ValueError, match="blob: expected first_head = 0, got 2"):
        make_pool(device, checkpoint).load(0, rank.save(0))
    with pytest.raises(ValueError, match="first_head: expected 0 or more, got -1"):
        make_pool(device, checkpoint, first_head=-1)
