# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the text of token-by-token decoding, in fewer steps."""

import pytest
import torch

from trtllm_replayssm.runtime import Acceptance, Drafter, Engine, SamplingParams
from trtllm_replayssm.runtime.frontier import HEADER
from trtllm_replayssm.runtime.sequence import Sequence

from .conftest import GPU, SMALL, TINY, relative_error, same_text, write_checkpoint
from .drafters import Scripted
from .prompts import PROMPTS

LONG = " ".join(PROMPTS)
EXACT = dict(dtype="float32", deterministic=True)
CLOSE = dict(dtype="bfloat16", deterministic=True)


def endless(tokens, **knobs):
    return SamplingParams(max_tokens=tokens, stop_tokens=(), **knobs)


def drain(engine, *sequences):
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()


# ---- the same text ---------------------------------------------------------------------------------------------------

LENGTH = 4096
LONG_RUN = dict(max_batch=1, context=LENGTH + 64, **EXACT)


@pytest.fixture(scope="module")
def plain():
    """4,096 greedy tokens of one sequence, token by token, on a device."""
    texts = {}

    def text(device):
        if device not in texts:
            texts[device] = Engine(TINY, device=device, **LONG_RUN).generate([PROMPTS[0]], endless(LENGTH))[0]
        return texts[device]

    return text


@pytest.mark.parametrize("drafter", ["mtp", "ngram", "wrong"])
def test_4096_greedy_tokens(drafter, plain, device):
    """A17: the drafts of "wrong" are all rejected."""
    expected = plain(device)
    speculation = Scripted([expected], right=0) if drafter == "wrong" else drafter
    engine = Engine(TINY, device=device, speculation=speculation, **LONG_RUN)
    (text,) = engine.generate([PROMPTS[0]], endless(LENGTH))
    acceptance = engine.statistics()["acceptance"]
    print(f"{drafter}: {acceptance}, {acceptance.tokens_per_step:.2f} tokens a step")
    assert text.tokens == expected.tokens
    assert text.text == expected.text
    if drafter == "wrong":
        assert (acceptance.steps, acceptance.accepted) == (LENGTH - 1, 0)
        assert acceptance.drafts >= 3 * (LENGTH - 1) - 6
    else:
        assert acceptance.tokens_per_step > 2


