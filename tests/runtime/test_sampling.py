# SPDX-License-Identifier: Apache-2.0
"""Sampling: a row's token depends on its logits, its parameters and (seed, position), and on nothing else."""

import pytest
import torch

from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.row_tiles import RowTiles
from trtllm_replayssm.runtime.sampler import sample, uniform

from .conftest import TINY
from .prompts import PROMPTS

LOOSE = RowTiles(fixed=False)


def draw(logits, params, positions, fixed=False):
    return sample(logits, params, torch.tensor(positions), RowTiles(fixed)).tolist()


def splitmix64(seed, position):
    value = seed
    for word in (0, position):
        value = (value + word + 0x9E3779B97F4A7C15) % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        value ^= value >> 31
    return (value >> 40) / 2**24


def test_uniform_numbers_are_those_of_splitmix64(device):
    cases = [(seed, position) for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1) for position in (0, 1, 7, 262144)]
    seeds = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed, _ in cases], device=device)
    positions = torch.tensor([position for _, position in cases], device=device)
    assert uniform(seeds, positions).tolist() == [splitmix64(*case) for case in cases]


def test_uniform_numbers_are_uniform():
    numbers = uniform(torch.arange(50)[:, None], torch.arange(200))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(numbers.std() - 12**-0.5) < 0.01
    for axis in (0, 1):  # neighbours along positions and along seeds are not correlated
        a, b = numbers.narrow(axis, 0, numbers.shape[axis] - 1), numbers.narrow(axis, 1, numbers.shape[axis] - 1)
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.05


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).expand(4000, 5)
    params = [SamplingParams(temperature=0.8, seed=seed) for seed in range(4000)]
    counts = torch.bincount(torch.tensor(draw(logits, params, [3] * 4000)), minlength=5) / 4000
    assert (counts - (logits[0] / 0.8).softmax(-1)).abs().max() < 0.03


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).expand(500, 5)
    positions = list(range(500))
    for knobs, allowed in (
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.4}, {2}),
        ({"top_p": 0.7}, {1, 2}),
        ({"top_k": 3, "top_p": 0.99}, {1, 2, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
    ):
        params = [SamplingParams(temperature=1.0, seed=3, **knobs)] * 500
        assert set(draw(logits, params, positions)) == allowed


def test_temperature_0_is_greedy_among_sampled_rows():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=i % 2 * 5.0, seed=i) for i in range(6)]
    tokens = draw(logits, params, [0] * 6)
    assert tokens[::2] == logits.argmax(-1)[::2].tolist()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_row_does_not_depend_on_its_batch(fixed):
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 1024, generator=random)
    params = [SamplingParams(temperature=0.5 + 0.1 * i, top_k=i * 7, top_p=1 - 0.02 * i, seed=i) for i in range(40)]
    positions = list(range(100, 140))
    together = draw(logits, params, positions, fixed)
    order = torch.randperm(40, generator=random).tolist()
    shuffled = draw(logits[order], [params[i] for i in order], [positions[i] for i in order], fixed)
    assert shuffled == [together[i] for i in order]
    for i in (0, 13, 39):
        assert draw(logits[i : i + 1], [params[i]], [positions[i]], fixed) == [together[i]]


def test_seed_decides_the_text_and_the_batch_does_not(device):
    engine = Engine(TINY, device=device, dtype="float32", deterministic=True, max_batch=6)
    params = [SamplingParams(max_tokens=24, temperature=1.0, seed=seed, stop_tokens=()) for seed in (1, 2, 1)]
    texts = engine.generate([PROMPTS[0]] * 3, params)
    assert texts[0].tokens == texts[2].tokens != texts[1].tokens
    (alone,) = engine.generate([PROMPTS[0]], params[0])
    assert alone.tokens == texts[0].tokens


@pytest.mark.parametrize("speculation", [None, "mtp"])
def test_random_numbers_go_by_the_position_in_the_sequence(speculation, device):
    """A text's beginning, given as the prompt, is continued as the text was."""
    engine = Engine(TINY, device=device, dtype="float32", deterministic=True, max_batch=1, speculation=speculation)
    (whole,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=24, temperature=1.0, seed=5, stop_tokens=()))
    for known in (1, 2, 11):
        params = SamplingParams(max_tokens=24 - known, temperature=1.0, seed=5, stop_tokens=())
        (rest,) = engine.generate([whole.prompt + whole.tokens[:known]], params)
        assert rest.tokens == whole.tokens[known:]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": "x"}, "stop is 'x', expected a tuple"),
        ({"stop": ("",)}, "stop is"),
    ],
)
def test_bad_parameters_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**knobs)


@pytest.mark.parametrize("name, value", [("max_tokens", 2.5), ("top_k", "3"), ("seed", 1.5)])
def test_counts_and_seeds_are_ints(name, value):
    with pytest.raises(TypeError, match=f"{name} is {value!r}, expected an int"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("stop", ["end", (5,), (b"x",), ("",)])
def test_stop_is_a_tuple_of_strings(stop):
    with pytest.raises(ValueError, match="stop is .*, expected a tuple of non-empty strings"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("temperature", [1e-320, 1e-38, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    logits = 50 * torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(8)]
    assert draw(logits, params, [0] * 8) == logits.argmax(-1).tolist()
