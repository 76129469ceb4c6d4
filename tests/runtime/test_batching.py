# SPDX-License-Identifier: Apache-2.0
"""Requests that join, leave, wait, are pre-empted and reuse slots get the texts that they would get alone."""

import random

import pytest
import torch

from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.sequence import Sequence

from .conftest import TINY, relative_error, same_text
from .prompts import PROMPTS

LONG = " ".join(PROMPTS)


def endless(tokens):
    return SamplingParams(max_tokens=tokens, stop_tokens=())


def drain(engine, *sequences):
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()


@pytest.mark.parametrize("chunk", [1, 3, 15, 16, 17, 64])
def test_chunked_prefill_equals_one_shot(chunk, recorded, device):
    """1, conv_kernel - 1, window - 1, window, window + 1 and a power of two."""
    whole = Engine(TINY, device=device, dtype="float32", max_batch=1)
    cut = Engine(TINY, device=device, dtype="float32", max_batch=1, prefill_chunk=chunk)
    tokens = whole.tokenizer.encode(LONG)[:100]
    assert relative_error(cut.logits(tokens), whole.logits(tokens)) <= 1e-4
    (one,), (other,) = whole.generate([tokens], endless(24)), cut.generate([tokens], endless(24))
    assert len(recorded) == 48
    same_text(whole, one, other)


