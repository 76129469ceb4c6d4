# SPDX-License-Identifier: Apache-2.0
"""Engine folders served by the runtime's scheduler, their graphs run on the CPU: the embedded runtime's tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trtllm_replayssm import ops, self_test
from trtllm_replayssm.builder import EngineConfig, assembly, build
from trtllm_replayssm.builder.engine_config import STATE_IO
from trtllm_replayssm.runtime import Engine, EngineRunner, ExecutorError, SamplingParams, engine_runner
from trtllm_replayssm.runtime.executor import Executor, Outputs
from trtllm_replayssm.runtime.graph_memory import GraphMemory
from trtllm_replayssm.runtime.memory import StateLost
from trtllm_replayssm.runtime.reference_executor import ReferenceExecutor
from trtllm_replayssm.runtime.tensorrt_executor import TensorRTExecutor

from .conftest import GPU, SMALL, TINY, same_text, write_checkpoint
from .drafters import Scripted
from .prompts import PROMPTS

CONFIG = EngineConfig(
    max_batch=3,
    max_seq_len=160,
    draft_tokens=3,
    max_prefill_tokens=16,
    window=8,
    dtype="float32",
    state_io="same_pointer",
)
LIKE_IT = dict(device="cpu", max_batch=3, context=160, prefill_chunk=16, window=8)
FEW = SamplingParams(max_tokens=30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes an engine folder of the shipped checkpoint, without plans, once for each change of CONFIG."""
    made = {}

    def make(**change):
        config = replace(CONFIG, **change)
        if config not in made:
            made[config] = tmp_path_factory.mktemp("built") / "engine"
            build(TINY, made[config], config, plans=False)
        return made[config]

    return make


def runner(folder, **more):
    return EngineRunner(folder, executor="reference", **more)


def embedded(dtype="float32", **more):
    return Engine(TINY, dtype=dtype, **LIKE_IT, **more)


def tokens_of(sequences):
    return [(text.tokens, text.text, text.finish_reason, text.steps) for text in sequences]


def test_ops_that_give_wrong_numbers_are_refused(folders, monkeypatch):
    """A29."""
    step = ops.step
    monkeypatch.setattr(ops, "step", lambda *arguments: step(*arguments) * (1 + 2e-5))
    self_test.require.cache_clear()
    with pytest.raises(self_test.SelfTestError, match="self-test on the CPU: step has a relative error"):
        runner(folders())


# ---- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state_io, speculation",
    [("same_pointer", None), ("same_pointer", "ngram"), *((io, "mtp") for io in STATE_IO)],
)
def test_same_tokens(folders, state_io, speculation):
    """Six prompts in three slots, in chunks, so that slots are used again: greedy texts, their drafts, and what was
    moved."""
    engine = runner(folders(state_io=state_io), speculation=speculation)
    reference = embedded(speculation=speculation)
    given, expected = (e.generate(PROMPTS[:6], FEW) for e in (engine, reference))
    assert tokens_of(given) == tokens_of(expected)
    if speculation:
        assert engine.statistics()["acceptance"].accepted > 5
    for name, value in reference.statistics().items():
        assert "seconds" in name or engine.statistics()[name] == value, name
    assert engine.statistics()["decode_traffic"].flushes > 10


def test_sampled_texts(folders):
    """Random numbers go by seed and position, with drafts and without; a request may ask for fewer."""
    params = [
        SamplingParams(max_tokens=20, temperature=0.8, top_k=40, top_p=0.95, seed=seed, draft_tokens=seed % 4)
        for seed in range(4)
    ]
    (plain, drafted), reference = (runner(folders(), speculation=s) for s in (None, "mtp")), embedded()
    expected = reference.generate(PROMPTS[:4], [replace(p, draft_tokens=None) for p in params])
    assert [t.tokens for t in drafted.generate(PROMPTS[:4], params)] == [t.tokens for t in expected]
    own = [replace(p, draft_tokens=0) for p in params]
    assert [t.tokens for t in plain.generate(PROMPTS[:4], own)] == [t.tokens for t in expected]


