# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: the tokens that followed the newest ones the last time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_replayssm.runtime import SamplingParams
from trtllm_replayssm.runtime.ngram import NGram
from trtllm_replayssm.runtime.sequence import Sequence


def drafts(prompt, tokens, count, **sizes):
    sequence = Sequence(0, prompt, SamplingParams(), frozenset(), None)
    sequence.tokens = tokens
    return NGram(**sizes).propose(sequence, count)


def test_the_longest_and_latest_match_counts():
    assert drafts([1, 2, 3, 4, 9, 2, 3, 5, 1, 2], [3], 2) == [4, 9]  # 1 2 3 rather than the later 2 3
    assert drafts([7, 8, 1, 7, 8, 2], [7, 8], 1) == [2]
    assert drafts([7, 8, 1, 7, 8, 2], [7, 8], 4, longest=2) == [2, 7, 8, 2]
    assert drafts([1, 2, 3], [4], 3) == []
    assert drafts([1, 5, 1], [5, 2, 5], 2, shortest=1) == [2, 5]


def test_a_repetition_goes_on():
    assert drafts([4, 4, 4], [], 5) == [4] * 5
    assert drafts([1, 2, 3, 1], [2, 3], 5) == [1, 2, 3, 1, 2]


def test_short_sequences_have_no_drafts():
    assert drafts([1], [], 3) == drafts([1], [1], 3) == drafts([], [1], 3) == []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 5), st.lists(st.integers(1, 30)))
def test_against_a_plain_search(known, count, asked):
    """One drafter, asked at some lengths of one growing text."""
    drafter, sequence = NGram(), Sequence(0, known[:1], SamplingParams(), frozenset(), None)
    for length in sorted({min(length, len(known)) for length in asked} | {len(known)}):
        sequence.tokens = known[1:length]
        assert drafter.propose(sequence, count) == searched(known[:length], count)


def searched(known, count):
    for size in range(4, 1, -1):
        starts = [at for at in range(len(known) - size) if known[at : at + size] == known[-size:]]
        if starts:
            text = known[:]
            for source in range(starts[-1] + size, starts[-1] + size + count):
                text.append(text[source])
            return text[len(known) :]
    return []


def test_a_finished_text_is_forgotten():
    drafter, sequence = NGram(), Sequence(0, [1, 2, 1, 2], SamplingParams(), frozenset(), None)
    assert drafter.propose(sequence, 1) == [1]
    assert len(drafter._texts) == 1
    del sequence
    assert not drafter._texts
