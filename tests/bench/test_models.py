# SPDX-License-Identifier: Apache-2.0
"""`bench step` and `bench serve` on a tiny model of random weights, on the CPU."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from trtllm_replayssm import SlotLayout
from trtllm_replayssm.bench.models import MODELS, RandomWeights, Subject
from trtllm_replayssm.bench.records import InvalidRun
from trtllm_replayssm.bench.serve import check_acceptance
from trtllm_replayssm.bench.step import PARTS, Step, StepBench
from trtllm_replayssm.runtime import Engine

CPU = torch.device("cpu")
TINY = Path(__file__).parents[2] / "examples" / "tiny-nemotron-h"
STEP = ("step", "--model", "tiny", "--steps", 24, "--repeats", 2, "--batches", 3, "--contexts", 16, "--no-plot")
SERVE = (
    "serve",
    "--model",
    "tiny",
    "--steps",
    8,
    "--repeats",
    2,
    "--prompt",
    5,
    "--answer",
    12,
    "--window",
    8,
    "--no-plot",
)


def test_nano4b_is_nano4b():
    config = MODELS["nano4b"]
    assert Counter(config.layers) == {"mamba": 21, "mlp": 17, "attention": 4}
    assert 3.9e9 < Subject("nano4b", CPU, "bfloat16").weight_bytes / 2 < 4.1e9


def test_random_weights_are_those_of_their_name():
    config = MODELS["tiny"]
    one, other = RandomWeights(config), RandomWeights(config)
    name = "backbone.layers.0.mixer.in_proj.weight"
    first = one.read(name, torch.bfloat16, CPU)
    assert one.read(name, torch.bfloat16, CPU) is first
    assert torch.equal(other.read(name, torch.bfloat16, CPU), first)
    assert first.float().std() == pytest.approx(config.hidden_size**-0.5, rel=0.05)
    assert not torch.equal(one.read(name.replace(".0.", ".2."), torch.bfloat16, CPU), first)


def test_step(bench):
    records, _ = bench(*STEP, "--json")
    replay, conventional = records
    assert (replay["mode"], conventional["mode"]) == ("replay", "conventional")
    assert replay["flushes_per_step"] == round(3 / replay["window"], 4) and conventional["flushes_per_step"] == 0
    for record in records:
        assert record["bench"] == "step" and record["weights"] == "random" and record["context"] == 16
        assert tuple(record["parts_us"]) == PARTS and all(us > 0 for us in record["parts_us"].values())
        assert record["tokens_per_second"] == pytest.approx(3e6 / record["us"], rel=0.01)


def test_what_is_timed_is_a_step_of_the_model():
    """Parts leave the model as it was, and a step appends a token to every slot."""
    subject = StepBench("tiny", CPU, "float32", ("fp32", "none"), 8, 8, 1).subject
    model, loader = subject.model("replay")
    memory = subject.memory(subject.replay_config(8, 1), loader.attention_layers, 2, 4, False)
    step = Step(model, memory, 4)
    layers, tiles = model.stack.layers, [mixer.tiles for _, mixer in model.stack.layers if hasattr(mixer, "tiles")]
    step.stagger(8)
    assert memory.pool.cursors().history.tolist() == [0, 1]
    step.parts(3)
    assert memory.pool.cursors().tokens.tolist() == [3, 4]
    assert model.stack.layers is layers
    assert [mixer.tiles for _, mixer in layers if hasattr(mixer, "tiles")] == tiles


def test_serve(bench, tmp_path):
    """Memory for five requests of replay holds two with snapshots; every way decodes what it says."""
    subject = Subject("tiny", CPU, "bfloat16")
    layers = subject.config.layers.count("mamba")
    state = {}
    for mode in ("replay", "snapshots"):
        layout = SlotLayout(subject.config.geometry, subject.replay_config(8, 4))
        state[mode] = layers * layout.slot_stride
        if mode == "snapshots":
            sections = layout.sections
            state[mode] = layers * (5 * sections["checkpoint"].bytes + sections["conv_ring"].bytes)
    kv = 2 * 1 * 2 * 16 * 2 * 32  # keys and values, layers, heads, head_dim, bytes, 5 + 18 + 3 tokens in blocks of 16
    memory = subject.weight_bytes + 5 * (state["replay"] + kv)
    output = tmp_path / "serve.json"
    records, _ = bench(
        *SERVE[:-1], "--batches", 6, "--memory", f"{memory / 1e3}KB", "--output", output, "--json", "--modes", "replay",
        "snapshots", "standard", "standard_replay",
    )  # fmt: skip
    replay, snapshots, standard, _ = records
    fits = 5 * (state["replay"] + kv) // (state["snapshots"] + kv)
    assert (replay["concurrency"], snapshots["concurrency"]) == (5, fits) and fits < 5
    for record in (replay, snapshots):
        assert record["bytes_per_request"] == {"mamba": state[record["mode"]], "kv": kv}
        assert record["drafts"] == "simulated, at no cost" and record["acceptance"] == 0.8
        assert 1.5 < record["tokens_per_row_and_step"] < 4  # of as few as 16, around 2.95
        assert record["flushes_per_row_and_step"] > 0 or record["mode"] == "snapshots"
    assert standard["tokens_per_row_and_step"] == 1 and standard["drafts"] is None
    for record in records:
        assert record["bench"] == "serve" and record["tokens_per_second"] > 0
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_conventional_states_of_16_bits(bench):
    """Half the bytes of a state, wherever it lies; mode replay keeps its own format."""
    (replay, conventional) = bench(*STEP, "--conventional-state", "fp16", "--json")[0]
    assert (replay["checkpoint"], conventional["checkpoint"]) == ("fp32", "fp16")
    more = (*SERVE, "--batches", 2, "--modes", "snapshots", "--json")
    (whole,), (half,) = bench(*more)[0], bench(*more, "--conventional-state", "fp16")[0]
    assert (whole["checkpoint"], half["checkpoint"]) == ("fp32", "fp16")
    subject = Subject("tiny", CPU, "bfloat16")
    conv = SlotLayout(subject.config.geometry, subject.replay_config(8, 4)).sections["conv_ring"].bytes
    conv *= subject.config.layers.count("mamba")
    assert whole["bytes_per_request"]["mamba"] - conv == 2 * (half["bytes_per_request"]["mamba"] - conv)


def test_serve_with_a_checkpoint_and_its_head(bench):
    """Drafts by the MTP head, verified by the model; bytes as the engine counts them."""
    (record,) = bench(*SERVE, "--model", TINY, "--batches", 2, "--modes", "snapshots", "--json")[0]
    assert (record["model"], record["weights"], record["drafts"]) == (TINY.name, "checkpoint", "MTP head")
    assert record["acceptance"] is None and 1 <= record["tokens_per_row_and_step"] <= 4
    engine = Engine(TINY, device="cpu", dtype="bfloat16", mode="conventional", speculation="mtp", max_batch=1)
    assert record["bytes_per_request"]["mamba"] == engine.memory_per_request("conventional")


def test_acceptance_that_was_not_simulated_is_refused():
    steps = Counter({(4, 1): 200, (4, 2): 160, (4, 3): 128, (4, 4): 512})  # of 1000: 0.8, 0.64, 0.512 go further
    check_acceptance(steps, 0.8)
    with pytest.raises(InvalidRun, match="1.952 drafts were accepted a step, the simulation's chance gives 1.533"):
        check_acceptance(steps, 0.7)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((*STEP, "--model", "mega"), "model is 'mega', expected nano4b, tiny or a checkpoint directory"),
        ((*STEP, "--contexts", "0"), "context is 0"),
        ((*SERVE, "--modes", "fast"), "unknown 'fast', expected some of replay snapshots standard"),
        ((*SERVE, "--acceptance", "2"), "acceptance is 2.0, expected 0..1"),
        ((*SERVE, "--draft-tokens", "0"), "draft_tokens is 0, expected 1..15"),
        ((*SERVE, "--memory", "12"), "expected a number of KB, MB or GB"),
        ((*SERVE, "--memory", "1KB"), "memory is 1000 bytes, expected at least"),
        ((*SERVE, "--answer", "7"), "answer is 7, expected at least 8"),
    ],
)
def test_bad_options(bench, arguments, message):
    assert message in bench(*arguments, code=2)[1]
