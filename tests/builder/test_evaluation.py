# SPDX-License-Identifier: Apache-2.0
"""Exported graphs evaluated on the CPU against the embedded runtime: the same tokens give the same logits."""

import random
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from trtllm_replayssm import SlotLayout
from trtllm_replayssm.builder.decoder import MODEL, MTP, export
from trtllm_replayssm.builder.engine_config import EngineConfig, Pool
from trtllm_replayssm.runtime import Engine
from trtllm_replayssm.runtime.batch import Batch, Grid, Row

from ..runtime.conftest import SMALL, TINY, relative_error, write_checkpoint
from .graph_run import NEW_SEQUENCE, GraphRun

ROWS, DRAFTS, WINDOW, LENGTH = 3, 3, 8, 400
CONFIG = EngineConfig(
    max_batch=ROWS, max_seq_len=LENGTH, draft_tokens=DRAFTS, max_prefill_tokens=32, window=WINDOW, dtype="float32"
)
VOCABULARY = 1024


@dataclass
class Sequence:
    slot: int
    length: int = 0


class SideBySide:
    """Sequences of random tokens in a graph and in the embedded runtime, whose slot numbers differ."""

    def __init__(self, folder, config, checkpoint=TINY, reference=None):
        model, pool = export(checkpoint, folder, config)
        self.config, self.random = config, random.Random(0)
        self.run = GraphRun(folder / MODEL, pool, config)
        self.engine = Engine(
            reference or checkpoint,
            device="cpu",
            dtype=config.dtype,
            max_batch=ROWS,
            context=LENGTH,
            window=config.window,
            checkpoint_format=config.checkpoint_format,
            read_copy=config.read_copy,
            speculation="mtp" if config.draft_tokens else None,
            draft_tokens=config.draft_tokens or 3,
        )
        self.rows: list[Sequence | None] = [None] * config.max_batch
        self.free = list(range(config.max_batch))
        self.worst = 0.0

    def tokens(self, count):
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def compare(self, given, hidden, logits):
        for name, expected in (("logits", logits), ("hidden_states", hidden)):
            values = torch.from_numpy(given[name])
            assert torch.isfinite(values).all()
            self.worst = max(self.worst, relative_error(values, expected.float()))

    def begin(self, row, chunks):
        """A new sequence in an idle row, its prompt in chunks of so many tokens."""
        sequence = Sequence(self.free.pop(self.random.randrange(len(self.free))))
        runner, memory = self.engine._runner, self.engine.memory
        self.run.accepted[sequence.slot] = NEW_SEQUENCE
        memory.reset(sequence.slot, 0)
        for count in chunks:
            tokens = self.tokens(count)
            width = max(count, self.config.step_tokens + 1)
            (given,) = self.run([row], [tokens], [sequence.length], [sequence.slot], width)
            self.run.accepted[sequence.slot] = 0
            batch = runner._batch_by_row([Row(sequence.slot, sequence.length, count)], tokens, is_prompt=True)
            hidden = runner._fold(batch)
            self.compare(given, hidden, self.engine.model.logits(hidden))
            sequence.length += count
        self.rows[row] = sequence

    def end(self, row):
        self.free.append(self.rows[row].slot)
        self.rows[row] = None

    def swap_rows(self, one, other):
        """Two sequences change rows, and take their keys and values along; their slots stay."""
        for values in self.run.caches.values():
            values[[one, other]] = values[[other, one]]
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    def step(self, width):
        """Up to `width` tokens a row, of which a random number stays; some rows pause. Whether not all do."""
        runner, pool = self.engine._runner, self.engine.memory.pool
        live = [row for row, s in enumerate(self.rows) if s is not None and self.random.random() < 0.85]
        if not live:
            return False
        tokens = [self.tokens(self.random.randint(1, width)) if row in live else [] for row in range(len(self.rows))]
        positions = [s.length if s else 0 for s in self.rows]
        slots = [self.rows[row].slot if row in live else -1 for row in range(len(self.rows))]
        given = self.run(list(range(len(self.rows))), tokens, positions, slots, width)
        parts = [Row(slots[row], positions[row], len(tokens[row])) for row in live]
        batch = runner._batch_by_row(parts, [token for row in live for token in tokens[row]], is_prompt=False)
        hidden, logits = runner.verify(batch)
        accepted = [len(tokens[row]) if width == 1 else self.random.randint(0, len(tokens[row])) for row in live]
        pool.commit(batch.plan, accepted)
        first = 0
        for row, kept in zip(live, accepted, strict=True):
            end = first + len(tokens[row])
            self.compare(given[row], hidden[first:end], logits[first:end])
            self.rows[row].length += kept
            self.run.accepted[slots[row]] = kept
            first = end
        return True

    def work(self, steps, width):
        while steps:
            event = self.random.random()
            row = self.random.randrange(len(self.rows))
            if self.rows[row] is None:
                if event < 0.5:
                    self.begin(row, [self.random.randint(1, 12)])
            elif event < 0.06:
                self.end(row)
            elif event < 0.2:
                self.swap_rows(row, self.random.randrange(len(self.rows)))
            steps -= self.step(width)


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("bfloat16", 0.02)])
def test_prefill_steps_and_verification(tmp_path, dtype, limit):
    """Prompts in chunks, 64 steps, 64 verifications of which a random part is accepted. Sequences come and go, pause,
    change rows, and have slots other than their rows. What the graph leaves undefined is NaN."""
    pair = SideBySide(tmp_path, replace(CONFIG, dtype=dtype))
    for row, chunks in enumerate(([20, 2, 7], [5], [32])):
        pair.begin(row, chunks)
    pair.work(64, 1)
    pair.work(64, CONFIG.step_tokens)
    assert pair.engine.memory.pool.stats()["flushes"] > 20
    assert pair.worst < limit