def test_interleaved_requests_equal_solo_runs_bit_for_bit(recorded, device):
    """32 requests over 8 slots, joining at random times, some sampled, some in several prompt chunks, now and then one
    pre-empted, and every eighth cancelled on its way."""
    options = dict(device=device, dtype="float32", deterministic=True, prefill_chunk=24, window=8)
    rng = random.Random(7)
    requests = []
    for index in range(32):
        words = LONG.split()
        start = rng.randrange(len(words) - 30)
        prompt = " ".join(words[start : start + rng.randrange(1, 30)])
        requests.append(
            (prompt, SamplingParams(max_tokens=rng.randrange(1, 28), temperature=0.7 * (index % 2), seed=index))
        )
    together = Engine(TINY, max_batch=8, **options)
    waiting, texts = list(requests), []
    while waiting or any(text.finish_reason is None for text in texts):
        for _ in range(rng.randrange(3)):
            if waiting:
                texts.append(together.add_request(*waiting.pop(0)))
        together.step()
        running = [text for text in texts if text.slot is not None]
        if running and rng.random() < 0.2:
            together.preempt(rng.choice(running))
        for text in texts[::8]:
            if len(text.tokens) >= 5:
                together.cancel(text)
    assert max(len(logits) for logits in recorded) == 8
    logits, recorded.rows = recorded.rows, {}

    alone = Engine(TINY, max_batch=1, **options)
    for (prompt, params), text in zip(requests, texts, strict=True):
        (solo,) = alone.generate([prompt], params)
        if text.finish_reason == "cancelled":
            assert text.tokens == solo.tokens[: len(text.tokens)]
        else:
            assert (text.tokens, text.text, text.finish_reason) == (solo.tokens, solo.text, solo.finish_reason)
    assert {text.finish_reason for text in texts} >= {"length", "cancelled"}
    assert all(torch.equal(row, recorded.rows[key]) for key, row in logits.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batched_greedy_texts_part_only_at_ties(device, dtype):
    together = Engine(TINY, device=device, dtype=dtype, max_batch=7)
    alone = Engine(TINY, device=device, dtype=dtype, max_batch=1)
    texts = together.generate(PROMPTS[:12], SamplingParams(max_tokens=40))
    for text, prompt in zip(texts, PROMPTS, strict=False):
        same_text(alone, text, alone.generate([prompt], SamplingParams(max_tokens=40))[0])


@pytest.mark.parametrize("passes", [1, 2, 3, 24])
def test_preempted_request_continues_bit_for_bit(passes, recorded, device):
    """Pre-empted in its prompt of three chunks, right after it, and mid-window (21 decoded tokens, 5 records)."""
    options = dict(device=device, dtype="float32", deterministic=True, prefill_chunk=24, max_batch=2)
    engine = Engine(TINY, **options)
    tokens = engine.tokenizer.encode(LONG)[:60]
    (expected,) = Engine(TINY, **options).generate([tokens], endless(60))
    expected_logits, recorded[:] = torch.cat(recorded), []

    text = engine.add_request(tokens, endless(60))
    for _ in range(passes):
        engine.step()
    before, recorded[:] = list(recorded), []
    assert text.length == min(passes * 24, 60) + max(passes - 3, 0)
    if passes == 24:
        assert int(engine.memory.pool.cursors([text.slot]).history[0]) == 5
    # Both slots are theirs next, until they finish in the same pass.
    others = [engine.add_request(prompt, endless(30)) for prompt in (tokens[:8], tokens[8:16])]
    engine.preempt(text)
    while others[0].finish_reason is None:
        engine.step()
        assert text.slot is None
    recorded[:] = []
    drain(engine, text)
    assert text.tokens == expected.tokens
    assert torch.equal(torch.cat(before + recorded), expected_logits)


def test_preempted_request_moves_to_another_slot(device):
    engine = Engine(TINY, device=device, dtype="float32", deterministic=True, max_batch=2)
    (expected,) = engine.generate([PROMPTS[0]], endless(40))
    text = engine.add_request(PROMPTS[0], endless(40))
    for _ in range(12):
        engine.step()
    before = text.slot
    engine.preempt(text)
    engine.add_request(PROMPTS[1], endless(100))
    engine.step()
    assert text.slot != before
    drain(engine, text)
    assert text.tokens == expected.tokens


def test_evicted_and_recomputed_request(device, in_step):
    """A10: the recomputed "prompt" is longer, and the window starts anew after it."""
    engine = Engine(TINY, device=device, dtype="float32", max_batch=1, window=16)
    (whole,) = engine.generate([PROMPTS[0]], endless(61))
    text = engine.add_request(PROMPTS[0], endless(21))
    drain(engine, text)
    before = engine.statistics()["decode_traffic"].flushes
    again = engine.add_request(text.prompt + text.tokens, endless(40))
    engine.step()  # the prompt and the first token
    for _ in range(16):
        engine.step()
    assert engine.statistics()["decode_traffic"].flushes == before
    engine.step()
    assert engine.statistics()["decode_traffic"].flushes == before + 1
    drain(engine, again)
    again.prompt, again.tokens = text.prompt, text.tokens + again.tokens
    same_text(engine, whole, again)


@pytest.mark.parametrize("mode", ["replay", "conventional"])
def test_slot_reuse_carries_nothing_over(mode, recorded, device):
    """A11: A leaves mid-window, B with a shorter prompt takes its slot."""
    used = Engine(TINY, mode=mode, device=device, dtype="float32", max_batch=1)
    used.generate([LONG[:400]], endless(10))
    recorded[:] = []
    (again,) = used.generate([PROMPTS[1]], endless(40))
    given, recorded[:] = torch.cat(recorded), []
    (fresh,) = Engine(TINY, mode=mode, device=device, dtype="float32", max_batch=1).generate([PROMPTS[1]], endless(40))
    assert again.tokens == fresh.tokens
    assert torch.equal(given, torch.cat(recorded))


def test_dirty_memory_changes_nothing(recorded, device):
    """A01: every byte of the state pool and every cached key is garbage before the first request."""
    params = endless(40)
    (clean,) = Engine(TINY, device=device, dtype="float32", max_batch=3).generate([PROMPTS[0]], params)
    expected, recorded[:] = torch.cat(recorded), []
    engine = Engine(TINY, device=device, dtype="float32", max_batch=3)
    engine.memory.pool.data.fill_(0xFF)
    engine.memory.kv.keys.fill_(float("nan"))
    engine.memory.kv.values.fill_(float("nan"))
    (dirty,) = engine.generate([PROMPTS[0]], params)
    assert dirty.tokens == clean.tokens
    assert torch.equal(torch.cat(recorded), expected)


def test_more_requests_than_slots_wait_in_line(device):
    """A07: exactly max_batch live requests for 100 steps; one more waits and then runs."""
    engine = Engine(TINY, device=device, dtype="float32", max_batch=4)
    texts = [engine.add_request(prompt, endless(110)) for prompt in PROMPTS[:4]]
    late = engine.add_request(PROMPTS[4], endless(5))
    for _ in range(100):
        engine.step()
        assert late.slot is None and not late.tokens
    drain(engine, late)
    assert all(text.finish_reason == "length" and len(text.tokens) == 110 for text in texts)
    assert late.finish_reason == "length"


def test_eager_steps_of_1_31_and_32_rows(small, device):
    """A12: memory for 32, and no graph of any size."""
    prompts = [list(range(10 + index, 14 + index)) for index in range(32)]
    alone = Engine(small, device=device, dtype="float32", max_batch=1)
    expected = [alone.generate([prompt], endless(10))[0] for prompt in prompts]
    engine = Engine(small, device=device, dtype="float32", max_batch=32, cuda_graphs=False)
    for rows in (1, 31, 32):
        for text, other in zip(engine.generate(prompts[:rows], endless(10)), expected, strict=False):
            same_text(alone, other, text)


def test_a_text_may_fill_the_context(small):
    engine = Engine(small, device="cpu", max_batch=1, context=64)
    (text,) = engine.generate([list(range(10, 20))], endless(54))
    assert text.length == 63 and len(text.tokens) == 54


def test_prompts_do_not_starve_texts(small):
    engine = Engine(small, device="cpu", max_batch=2, prefill_chunk=4)
    text = engine.add_request(PROMPTS[1], endless(60))
    while not text.tokens:
        engine.step()
    late = engine.add_request(list(range(3, 83)), endless(2))
    before = len(text.tokens)
    while not late.tokens:
        engine.step()
    assert len(text.tokens) - before >= 80 // 4 - 2


def test_short_prompts_share_a_pass(small):
    engine = Engine(small, device="cpu", max_batch=8, prefill_chunk=64)
    for _ in range(6):
        engine.add_request(list(range(10, 20)), endless(2))
    assert len(engine.step()) == 6


def test_failed_pass_ends_its_requests_and_leaves_the_engine_usable(small, monkeypatch):
    engine = Engine(small, device="cpu", max_batch=2)
    (expected,) = engine.generate([PROMPTS[0]], endless(20))
    text = engine.add_request(PROMPTS[0], endless(20))
    for _ in range(5):
        engine.step()
    norm, mixer = engine.model.stack.layers[2]

    def broken(*arguments):
        raise MemoryError("no memory")

    engine.model.stack.layers[2] = norm, broken
    with pytest.raises(MemoryError, match="no memory"):
        engine.step()
    engine.model.stack.layers[2] = norm, mixer
    assert text.finish_reason == "error" and text.slot is None
    assert engine.generate([PROMPTS[0]] * 2, endless(20))[1].text == expected.text


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "no tokens"),
        ([1, 1024], SamplingParams(), r"token 1024 is outside 0..1023"),
        ([1, -1], SamplingParams(), r"token -1 is outside"),
        (
            [1] * 500,
            SamplingParams(max_tokens=13),
            "500 prompt tokens and max_tokens 13 are more than the context of 512",
        ),
    ],
)
def test_bad_requests_are_refused(small, prompt, params, message):
    engine = Engine(small, device="cpu", max_batch=1)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params)
    assert engine.step() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "off"}, "mode is 'off', expected one of replay, conventional"),
        ({"mode": ""}, "mode is ''"),
        ({"device": "tpu"}, "device is 'tpu', expected cpu or cuda"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"context": 0}, "context is 0"),
        ({"window": 65, "device": "cpu"}, "window"),
        ({"device": "cpu", "cuda_graphs": True}, "cuda_graphs need a CUDA device"),
    ],
)
def test_bad_engine_options_are_refused(small, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(small, **options)


@pytest.mark.parametrize("method", ["reset", "load"])
def test_slot_that_cannot_be_prepared_ends_its_request_only(small, monkeypatch, method):
    """Nobody ever runs on a slot that still holds another sequence's memory."""
    engine = Engine(small, device="cpu", max_batch=1)
    (expected,) = engine.generate([PROMPTS[0]], endless(20))
    if method == "load":
        text = engine.add_request(PROMPTS[1], endless(20))
        engine.step()
        engine.preempt(text)
    else:
        text = engine.add_request(PROMPTS[1], endless(20))

    def broken(*arguments):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.memory, method, broken)
        with pytest.raises(MemoryError, match="no memory"):
            engine.step()
    assert text.finish_reason == "error" and text.slot is None
    assert engine.generate([PROMPTS[0]], endless(20))[0].tokens == expected.tokens


