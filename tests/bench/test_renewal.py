# SPDX-License-Identifier: Apache-2.0
"""The renewal value against closed forms and a simulation of the rule of docs/algorithm.md, section 3."""

import random

import pytest

from trtllm_replayssm.bench.renewal import flushes_per_row_and_step, moments, records_per_row_and_step, steps_to_count


@pytest.mark.parametrize("window", [1, 8, 16, 32])
def test_single_tokens_flush_once_a_window(window):
    assert moments(window, 1) == (window, 0)
    assert flushes_per_row_and_step(window, 1) == 1 / window


def test_steps_as_long_as_the_window_always_flush():
    assert flushes_per_row_and_step(4, 4) == 1


@pytest.mark.parametrize("window, tokens", [(16, 4), (16, 8), (32, 4), (9, 2)])
def test_moments_against_a_simulation(window, tokens):
    draw = random.Random(0)
    gaps, gap, history, found = [], 0, 0, 0
    while len(gaps) < 40_000:
        found += history
        flush = history > 0 and history + tokens > window
        if flush:
            gaps.append(gap)
            gap, history = 0, 0
        gap += 1
        history += draw.randint(1, tokens)
    mean = sum(gaps) / len(gaps)
    variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
    assert moments(window, tokens) == pytest.approx((mean, variance), rel=0.03)
    assert flushes_per_row_and_step(window, tokens) == pytest.approx(1 / mean, rel=0.01)
    assert records_per_row_and_step(window, tokens) == pytest.approx(found / sum(gaps), rel=0.01)


def test_steps_to_count():
    """So many steps leave the count three standard deviations, sqrt(n) times that of a gap, within 2 %."""
    mean, variance = moments(16, 4)
    steps = steps_to_count(16, 4, batch=8)
    renewals = 8 * steps / mean
    assert 3 * variance**0.5 / mean / renewals**0.5 == pytest.approx(0.02, rel=0.01)
    assert steps_to_count(16, 4, batch=800) == pytest.approx(steps / 100, abs=1)
