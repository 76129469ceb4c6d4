# SPDX-License-Identifier: Apache-2.0
"""Passes launched before the outcomes of the one before are known: the texts stay the same. On the CPU a launch is the
work itself, but what the host may know of it is the same."""

import random
from dataclasses import replace

import pytest

from trtllm_replayssm.runtime import Engine, SamplingParams

from .conftest import TINY
from .prompts import PROMPTS


def engine_for(speculation, device="cpu", ahead=True, **options):
    engine = Engine(TINY, device=device, dtype="float32", speculation=speculation, **options)
    engine._runner.together = ahead
    if speculation == "mtp":
        engine._drafter.together = ahead
    assert engine._runner.runs_ahead == (ahead and speculation != "ngram")
    return engine


@pytest.mark.parametrize("speculation", [None, "mtp", "ngram"])
def test_requests_that_come_and_go_get_their_texts(speculation, device):
    """More requests than slots, greedy and sampled, ends at stop tokens and at max_tokens, some cancelled, and others
    pre-empted where the step after the one that is known is on its way. Every step tells who got tokens."""
    random_numbers = random.Random(3)
    alone = engine_for(speculation, device, ahead=False, max_batch=6)
    drafts = [index % 4 if speculation else None for index in range(14)]
    params = [
        SamplingParams(4 + 3 * (index % 6), temperature=0.6 * (index % 2), seed=index, draft_tokens=drafts[index])
        for index in range(14)
    ]
    expected = alone.generate(PROMPTS[:14], params)
    stops = {index: expected[index].tokens[2] for index in (1, 4, 8, 11)}
    for index, stop in stops.items():
        params[index] = replace(params[index], stop_tokens=(stop,))
    engine = engine_for(speculation, device, max_batch=4, prefill_chunk=24)
    texts = [engine.add_request(prompt, p) for prompt, p in zip(PROMPTS[:14], params, strict=True)]
    told = [0] * 14
    while any(text.finish_reason is None for text in texts):
        for text in engine.step():
            told[texts.index(text)] = len(text.tokens)
        running = [text for text in texts if text.slot is not None]
        if running and random_numbers.random() < 0.3:
            engine.preempt(random_numbers.choice(running))
        if texts[5].tokens:
            engine.cancel(texts[5])
    for text in engine.step():
        told[texts.index(text)] = len(text.tokens)
    for index, (text, whole) in enumerate(zip(texts, expected, strict=True)):
        length = whole.tokens.index(stops[index]) + 1 if index in stops else len(whole.tokens)
        if index == 5:
            assert text.finish_reason == "cancelled" and text.tokens == whole.tokens[: len(text.tokens)]
        else:
            assert text.tokens == whole.tokens[:length]
            assert told[index] == length
    assert sorted(engine._scheduler._free) == [0, 1, 2, 3]


@pytest.mark.parametrize("speculation", [None, "mtp"])
def test_a_pass_is_launched_before_the_outcomes_of_the_last_are_asked_for(speculation):
    engine = engine_for(speculation, max_batch=2)
    seen, decode = [], engine._runner.decode

    def recording(turns, params, drafts):
        number = len(seen)
        seen.append(("launch", number))
        outcomes = decode(turns, params, drafts)

        def waiting():
            seen.append(("outcomes", number))
            return outcomes()

        return waiting

    engine._runner.decode = recording
    (text,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=8, stop_tokens=()))
    launches = [number for what, number in seen if what == "launch"]
    assert len(launches) >= 2
    for this, following in zip(launches, launches[1:], strict=False):
        assert seen.index(("launch", following)) < seen.index(("outcomes", this))
    if speculation is None:  # its end was in sight: no step too many
        assert len(launches) == 7
    statistics = engine.statistics()
    assert statistics["decode_steps"] == len(launches) - (("outcomes", launches[-1]) not in seen)
    assert statistics["generated_tokens"] == len(text.tokens) == 8