def test_preempted_request_survives_an_interrupted_commit_in_its_slot(small, monkeypatch):
    engine = Engine(small, device="cpu", max_batch=1)
    (expected,) = engine.generate([PROMPTS[0]], endless(20))
    text = engine.add_request(PROMPTS[0], endless(20))
    for _ in range(6):
        engine.step()
    other = engine.add_request(PROMPTS[1], endless(20))
    engine.preempt(text)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.memory.pool, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert other.finish_reason == "error"
    drain(engine, text)
    assert text.tokens == expected.tokens


def test_refused_batch_leaves_nobody_in_line(small):
    engine = Engine(small, device="cpu", max_batch=2)
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        engine.generate([PROMPTS[0], []], endless(5))
    with pytest.raises(ValueError, match="shorter"):
        engine.generate(PROMPTS[:2], [endless(5)])
    assert engine.step() == []


def test_logits_of_bad_tokens(small):
    engine = Engine(small, device="cpu", context=8)
    for tokens, match in (
        ([], "the prompt has no tokens"),
        ([-1], "prompt token -1 is outside 0..1023"),
        ([1024], "prompt token 1024 is outside"),
        ([1] * 9, "9 tokens are more than the context of 8"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.logits(tokens)
    with pytest.raises(TypeError):
        engine.add_request([3.7])
    assert engine.logits([1, 2]).shape == (2, 1024)


@pytest.mark.parametrize(
    ("decoding", "prompts", "steps_between"),
    [(1, [10], 1), (8, [10], 2), (7, [10], 1), (30, [10, 10, 10], 2), (30, [40, 24], 1), (30, [100], 1)],
)
def test_passes_for_few_prompts_come_after_two_steps(decoding, prompts, steps_between):
    """Few: less than an eighth of all, and less than a pass takes (64 tokens). A first prompt waits for nobody."""
    scheduler = Scheduler(40, 64)

    def add(*lengths):
        for length in lengths:
            scheduler.add(Sequence(0, [1] * length, SamplingParams(), frozenset(), None))
        return scheduler.admit()

    def turns(count):
        """Passes (True) and steps, of the next `count` turns. Prompts stay as they are."""
        return [scheduler.next_prompts() is not None for _ in range(count)]

    for sequence in add(*[1] * decoding):
        sequence.prefilled = 1
    assert turns(3) == [False] * 3
    add(*prompts)
    assert turns(7) == (([True] + [False] * steps_between) * 4)[:7]
