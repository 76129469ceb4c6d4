# SPDX-License-Identifier: Apache-2.0
"""Replay and conventional decoding: the same text, and the traffic that each claims is the traffic that it has."""

import pytest

from trtllm_replayssm.runtime import Engine, SamplingParams

from .conftest import TINY, same_text
from .prompts import PROMPTS

WINDOW, TOKENS = 8, 65  # 64 decode steps after the prompt's own token


def generate(mode, device="cpu", prompts=PROMPTS[:3], dtype="float32", deterministic=False):
    options = dict(dtype=dtype, deterministic=deterministic, max_batch=len(prompts), window=WINDOW)
    engine = Engine(TINY, mode=mode, device=device, **options)
    return engine, engine.generate(prompts, SamplingParams(max_tokens=TOKENS, stop_tokens=()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_agree(device, dtype):
    arguments = device, PROMPTS[:6], dtype, dtype == "bfloat16"
    replay, texts = generate("replay", *arguments)
    _, others = generate("conventional", *arguments)
    for one, other in zip(texts, others, strict=True):
        same_text(replay, one, other)


def test_the_mode_asked_for_is_the_mode_that_runs(device):
    """A02: one state store a token when off, one a window when on."""
    decoded = 3 * (TOKENS - 1)
    engine, _ = generate("conventional", device)
    traffic, pool = engine.statistics()["decode_traffic"], engine.memory.pool
    state = pool.layout.sections["checkpoint"].bytes * pool.num_layers
    assert traffic.tokens == decoded
    assert traffic.state_bytes_written == traffic.state_bytes_read == decoded * state
    assert traffic.flushes == traffic.record_bytes_read == traffic.record_bytes_written == 0

    engine, _ = generate("replay", device)
    traffic, pool = engine.statistics()["decode_traffic"], engine.memory.pool
    record = pool.layout.record_bytes * pool.num_layers
    flushes = 3 * ((TOKENS - 2) // WINDOW)
    assert traffic.tokens == decoded
    assert traffic.flushes == flushes
    assert traffic.state_bytes_written == flushes * state
    assert traffic.record_bytes_written == decoded * record
    assert traffic.state_bytes_read <= (decoded + flushes) * state


def test_prefill_traffic_is_booked_apart(device):
    engine, texts = generate("replay", device)
    statistics = engine.statistics()
    assert statistics["prefill_traffic"].tokens == statistics["prompt_tokens"] == sum(len(t.prompt) for t in texts)
    assert statistics["generated_tokens"] == 3 * TOKENS
    assert statistics["decode_tokens"] == 3 * (TOKENS - 1)
    assert statistics["decode_steps"] == TOKENS - 1


@pytest.mark.parametrize(("ran", "other"), [("replay", "conventional"), ("conventional", "replay")])
def test_rehearsal_counts_what_the_other_mode_moves(ran, other):
    engine, texts = generate(ran)
    counted = generate(other)[0].statistics()["decode_traffic"]
    assert engine.rehearse(other, texts) == counted
    assert engine.rehearse(ran, texts) == engine.statistics()["decode_traffic"]