@pytest.mark.parametrize("speculation", [None, "mtp"])
def test_shipped_dtype(folders, speculation):
    """In bf16 logits are rounded, as TensorRT's products are: texts part where the best two are neighbours only."""
    engine = runner(folders(dtype="bfloat16", state_io="alias"), speculation=speculation)
    reference = embedded("bfloat16", speculation=speculation)
    pairs = zip(engine.generate(PROMPTS[:4], FEW), reference.generate(PROMPTS[:4], FEW), strict=True)
    for given, expected in pairs:
        same_text(reference, given, expected, neighbours=True)


@pytest.mark.parametrize("formats", [("fp16_sr", "none"), ("fp8_sr", "nvfp4"), ("fp32", "e2m2")])
def test_formats(folders, formats):
    """Stochastic rounding goes by request: the streams are the embedded runtime's. A sum in another order may still
    round a state to a neighbour."""
    checkpoint, read_copy = formats
    engine = runner(folders(checkpoint_format=checkpoint, read_copy=read_copy), speculation="mtp")
    reference = embedded(speculation="mtp", checkpoint_format=checkpoint, read_copy=read_copy)
    pairs = zip(engine.generate(PROMPTS[:3], FEW), reference.generate(PROMPTS[:3], FEW), strict=True)
    assert torch.equal(engine.memory.pool.cursors().stream, reference.memory.pool.cursors().stream)
    for given, expected in pairs:
        same_text(reference, given, expected, margin=0.02)