@pytest.mark.parametrize(("device", "texts"), [("cpu", 8), pytest.param(*GPU.values, 1, marks=GPU.marks)])
def test_4096_greedy_tokens_in_bf16(device, texts):
    """One text on a GPU, which takes long on a CPU."""
    options = dict(device=device, max_batch=texts, context=LENGTH // texts + 64, **CLOSE)
    plain, engine = (Engine(TINY, speculation=speculation, **options) for speculation in (None, "mtp"))
    runs = (e.generate(PROMPTS[:texts], endless(LENGTH // texts)) for e in (engine, plain))
    for text, expected in zip(*runs, strict=True):
        same_text(plain, text, expected)
    assert engine.statistics()["acceptance"].tokens_per_step > 2


@pytest.mark.parametrize("mode", ["replay", "conventional"])
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", False), ("bfloat16", True), ("bfloat16", False)])
def test_texts_part_only_at_ties(mode, drafter, dtype, deterministic, device):
    """A20: 20 prompts, n-gram drafts among them, in batches."""
    options = dict(device=device, dtype=dtype, deterministic=deterministic, mode=mode)
    plain = Engine(TINY, max_batch=10, **options)
    engine = Engine(TINY, max_batch=7, speculation=drafter, draft_tokens=4, **options)
    texts = engine.generate(PROMPTS, endless(32))
    for text, expected in zip(texts, plain.generate(PROMPTS, endless(32)), strict=True):
        same_text(plain, text, expected, neighbours=dtype == "bfloat16" and not deterministic)
    engine.memory.pool.validate()


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_sampled_texts_are_those_of_plain_sampling(drafter, device):
    """The same seed gives the same text: a draft stands only where it is what would have been sampled."""
    params = [endless(32, temperature=0.9, top_p=0.95, top_k=200 * (seed % 2), seed=seed) for seed in range(12)]
    options = dict(device=device, max_batch=6, **EXACT)
    expected = Engine(TINY, **options).generate(PROMPTS[:12], params)
    engine = Engine(TINY, speculation=drafter, **options)
    texts = engine.generate(PROMPTS[:12], params)
    assert [text.tokens for text in texts] == [text.tokens for text in expected]
    assert len({tuple(text.tokens) for text in texts}) == 12
    if drafter == "mtp":
        assert engine.statistics()["acceptance"].rate > 0.15


@pytest.mark.parametrize("right", [0, 1, 3])
def test_state_is_that_of_the_accepted_tokens(right, device, in_step):
    """A20: what the Mamba layers remember after verification is what they remember after the accepted tokens alone."""
    (known,) = Engine(TINY, device=device, dtype="float32", max_batch=1).generate([PROMPTS[0]], endless(150))
    engine = Engine(TINY, device=device, dtype="float32", max_batch=1, speculation=Scripted([known], right))
    text = engine.add_request(PROMPTS[0], endless(150))
    other = Engine(TINY, device=device, dtype="float32", max_batch=1, mode="conventional")
    while len(text.tokens) < 120:
        engine.step()
        if len(text.tokens) % 40 < 3:
            same = other.add_request(text.prompt + text.tokens[:-1], endless(2))
            other.step()
            for layer in range(engine.memory.pool.num_layers):
                state, tail = engine.memory.pool.materialize(layer, [text.slot])
                expected_state, expected_tail = other.memory.pool.materialize(layer, [same.slot])
                assert relative_error(state.flatten(1), expected_state.flatten(1)) <= 2e-5
                assert relative_error(tail.flatten(1), expected_tail.flatten(1)) <= 2e-5
            other.cancel(same)


# ---- what is accepted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [1, 3, 7, 15])
def test_perfect_drafter(drafts, device):
    """A14: every step commits all its tokens."""
    (known,) = Engine(TINY, device=device, max_batch=1, **EXACT).generate([PROMPTS[0]], endless(97))
    engine = Engine(
        TINY, device=device, speculation=Scripted([known], drafts), draft_tokens=drafts, max_batch=1, **EXACT
    )
    (text,) = engine.generate([PROMPTS[0]], endless(97))
    assert text.tokens == known.tokens
    assert text.steps == [(drafts + 1, drafts + 1)] * (96 // (drafts + 1))
    assert text.acceptance.rate == 1 and text.acceptance.length == drafts + 1


@pytest.mark.parametrize("mode", ["replay", "conventional"])
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafter_that_is_right_so_often(mode, right, device):
    """A14: right k of 3, committed k + 1."""
    options = dict(device=device, max_batch=1, mode=mode, **EXACT)
    (known,) = Engine(TINY, **options).generate([PROMPTS[0]], endless(61))
    engine = Engine(TINY, speculation=Scripted([known], right), **options)
    (text,) = engine.generate([PROMPTS[0]], endless(61))
    assert text.tokens == known.tokens
    full = [step for step in text.steps if step[0] == 4]
    assert full == [(4, right + 1)] * len(full) and len(full) >= 60 // (right + 1) - 3
    assert all(kept == min(brought, right + 1) for brought, kept in text.steps)


def test_statistics_add_up(device, in_step):
    engine = Engine(TINY, device=device, dtype="float32", speculation="mtp", max_batch=4)
    texts = engine.generate(PROMPTS[:6], endless(40))
    statistics = engine.statistics()
    total = statistics["acceptance"]
    assert total == sum((text.acceptance for text in texts), Acceptance())
    assert statistics["decode_tokens"] == total.steps + total.accepted == 6 * 39
    assert statistics["generated_tokens"] == 6 * 40
    assert 0 < total.accepted < total.drafts <= 3 * total.verified <= 3 * total.steps
    assert total.tokens_per_step == pytest.approx(6 * 39 / total.steps)
    assert total.length == pytest.approx(1 + total.rate * total.drafts / total.verified)
    for text in texts:
        assert sum(kept for _, kept in text.steps) == 39
        assert all(1 <= kept <= brought <= 4 for brought, kept in text.steps)


def test_traffic_of_a_speculative_run_is_rehearsed_exactly(device):
    for mode, other in (("replay", "conventional"), ("conventional", "replay")):
        engine = Engine(TINY, device=device, mode=mode, speculation="mtp", max_batch=3, **EXACT)
        texts = engine.generate(PROMPTS[:3], endless(50))
        counted = engine.statistics()["decode_traffic"]
        assert engine.rehearse(mode, texts) == counted
        run = Engine(TINY, device=device, mode=other, speculation="mtp", max_batch=3, **EXACT)
        run.generate(PROMPTS[:3], endless(50))
        assert engine.rehearse(other, texts) == run.statistics()["decode_traffic"]
        plain = Engine(TINY, device=device, mode=other, max_batch=3, window=engine.window, **EXACT)
        plain.generate(PROMPTS[:3], endless(50))
        assert engine.rehearse(other, texts, speculative=False) == plain.statistics()["decode_traffic"]


def test_memory_of_a_request():
    """Verification takes no snapshot: a state and rings, instead of a state and a snapshot for each token of a step."""
    engine = Engine(TINY, device="cpu", speculation="ngram", max_batch=2)
    conventional = Engine(TINY, device="cpu", speculation="ngram", max_batch=2, mode="conventional")
    pool = engine.memory.pool
    assert engine.memory.snapshots is None
    assert engine.memory_per_request("replay") == pool.data.nbytes // 2
    sections = conventional.memory.pool.layout.sections
    state = sections["checkpoint"].bytes * pool.num_layers
    needed = state + conventional.memory.snapshots.nbytes // 2 + sections["conv_ring"].bytes * pool.num_layers
    assert engine.memory_per_request("conventional") == conventional.memory_per_request("conventional") == needed
    assert needed > 5 * state and engine.memory_per_request("replay") < 1.5 * state


# ---- requests of all kinds together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [EXACT, CLOSE], ids=lambda options: options["dtype"])
def test_mixed_batch_equals_solo_runs_bit_for_bit(precision, recorded, device):
    """A09: {3, 0, 1, 3} drafts in one batch, one text sampled."""
    options = dict(device=device, speculation="mtp", **precision)
    params = [
        endless(40, draft_tokens=drafts, temperature=0.8 * (i == 3), seed=i) for i, drafts in enumerate((3, 0, 1, 3))
    ]
    texts = Engine(TINY, max_batch=4, **options).generate(PROMPTS[:4], params)
    logits, recorded.rows = recorded.rows, {}
    alone = Engine(TINY, max_batch=1, **options)
    for text, prompt, p in zip(texts, PROMPTS, params, strict=False):
        (solo,) = alone.generate([prompt], p)
        assert (solo.tokens, solo.steps) == (text.tokens, text.steps)
        assert max(brought for brought, _ in text.steps) == 1 + p.draft_tokens
    assert logits.keys() == recorded.rows.keys()
    assert all(torch.equal(row, recorded.rows[key]) for key, row in logits.items())


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
@pytest.mark.parametrize("passes", [1, 2, 3, 4, 12])
def test_preempted_request_continues_bit_for_bit(drafter, passes, recorded, device):
    """In its prompt of three chunks, after it, and later, with drafts proposed and not verified yet."""
    options = dict(device=device, prefill_chunk=24, max_batch=2, speculation=drafter, **EXACT)
    engine = Engine(TINY, **options)
    tokens = engine.tokenizer.encode(LONG)[:60]
    (expected,) = Engine(TINY, **options).generate([tokens], endless(60))
    expected_rows, recorded.rows = recorded.rows, {}
    text = engine.add_request(tokens, endless(60))
    for _ in range(passes):
        engine.step()
    slot = text.slot
    others = [engine.add_request(prompt, endless(20, seed=9)) for prompt in (tokens[:8], tokens[8:16])]
    engine.preempt(text)
    engine.step()
    assert text.slot is None
    engine.cancel(others[slot])  # the other slot is free: the text moves
    engine.step()
    drain(engine, text)
    assert (text.tokens, text.steps) == (expected.tokens, expected.steps)
    assert all(torch.equal(recorded.rows[key], row) for key, row in expected_rows.items())


@pytest.mark.parametrize("mode", ["replay", "conventional"])
def test_slot_reuse_carries_nothing_over(mode, recorded, device):
    """A11. Memory full of NaN before the first request, then a longer text in the same slot."""
    options = dict(mode=mode, device=device, dtype="float32", max_batch=1, speculation="mtp")
    (fresh,) = Engine(TINY, **options).generate([PROMPTS[1]], endless(40))
    expected, recorded[:] = torch.cat(recorded), []
    used = Engine(TINY, **options)
    used.memory.pool.data.fill_(0xFF)
    for cache in (used.memory.kv.keys, used.memory.kv.values):
        cache.fill_(float("nan"))
    if mode == "conventional":
        used.memory.snapshots.fill_(float("nan"))
    used.generate([LONG[:400]], endless(10))
    recorded[:] = []
    (again,) = used.generate([PROMPTS[1]], endless(40))
    assert again.tokens == fresh.tokens
    assert torch.equal(torch.cat(recorded), expected)


def test_interleaved_requests(device):
    """A07: as many requests as slots, and more, that join, leave and are pre-empted while others verify drafts."""
    engine = Engine(TINY, device=device, speculation="mtp", max_batch=3, prefill_chunk=16, adaptive=True, **EXACT)
    texts = [engine.add_request(prompt, endless(10 + 7 * (i % 4))) for i, prompt in enumerate(PROMPTS[:8])]
    for step in range(400):
        if all(text.finish_reason for text in texts):
            break
        engine.step()
        if step % 5 == 0 and (running := [text for text in texts if text.slot is not None]):
            engine.preempt(running[step % len(running)])
    solo = Engine(TINY, device=device, speculation="mtp", max_batch=1, prefill_chunk=16, adaptive=True, **EXACT)
    for text, prompt in zip(texts, PROMPTS, strict=False):
        (expected,) = solo.generate([prompt], text.params)
        assert (text.tokens, text.steps) == (expected.tokens, expected.steps)


# ---- where a text ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(20, 28))
def test_stop_inside_an_accepted_run(at, small):
    """A stop token, a stop string and max_tokens at every place of a step of 8 tokens that are all accepted."""
    (known,) = Engine(small, device="cpu", max_batch=1).generate([PROMPTS[0]], endless(60))
    engine = Engine(small, device="cpu", max_batch=1, speculation=Scripted([known], 7), draft_tokens=7)
    plain = Engine(small, device="cpu", max_batch=1)
    for params in (
        SamplingParams(max_tokens=60, stop_tokens=(known.tokens[at],)),
        SamplingParams(max_tokens=60, stop_tokens=(), stop=(known.text[at : at + 3], "\u2603")),
        SamplingParams(max_tokens=at, stop_tokens=()),
    ):
        ((text,), (expected,)) = (e.generate([PROMPTS[0]], params) for e in (engine, plain))
        for field in ("tokens", "pieces", "text", "finish_reason"):
            assert getattr(text, field) == getattr(expected, field)
        pieces = list(engine.stream(PROMPTS[0], params))
        assert [piece.token for piece in pieces] == expected.tokens
        assert "".join(piece.text for piece in pieces) == expected.text
        assert all(kept == brought for brought, kept in text.steps)


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
@pytest.mark.parametrize("context", [64, 65, 66, 67])
def test_a_text_may_fill_the_context(drafter, context):
    engine = Engine(TINY, device="cpu", max_batch=1, context=context, speculation=drafter)
    plain = Engine(TINY, device="cpu", max_batch=1)
    tokens = engine.tokenizer.encode(LONG)[:10]
    ((text,), (expected,)) = (e.generate([tokens], endless(context - 10)) for e in (engine, plain))
    assert text.tokens == expected.tokens and len(text.tokens) == context - 10
    assert engine.generate([tokens], endless(1))[0].tokens == expected.tokens[:1]


# ---- draft lengths ---------------------------------------------------------------------------------------------------


def test_draft_length_follows_acceptance():
    sequence = Sequence(0, [1], SamplingParams(), frozenset(), None, max_drafts=3)
    lengths = []
    for step in [(4, 4), (4, 2), (4, 1), (3, 2), (3, 1), (2, 1), (2, 1), (1, 1), (2, 2), (3, 3), (4, 4)]:
        sequence.steps.append(step)
        sequence.adapt()
        lengths.append(sequence.draft_length)
    assert lengths == [3, 2, 1, 1, 1, 1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(("right", "drafts"), [(0, 1), (4, 4)])
def test_adaptive_engine(right, drafts):
    (known,) = Engine(TINY, device="cpu", max_batch=1).generate([PROMPTS[0]], endless(80))
    options = dict(speculation=Scripted([known], right), draft_tokens=4, adaptive=True)
    (text,) = Engine(TINY, device="cpu", max_batch=1, **options).generate([PROMPTS[0]], endless(80))
    assert text.tokens == known.tokens
    assert text.draft_length == drafts
    assert {brought for brought, _ in text.steps[8:-4]} == {drafts + 1}


def test_request_without_drafts(device):
    engine = Engine(TINY, device=device, speculation="mtp", max_batch=1, **EXACT)
    (text,) = engine.generate([PROMPTS[0]], endless(20, draft_tokens=0))
    assert set(text.steps) == {(1, 1)}
    (expected,) = Engine(TINY, device=device, max_batch=1, **EXACT).generate([PROMPTS[0]], endless(20))
    assert text.tokens == expected.tokens


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # A19
        ({"speculation": "tree"}, "'tree' drafts trees, which ReplaySSM cannot verify: its records are a chain"),
        ({"speculation": "medusa"}, "'medusa' drafts trees"),
        ({"speculation": "eagle"}, "siblings would share one record; expected mtp or ngram"),
        ({"speculation": "psychic"}, "speculation is 'psychic', expected None, mtp, ngram or a Drafter"),
        ({"speculation": ""}, "speculation is ''"),
        ({"speculation": "ngram", "draft_tokens": 0}, "draft_tokens is 0, expected 1..15"),
        ({"speculation": "ngram", "draft_tokens": 16}, "draft_tokens is 16, expected 1..15"),
        ({"speculation": "ngram", "draft_tokens": 8, "window": 8}, "steps of 9 tokens do not fit into the window of 8"),
    ],
)
def test_bad_engine_options_are_refused(small, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(small, device="cpu", **options)


def test_window_fits_the_drafts(small):
    windows = [
        Engine(small, device="cpu", speculation="ngram", draft_tokens=drafts).memory.pool.config.window
        for drafts in (3, 7, 8, 15)
    ]
    assert windows == [16, 24, 24, 32]
    with pytest.warns(UserWarning, match="nearly every step flushes"):
        Engine(small, device="cpu", speculation="ngram", draft_tokens=8, window=16)


def test_bad_requests_are_refused(small):
    engine = Engine(small, device="cpu", speculation="ngram", draft_tokens=3)
    with pytest.raises(ValueError, match="draft_tokens is 4, expected at most the engine's 3"):
        engine.add_request(PROMPTS[0], SamplingParams(draft_tokens=4))
    with pytest.raises(ValueError, match="draft_tokens is 1, expected at most the engine's 0"):
        Engine(small, device="cpu").add_request(PROMPTS[0], SamplingParams(draft_tokens=1))
    with pytest.raises(ValueError, match="draft_tokens is -1"):
        SamplingParams(draft_tokens=-1)


def test_preemption_needs_replay(small):
    engine = Engine(small, device="cpu", speculation="ngram", mode="conventional")
    text = engine.add_request(PROMPTS[0], endless(20))
    for _ in range(3):
        engine.step()
    with pytest.raises(NotImplementedError, match="preempt: .* mode 'conventional' with speculation"):
        engine.preempt(text)
    drain(engine, text)
    assert text.finish_reason == "length"


class Broken(Drafter):
    def propose(self, sequence, count):
        if len(sequence.tokens) < 6:
            return []
        if sequence.prompt[0] == 5:
            raise RuntimeError("no idea")
        return [1024] if sequence.prompt[0] == 6 else []


@pytest.mark.parametrize(("first", "message"), [(5, "no idea"), (6, r"drafts: token 1024 is outside 0..1023")])
def test_broken_drafter_ends_its_requests_and_leaves_the_engine_usable(small, first, message):
    engine = Engine(small, device="cpu", max_batch=1, speculation=Broken())
    (expected,) = engine.generate([[7, 8, 9]], endless(20))
    text = engine.add_request([first, 8, 9], endless(20))
    with pytest.raises((RuntimeError, ValueError), match=message):
        drain(engine, text)
    assert text.finish_reason == "error" and text.slot is None
    assert engine.generate([[7, 8, 9]], endless(20))[0].tokens == expected.tokens


def test_broken_drafter_ends_no_other_request(small):
    engine = Engine(small, device="cpu", max_batch=3, speculation=Broken(), deterministic=True)
    alone = Engine(small, device="cpu", max_batch=1, deterministic=True)
    texts = [engine.add_request([first, 8, 9], endless(20)) for first in (7, 5, 4)]
    with pytest.raises(RuntimeError, match="no idea"):
        drain(engine, *texts)
    drain(engine, *texts)
    assert [text.finish_reason for text in texts] == ["length", "error", "length"]
    for text in texts[::2]:
        assert text.tokens == alone.generate([text.prompt], endless(20))[0].tokens


@pytest.mark.parametrize("count", ["3", None, 2.5, True])
def test_draft_tokens_are_an_int(small, count):
    with pytest.raises(TypeError, match="draft_tokens is .*, expected an int"):
        Engine(small, device="cpu", speculation="ngram", draft_tokens=count)


# ---- steps for all rows at once --------------------------------------------------------------------------------------


class EagerGraphs:
    """What StepGraphs does, but with launches instead of graphs: padded shapes, inputs in buffers, two parts."""

    def __init__(self, runner, rows, width, extra_context):
        self.runner, self.rows, self.width, self.extra_context = runner, rows, width, extra_context

    def __call__(self, rows, width, drafts, context):
        assert rows <= self.rows and width <= self.width
        self.context, self.drafts = context + self.extra_context, drafts
        return self

    def verify(self, asked):
        assert asked.shape == (self.rows, HEADER + self.width)
        self.batch = self.runner.batch_together(asked, self.context)
        self.hidden, logits = self.runner.verify(self.batch)
        return logits

    def settle(self, chosen):
        return self.runner.settle(self.batch, self.hidden, chosen, self.drafts)


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
@pytest.mark.parametrize("padding", [False, True])
def test_steps_for_all_rows_at_once_equal_steps_by_row(drafter, padding, tmp_path):
    """The decode path of CUDA graphs on the CPU, over dirty memory, in batches of texts with and without drafts."""
    raw = SMALL | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    checkpoint = write_checkpoint(tmp_path, raw)
    params = [endless(30, draft_tokens=drafts) for drafts in (3, 0, 1, 3, 2)]
    options = dict(device="cpu", max_batch=5, speculation=drafter)
    expected = Engine(checkpoint, **options).generate(PROMPTS[:5], params)
    engine = Engine(checkpoint, **options)
    runner = engine._runner
    engine.memory.pool.data.fill_(0xFF)
    engine.memory.kv.keys.fill_(float("nan"))
    engine.memory.kv.values.fill_(float("nan"))
    runner.together = True
    if drafter == "mtp":
        runner.drafter.together = True
    if padding:
        runner.graphs = EagerGraphs(runner, rows=8, width=4, extra_context=7)
    for one, other in zip(expected, engine.generate(PROMPTS[:5], params), strict=True):
        same_text(engine, one, other)
        assert one.steps == other.steps


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("mode", ["replay", "conventional"])
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_single_launches_agree(device, mode, drafter, dtype):
    texts = {}
    for graphs in (False, True):
        options = dict(mode=mode, dtype=dtype, cuda_graphs=graphs, speculation=drafter, adaptive=graphs)
        engine = Engine(TINY, device=device, max_batch=6, **options)
        params = [endless(20 + 9 * i, draft_tokens=i % 4) for i in range(len(PROMPTS))]
        texts[graphs] = engine.generate(PROMPTS, params)
        engine.memory.pool.validate()
    for one, other in zip(texts[False], texts[True], strict=True):
        same_text(engine, one, other)