def test_a_decode_step_follows_prompts_before_the_tokens_of_the_step_before_them_are_asked_for():
    """Two passes behind the one whose outcomes are waited for, and none more."""
    engine = engine_for(None, max_batch=2)
    seen, passes = [], {"decode": engine._runner.decode, "prompts": engine._runner.prompts}

    def recording(kind):
        def launch(*arguments):
            number = sum(what == "launch" for what, *_ in seen)
            seen.append(("launch", number, kind))
            outcomes = passes[kind](*arguments)

            def waiting():
                seen.append(("outcomes", number, kind))
                return outcomes()

            return waiting

        return launch

    engine._runner.decode, engine._runner.prompts = recording("decode"), recording("prompts")
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=20, stop_tokens=()))
    while ("launch", 2, "decode") not in seen:
        engine.step()
    late = engine.add_request(PROMPTS[1], SamplingParams(max_tokens=3, stop_tokens=()))
    while late.finish_reason is None:
        engine.step()
    (prompts,) = [number for what, number, kind in seen if (what, kind) == ("launch", "prompts") and number > 2]
    before = seen.index(("outcomes", prompts - 1, "decode"))
    assert seen[before - 2 : before + 2] == [
        ("launch", prompts, "prompts"),
        ("launch", prompts + 1, "decode"),
        ("outcomes", prompts - 1, "decode"),
        ("outcomes", prompts, "prompts"),
    ]


def test_a_launch_that_fails_ends_its_texts_and_nothing_else():
    engine = engine_for(None, max_batch=2)
    (expected,) = engine.generate([PROMPTS[3]], SamplingParams(max_tokens=9))
    decode, calls = engine._runner.decode, []

    def failing(*arguments):
        calls.append(None)
        if len(calls) == 3:
            raise MemoryError("no memory")
        return decode(*arguments)

    engine._runner.decode = failing
    texts = [engine.add_request(prompt, SamplingParams(max_tokens=20, stop_tokens=())) for prompt in PROMPTS[:2]]
    waiting = engine.add_request(PROMPTS[3], SamplingParams(max_tokens=9))
    with pytest.raises(MemoryError):
        while True:
            engine.step()
    assert [text.finish_reason for text in texts] == ["error", "error"]
    while waiting.finish_reason is None:
        engine.step()
    assert waiting.tokens == expected.tokens


def test_who_got_a_last_token_outside_of_a_step_is_told_whatever_fails_before():
    """Two times tokens are handed out by `statistics`, and between the two a launch fails."""
    engine = engine_for(None, max_batch=2)
    params = SamplingParams(max_tokens=4, stop_tokens=()), SamplingParams(max_tokens=40, stop_tokens=())
    short, long = (engine.add_request(PROMPTS[0], each) for each in params)
    while len(short.tokens) < 3:
        engine.step()
    engine.statistics()
    assert short.finish_reason == "length"
    launch = engine._launch

    def failing():
        if engine._pipeline.ahead:
            raise MemoryError("no memory")
        return launch()

    engine._launch = failing
    with pytest.raises(MemoryError):
        engine.step()
    engine._launch = launch
    engine.statistics()
    assert short in engine.step()
    assert long.finish_reason is None


def test_outcomes_that_fail_outside_of_a_step_fail_the_next_one():
    """Or nobody would be told that these texts have ended."""
    engine = engine_for(None, max_batch=2)
    decode = engine._runner.decode

    def failing():
        raise RuntimeError("the device is gone")

    (text,) = [engine.add_request(PROMPTS[0], SamplingParams(max_tokens=40, stop_tokens=()))]
    engine._runner.decode = lambda *arguments: decode(*arguments) and failing
    engine.step()  # the prompt, whose first step is on its way then
    engine.statistics()
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    assert text.finish_reason == "error"
    engine._runner.decode = decode
    (again,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4))
    assert len(again.tokens) == 4