def test_x_and_B_of_steps_are_records(tmp_path):
    """A layer's convolution gives x, B and C of a prompt's tokens, C alone of a step's: x and B are in the rings."""
    _, pool = export(TINY, tmp_path, CONFIG)
    geometry, layout = pool.geometry, SlotLayout(pool.geometry, pool.replay)
    model = onnx.load(tmp_path / MODEL)
    name = next(node.output[0] for node in model.graph.node if node.op_type == "ReplayCausalConv")
    model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    run, convolved = GraphRun(model, pool, CONFIG), []
    graph = run.graph
    run.graph = lambda **given: convolved.append((outputs := graph(**given))[name]) or outputs
    first = layout.ring_rows - 1  # the second token's record lies in ring row 0
    run([0], [[5] * first], [0], [1])
    run.accepted[1] = 0
    run([0], [[6, 7]], [first], [1], CONFIG.step_tokens)
    run([0], [[5] * first + [6, 7]], [0], [2])
    _, step, prompt = (tokens[0] for tokens in convolved)
    C = geometry.num_groups * geometry.state_dim
    x, B = np.split(prompt[first:, :-C], [geometry.num_heads * geometry.head_dim], axis=1)
    assert np.isnan(step[:, :-C]).all()
    np.testing.assert_allclose(step[:2, -C:], prompt[first:, -C:], rtol=1e-5)
    sections = layout.unpack(run.state["state.0"].view(np.uint8)[1])
    for ring, expected in (("x_ring", x), ("b_ring", B)):
        records = np.swapaxes(sections[ring], 0, 1)[[first, 0]]  # [tokens, groups, ...]
        np.testing.assert_allclose(records.reshape(expected.shape), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "change", [{"state_io": "same_pointer"}, {"state_io": "host_pointer"}, {"trt_attention": True}]
)
def test_other_graphs(tmp_path, change):
    """State in place; TensorRT's own attention node, as its documentation has it."""
    pair = SideBySide(tmp_path, replace(CONFIG, **change))
    for row, chunks in enumerate(([20, 2], [5])):
        pair.begin(row, chunks)
    pair.work(20, CONFIG.step_tokens)
    assert pair.worst < 1e-5


@pytest.mark.parametrize(
    "checkpoint, read_copy, limit", [("fp16_sr", "none", 6e-5), ("fp8_sr", "none", 2e-3), ("fp32", "nvfp4", 4e-3)]
)
def test_formats(tmp_path, checkpoint, read_copy, limit):
    """A state whose last bit differs may round to a neighbour. Another seed gives 1.6e-4 and 2e-2."""
    pair = SideBySide(tmp_path, replace(CONFIG, checkpoint_format=checkpoint, read_copy=read_copy))
    for row, chunks in enumerate(([20, 2], [5])):
        pair.begin(row, chunks)
    pair.work(20, CONFIG.step_tokens)
    assert pair.worst < limit


VARIANTS = {
    "plain": {},
    "biases": {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "time_step_limit": [0.01, 0.1]},
    "one_group": {"n_groups": 1, "tie_word_embeddings": True},
    "latent_experts": {"moe_latent_size": 40, "norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "expert_groups": {"n_group": 3, "topk_group": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(tmp_path, variant):
    """What checkpoints may ask for: random ones with every kind of layer, without drafts."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SMALL | VARIANTS[variant])
    pair = SideBySide(tmp_path, replace(CONFIG, draft_tokens=0), checkpoint=checkpoint)
    for row, chunks in enumerate(([20, 2], [5])):
        pair.begin(row, chunks)
    pair.work(10, 1)
    assert pair.worst < 1e-5


def test_mtp_head(tmp_path):
    """The second graph, with a KV cache of its own."""
    pair = SideBySide(tmp_path, CONFIG)
    head = GraphRun(tmp_path / MTP, Pool.of(pair.engine.config.geometry, CONFIG, 0), CONFIG)
    drafter, memory = pair.engine._drafter, pair.engine.memory
    lengths, hidden_size = [0] * ROWS, pair.engine.config.hidden_size
    random = torch.Generator().manual_seed(0)
    for rows, width in (([0], 9), ([2], 5), ([0, 1, 2], 1), ([0, 1, 2], 4), ([0, 1, 2], 4), ([0, 1, 2], 1)):
        counts = [pair.random.randint(1, width) if width < 5 else width for _ in rows]
        tokens = [pair.tokens(count) for count in counts]
        hidden = torch.randn(len(rows), width, hidden_size, generator=random)
        positions = [lengths[row] for row in rows]
        given = head(rows, tokens, positions, width=width, hidden=hidden.numpy())
        for index, row in enumerate(rows):
            place = Row(row, lengths[row], counts[index])
            at = torch.arange(place.start, place.start + place.count)
            slots = torch.full_like(at, row)
            grid = Grid.of(torch.tensor([place.count]), place.count, torch.arange(place.count))
            end = place.start + place.count
            batch = Batch(None, torch.tensor(tokens[index]), at, slots, end, grid, on_host=[place])
            expected = drafter(batch, hidden[index, : place.count], memory)
            pair.compare(given[index], expected, pair.engine.model.logits(expected))
            lengths[row] += place.count - (pair.random.random() < 0.3)  # the last one was not accepted
    assert pair.worst < 1e-5
