# SPDX-License-Identifier: Apache-2.0
"""Summaries over rows and positions, and of free-running texts."""

import numpy as np
import pytest

from trtllm_replayssm.evaluation.generation import compare_texts
from trtllm_replayssm.evaluation.statistics import buckets, interval, slope, written


def test_buckets_double_and_cover_every_position_once():
    assert buckets(100) == [(0, 16), (16, 32), (32, 64), (64, 100)]
    assert buckets(16) == [(0, 16)]
    assert buckets(5) == [(0, 5)]


def test_interval_of_equal_rows_is_their_value():
    assert interval(np.full(8, 3.0)) == [3.0, 3.0]


def test_one_row_has_no_interval():
    assert interval(np.array([3.0])) is None
    assert written(None, ".2f") == "-" and written([0.5, 1.0], "+.1f") == "+0.5 … +1.0"


def test_interval_is_that_of_the_mean():
    """Of 400 normal rows: mean ± 1.96 standard errors, which the bootstrap meets within a few per cent."""
    rows = np.random.default_rng(1).normal(size=400)
    low, high = interval(rows)
    half = 1.96 * rows.std() / 400**0.5
    assert (low, high) == pytest.approx((rows.mean() - half, rows.mean() + half), abs=0.1 * half)


def test_slope_is_the_change_along_the_range():
    positions = np.arange(1000.0)
    values = np.stack([5 + 0.002 * positions, 7 - 0 * positions, np.cos(positions * 2 * np.pi / 10)])
    assert slope(values) == pytest.approx([2.0, 0.0, 0.0], abs=2e-2)


def test_texts():
    stop = 9
    reference = np.array([[1, 2, 3, 9, 5, 6, 7, 8, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13]])
    texts = np.array([[1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13]])
    figures = compare_texts(texts, reference, (stop,))
    assert figures["length"] == (7 + 12) / 2
    assert figures["reference_length"] == (3 + 12) / 2
    assert figures["length_growth"] == 19 / 15
    assert figures["unfinished"] == figures["reference_unfinished"] == 0.5
    assert figures["agreement"] == (3 + 12) / 2
    assert figures["repeated"] == figures["reference_repeated"] == 0


def test_a_passage_repeats_once_its_eight_tokens_occurred_before():
    text = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 20, 21]])
    figures = compare_texts(text, text, ())
    # 12 passages end at tokens 8 … 19; those at 16 and 17 (1…8 and 2…8 1) occurred before.
    assert figures["repeated"] == 2 / 12
    assert not figures["has_stop_token"]