def test_without_attention(tmp_path):
    """A graph that has no KV cache, and no positions."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SMALL | {"hybrid_override_pattern": "M-ME-M"})
    build(checkpoint, tmp_path / "engine", replace(CONFIG, draft_tokens=0), plans=False)
    given = runner(tmp_path / "engine").generate(PROMPTS[:4], FEW)
    expected = Engine(checkpoint, dtype="float32", **LIKE_IT).generate(PROMPTS[:4], FEW)
    assert [text.tokens for text in given] == [text.tokens for text in expected]


def test_stream_and_cancel(folders):
    engine, reference = runner(folders(), speculation="mtp"), embedded(speculation="mtp")
    expected = list(reference.stream(PROMPTS[0], FEW))
    assert list(engine.stream(PROMPTS[0], FEW)) == expected
    stream = engine.stream(PROMPTS[1], FEW)
    assert next(stream) == next(reference.stream(PROMPTS[1], FEW))
    stream.close()
    assert list(engine.stream(PROMPTS[0], FEW)) == expected


def test_drafts_of_others(folders):
    """A Drafter that knows the text: every step brings four tokens."""
    (expected,) = embedded().generate(PROMPTS[:1], FEW)
    engine = runner(folders(), speculation=Scripted([expected], 3))
    (given,) = engine.generate(PROMPTS[:1], FEW)
    assert given.tokens == expected.tokens and given.acceptance.tokens_per_step > 3


def test_adaptive_drafts(folders):
    engine, reference = runner(folders(), speculation="mtp", adaptive=True), embedded(speculation="mtp", adaptive=True)
    assert tokens_of(engine.generate(PROMPTS[:5], FEW)) == tokens_of(reference.generate(PROMPTS[:5], FEW))


def test_scores(folders):
    engine, reference = runner(folders()), embedded()
    tokens = reference.tokenizer.encode(" ".join(PROMPTS))[:50]
    given, expected = engine.logits(tokens), reference.logits(tokens)
    assert given.shape == expected.shape == (50, 1024)
    assert float((given - expected).norm() / expected.norm()) < 1e-5
    assert tokens_of(engine.generate(PROMPTS[:4], FEW)) == tokens_of(reference.generate(PROMPTS[:4], FEW))


# ---- pre-emption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 3, 9])
def test_preemption(folders, passes):
    """In its prompt of two chunks, after it, and with a step outstanding: it goes on in another slot."""
    engine = runner(folders(), speculation="mtp")
    prompt = engine.tokenizer.encode(" ".join(PROMPTS[:2]))[:24]
    (expected,) = engine.generate([prompt], FEW)
    text = engine.add_request(prompt, FEW)
    for _ in range(passes):
        engine.step()
    before = text.slot
    engine.preempt(text)
    others = [engine.add_request(p, FEW) for p in PROMPTS[2:5]]
    while text.finish_reason is None:
        engine.step()
        assert text.slot != before or others[0].finish_reason
    assert (text.tokens, text.steps) == (expected.tokens, expected.steps)


# ---- lost states -----------------------------------------------------------------------------------------------------


class Failing:
    """An executor whose runs of the model fail, before or after the work, where `when` says so."""

    def __init__(self, inner, when, after=True):
        self.inner, self.when, self.after, self.runs = inner, when, after, 0

    def run(self, graph, row, inputs):
        self.runs += graph == "model"
        fails = graph == "model" and self.when(self.runs, row)
        if fails and not self.after:
            raise RuntimeError("launch failed")
        outputs = self.inner.run(graph, row, inputs)
        if fails:
            self.inner._memory.pool._error[0] = 1  # which nobody reads
            raise RuntimeError("launch failed")
        return outputs


@pytest.mark.parametrize("speculation", [None, "mtp"])
@pytest.mark.parametrize("after", [True, False])
def test_failed_executions(folders, speculation, after):
    """A prompt chunk's and two steps': all sequences of the batch are prefilled anew, and their texts stay the same."""
    engine = runner(folders(), speculation=speculation)
    expected = engine.generate(PROMPTS[:5], FEW)
    engine._runner.executor = failing = Failing(engine._runner.executor, lambda run, row: run in (2, 9, 20), after)
    given = engine.generate(PROMPTS[:5], FEW)
    assert failing.runs > 20
    assert [(t.tokens, t.finish_reason) for t in given] == [(t.tokens, t.finish_reason) for t in expected]


def test_execution_that_keeps_failing(folders):
    """The sequences of its batch end, whoever waits goes on."""
    engine, prompts = runner(folders()), ["So", "Woe unto", "Thou shalt not", "Behold, I"]
    expected = engine.generate(prompts, FEW)
    engine._runner.executor = Failing(engine._runner.executor, lambda run, row: run <= 2)
    texts = [engine.add_request(prompt, FEW) for prompt in prompts]
    with pytest.raises(StateLost, match="an execution failed: RuntimeError: launch failed"):
        while True:
            engine.step()
    while texts[3].finish_reason is None:
        engine.step()
    assert [t.finish_reason for t in texts] == ["error"] * 3 + [expected[3].finish_reason]
    assert texts[3].tokens == expected[3].tokens


def spoil(engine, slot):
    """NaN in the checkpoint of a slot, as the device may find it at a flush."""
    pool = engine.memory.pool
    section = pool.layout.sections["checkpoint"]
    values = pool.data[0, slot, section.offset : section.offset + section.bytes].view(torch.float32)
    values.fill_(float("nan"))


def test_bad_rows(folders):
    """A state that is no longer finite stands in the status word: its batch is prefilled anew, and the texts stay."""
    engine = runner(folders(), speculation="mtp")
    expected = engine.generate(PROMPTS[:5], FEW)
    texts = [engine.add_request(prompt, FEW) for prompt in PROMPTS[:5]]
    while min(len(text.tokens) for text in texts[:3]) < 12:
        engine.step()
    chunks = engine.statistics()["prefill_steps"]
    assert int(engine.memory.pool.cursors([texts[1].slot]).writes[0]) > 0
    spoil(engine, texts[1].slot)
    while any(text.finish_reason is None for text in texts):
        engine.step()
    assert [text.tokens for text in texts] == [text.tokens for text in expected]
    assert any(text.lost_at for text in texts[:3]) and engine.statistics()["prefill_steps"] > chunks + 3


def test_row_that_stays_bad(folders):
    """The one that the status word names ends with an error, the others of its batch go on."""
    engine = runner(folders())
    expected = engine.generate(PROMPTS[:3], FEW)
    texts = [engine.add_request(prompt, FEW) for prompt in PROMPTS[:3]]
    while len(texts[2].tokens) < 9:
        engine.step()
    culprit, pool = texts[1], engine.memory.pool

    class Finding(Failing):
        """Puts an error of the culprit's row into the word."""

        def run(self, graph, row, inputs):
            outputs = super().run(graph, row, inputs)
            if graph == "model" and culprit.slot in inputs["slots"].tolist():
                pool._error[:2] = torch.tensor([1, culprit.slot if row is None else 0])
            return outputs

    engine._runner.executor = Finding(engine._runner.executor, lambda run, row: False)
    with pytest.raises(StateLost):
        while any(text.finish_reason is None for text in texts):
            engine.step()
    while any(text.finish_reason is None for text in texts):
        engine.step()
    assert culprit.finish_reason == "error" and len(culprit.tokens) < 30
    for text, whole in ((texts[0], expected[0]), (texts[2], expected[2])):
        assert (text.tokens, text.finish_reason) == (whole.tokens, whole.finish_reason)


