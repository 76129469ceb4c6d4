# SPDX-License-Identifier: Apache-2.0
"""Text as it comes out: whole characters, stop tokens and strings, streaming."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.tokenizer import TextStream, Tokenizer

from .conftest import TINY
from .prompts import PROMPTS


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def engine():
    return Engine(TINY, device="cpu", max_batch=4)


def pieces_of(tokenizer, text, stop=()):
    stream, pieces = TextStream(tokenizer, stop), []
    for token in tokenizer.encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            return stream, pieces
    return stream, [*pieces, stream.finish()]


@pytest.mark.parametrize("text", ["plain", "naïve café — “quotes”", "漢字かな交じり", "🙂👩‍👩‍👧🏽 end", " é", ""])
def test_pieces_are_whole_characters_and_join_to_the_text(tokenizer, text):
    _, pieces = pieces_of(tokenizer, text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20))
def test_any_text_survives(text):
    tokenizer = Tokenizer(TINY)
    _, pieces = pieces_of(tokenizer, text)
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text)).rstrip("\ufffd")


def test_a_text_that_ends_inside_a_character_ends_before_it(tokenizer):
    tokens = tokenizer.encode("a🙂")
    assert len(tokens) > 3
    stream = TextStream(tokenizer, ())
    pieces = [stream.push(token) for token in tokens[:-1]]
    assert "".join([*pieces, stream.finish()]) == "a"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("no such thing", ("zzz", "things"), "no such thing"),
        ("stop at once", ("s",), ""),
        ("über 🙂 alles", ("🙂",), "über "),
    ],
)
def test_stop_strings(tokenizer, text, stop, expected):
    stream, pieces = pieces_of(tokenizer, text, stop)
    assert "".join(pieces) == expected
    assert stream.stopped == (expected != text)


def test_stop_token_ends_the_text_and_has_none(engine):
    (whole,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=20, stop_tokens=()))
    token = whole.tokens[7]
    first = whole.tokens.index(token)
    (text,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=20, stop_tokens=(token,)))
    assert text.finish_reason == "stop"
    assert text.tokens == whole.tokens[: first + 1]
    assert text.text == engine.tokenizer.decode(whole.tokens[:first]).rstrip("\ufffd")


def test_stop_string_ends_the_text_before_it(engine):
    (whole,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=60, stop_tokens=()))
    stop = whole.text[20:25]
    (text,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=60, stop_tokens=(), stop=("\u2603", stop)))
    assert text.finish_reason == "stop"
    assert text.text == whole.text[: whole.text.index(stop)]
    assert len(text.tokens) < 60


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 4}, {"stop": ("the",)}])
def test_streaming_equals_generate(engine, params):
    params = SamplingParams(max_tokens=50, **params)
    (text,) = engine.generate([PROMPTS[3]], params)
    other = engine.add_request(PROMPTS[5], SamplingParams(max_tokens=10, stop_tokens=()))
    pieces = list(engine.stream(PROMPTS[3], params))
    assert [piece.token for piece in pieces] == text.tokens
    assert "".join(piece.text for piece in pieces) == text.text
    assert other.tokens  # others advance while one is streamed


def test_leaving_a_stream_frees_its_slot(small):
    engine = Engine(small, device="cpu", max_batch=1)
    for piece in engine.stream(PROMPTS[0], SamplingParams(max_tokens=400, stop_tokens=())):
        assert piece.token >= 0
        break
    assert engine.generate([PROMPTS[0]], SamplingParams(max_tokens=3))[0].finish_reason is not None


def test_cancel_in_line_and_running(small):
    engine = Engine(small, device="cpu", max_batch=1)
    running, waiting = (
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=400, stop_tokens=())) for _ in range(2)
    )
    engine.step()
    for text in (waiting, running, running):
        engine.cancel(text)
        assert text.finish_reason == "cancelled"
    assert engine.step() == []
