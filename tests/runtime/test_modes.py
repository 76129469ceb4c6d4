# SPDX-License-Identifier: Apache-2.0
"""Replay and conventional decoding: the same text, and the traffic that each claims is the traffic that it has."""

import pytest
import torch

from trtllm_replayssm import ops
from trtllm_replayssm.runtime import Engine, SamplingParams, mamba_mixer

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


@pytest.mark.parametrize("mode", ["replay", "conventional"])
def test_where_steps_find_their_tokens(device, monkeypatch, recorded, mode):
    """Those of ReplaySSM in the rings, where the convolution puts x and B; prompts and other modes are given them. If
    ReplaySSM's are given them too, as where an evaluation looks at them, no bit of the logits changes.
    """
    conv_step, asked = ops.conv_step, set()

    def noting(*given, records=False):
        made = conv_step(*given, records=records)
        asked.add((records, tuple(made.shape[1:])))
        return made

    monkeypatch.setattr(ops, "conv_step", noting)
    options = dict(mode=mode, device=device, max_batch=2, window=WINDOW, speculation="ngram", draft_tokens=2)
    params = SamplingParams(max_tokens=TOKENS, stop_tokens=())
    logits = []
    for given in (False, True) if mode == "replay" else (False,):
        engine = Engine(TINY, **options)
        if given:  # another step than the engine's
            monkeypatch.setitem(mamba_mixer.STEPS, "replay", None)
        asked.clear()
        recorded.clear()
        engine.generate(PROMPTS[:2], params)
        logits.append(list(recorded))
        sizes = engine.memory.pool.geometry
        in_tensors, in_rings = (False, (sizes.conv_channels,)), (True, (sizes.num_groups, sizes.state_dim))
        assert asked == ({in_tensors, in_rings} if mode == "replay" and not given else {in_tensors})
    assert len(logits[0]) > 20
    assert all(torch.equal(*pair) for pair in zip(logits[0], logits[-1], strict=True))


@pytest.mark.parametrize(
    ("checkpoint_format", "read_copy"), [("fp16_sr", "nvfp4"), ("fp8_sr", "none"), ("fp32", "e2m2")]
)
def test_formats_of_the_state(device, checkpoint_format, read_copy):
    """What moves is counted in the formats' bytes, a rehearsal agrees, and a pre-empted text continues bit for bit."""
    options = dict(checkpoint_format=checkpoint_format, read_copy=read_copy, speculation="ngram", draft_tokens=2)
    options |= dict(device=device, dtype="float32", max_batch=2, deterministic=True, window=16)
    params = SamplingParams(max_tokens=TOKENS, stop_tokens=())
    engine = Engine(TINY, **options)
    texts = engine.generate(PROMPTS[:2], params)
    traffic, pool = engine.statistics()["decode_traffic"], engine.memory.pool
    assert (pool.config.checkpoint, pool.config.read_copy) == (checkpoint_format, read_copy)
    sections = {name: section.bytes * pool.num_layers for name, section in pool.layout.sections.items()}
    steps, flushes = sum(len(text.steps) for text in texts), traffic.flushes
    assert flushes > 2
    by_steps = sections.get("read_copy", sections["checkpoint"])
    assert traffic.state_bytes_read == (steps - flushes) * by_steps + flushes * sections["checkpoint"]
    assert traffic.state_bytes_written == flushes * (sections["checkpoint"] + sections.get("read_copy", 0))
    assert engine.rehearse("replay", texts) == traffic
    assert engine.memory_per_request("replay") == pool.data.nbytes // 2

    again = Engine(TINY, **options)
    moved = [again.add_request(prompt, params) for prompt in PROMPTS[:2]]
    for _ in range(20):
        again.step()
    again.preempt(moved[0])
    while any(text.finish_reason is None for text in moved):
        again.step()
    assert [text.tokens for text in moved] == [text.tokens for text in texts]


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