# ---- memory on a GPU -------------------------------------------------------------------------------------------------


class ThroughHost:
    """The reference executor for memory on a GPU, by way of a copy on the host."""

    def __init__(self, folder, made, memory):
        self.memory, self.copy = memory, GraphMemory(made, torch.float32, torch.device("cpu"))
        self.inner = ReferenceExecutor(folder, made, self.copy)

    def pairs(self):
        yield self.memory.pool.table, self.copy.pool.table
        yield self.memory.pool.data, self.copy.pool.data
        for graph, caches in self.memory.caches.items():
            yield from ((cache, self.copy.caches[graph][name]) for name, cache in caches.items())

    def run(self, graph, row, inputs):
        for there, here in self.pairs():
            here.copy_(there)
        outputs = self.inner.run(graph, row, {name: values.cpu() for name, values in inputs.items()})
        for there, here in self.pairs():
            there.copy_(here)
        return Outputs(*(values.to(self.memory.pool.device) for values in outputs))


@pytest.mark.parametrize("device", [GPU])
def test_memory_on_a_gpu(folders, monkeypatch, device):
    """Passes, pre-emption and a state that goes bad, all but the graphs on the device. No plugin is loaded."""
    monkeypatch.setattr(assembly, "_plugin_library", lambda: Path(__file__))  # TensorRT's headers may be missing here
    folder = folders(seed=1)
    expected = runner(folder, speculation="mtp").generate(PROMPTS[:5], FEW)

    def executor(name, folder, made):
        return lambda memory: ThroughHost(folder, made, memory), torch.device(device)

    monkeypatch.setattr(engine_runner, "_executor", executor)
    engine = EngineRunner(folder, speculation="mtp")
    assert engine.memory.pool.table.is_cuda
    assert tokens_of(engine.generate(PROMPTS[:5], FEW)) == tokens_of(expected)
    texts = [engine.add_request(prompt, FEW) for prompt in PROMPTS[:5]]
    while min(len(text.tokens) for text in texts[:3]) < 6:
        engine.step()
    engine.preempt(texts[0])
    while min(len(text.tokens) for text in texts[1:3]) < 12:
        engine.step()
    spoil(engine, texts[1].slot)
    while any(text.finish_reason is None for text in texts):
        engine.step()
    assert [text.tokens for text in texts] == [text.tokens for text in expected]
    assert texts[1].lost_at and engine.statistics()["decode_traffic"].flushes > 10


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_refused_arguments(folders, tmp_path):
    folder = folders()
    for more, message in (
        ({"executor": "onnx"}, "executor is 'onnx', expected one of tensorrt, reference"),
        ({"speculation": "medusa"}, "speculation is 'medusa', expected None, mtp, ngram or a Drafter"),
        ({"speculation": "mtp", "draft_tokens": 4}, "draft_tokens is 4, expected 1..3, what the engine was built for"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineRunner(folder, **{"executor": "reference", **more})
    with pytest.raises(TypeError, match="draft_tokens is 2.0, expected an int"):
        runner(folder, speculation="mtp", draft_tokens=2.0)
    with pytest.raises(ValueError, match="built for steps of one token; build it with --draft-tokens"):
        runner(folders(draft_tokens=0), speculation="ngram")
    headless = write_checkpoint(tmp_path / "headless", SMALL | {"num_nextn_predict_layers": 0})
    build(headless, tmp_path / "engine", CONFIG, plans=False)
    with pytest.raises(ValueError, match="the engine has no MTP graph; 'ngram' needs none"):
        runner(tmp_path / "engine", speculation="mtp")


def test_folder_without_plans(folders):
    with pytest.raises(ExecutorError, match="has no plans: sh .*build-on-gpu.sh NEW_FOLDER makes them"):
        EngineRunner(folders())


def test_executors_have_one_interface():
    for kind in (ReferenceExecutor, TensorRTExecutor):
        assert kind.run.__annotations__ == Executor.run.__annotations__
