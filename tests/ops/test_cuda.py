# SPDX-License-Identifier: Apache-2.0
"""What only CUDA has: graphs captured at the very first call, no synchronisation, streams, offsets beyond 32 bits."""

import itertools
import subprocess
import sys
from functools import partial

import numpy as np
import oracle
import pytest
import torch
from mixer import SUPER, SUPER_TP8, Mixer, Stack, Weights, array, random_tokens, recur, same_bits, zero_state

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops
from trtllm_replayssm.plan import STEPPED, Plan

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here; on a GPU machine run scripts/gpu/test.sh", allow_module_level=True)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CONFIG = ReplayConfig(window=16, max_step_tokens=4)


class CapturedStep:
    """A whole step (plan, two mixers, commit) of `rows` rows in one CUDA graph over static inputs."""

    def __init__(self, stack, pool, rows, count, mix):
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device=CUDA)
        self.accepted = torch.zeros(rows, dtype=torch.int32, device=CUDA)
        self.counts = torch.full((rows,), count, dtype=torch.int32, device=CUDA)
        self.tape = stack.tape(0, rows * count)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            plan = pool.plan(self.slots, self.counts)
            self.outputs = [mix(mixer, pool, layer, plan, *self.tape) for layer, mixer in enumerate(stack.mixers)]
            pool.commit(plan, self.accepted)

    def __call__(self, slots, tape, accepted, counts):
        self.slots.copy_(torch.tensor(slots))
        self.accepted.copy_(torch.tensor(accepted))
        self.counts.copy_(torch.tensor(counts))
        for static, given in zip(self.tape, tape, strict=True):
            static[: len(given)] = given
        self.graph.replay()
        return torch.stack(self.outputs).clone()


@pytest.mark.parametrize(
    "geometry, activation",
    [
        (SUPER_TP8, "bf16"),
        (MambaGeometry(12, 80, 1, 128), "fp16"),
        (MambaGeometry(4, 24, 2, 64), "fp32"),
    ],
)
@pytest.mark.parametrize("mix", [partial(Mixer.__call__, op=ops.step), Mixer.by_records], ids=["tensors", "records"])
def test_one_graph_for_every_phase_of_the_window(geometry, activation, mix):
    """A05, A15, A21: one capture, replayed with other slots, counts and cursors, equals eager."""
    stack = Stack(geometry, ReplayConfig(window=16, max_step_tokens=4, activation=activation), device=CUDA)
    eager, graphed = stack.pool(12), stack.pool(12)
    for pool in (eager, graphed):
        pool.reset(list(range(12)))
        for slot in range(12):
            stack.run(pool, slot, tuple(t[: 7 + slot] for t in stack.tape(slot, 30)))
    captured = CapturedStep(stack, graphed, rows=8, count=4, mix=mix)
    rng = np.random.default_rng(0)
    for cycle in range(60):
        slots = rng.permutation(12)[:8]
        slots[rng.random(8) < 0.2] = -1
        counts = rng.integers(0, 5, 8)
        accepted = rng.integers(0, counts + 1)
        tape = stack.tape(100 + cycle, int(counts.sum()))
        chunks = list(zip(*(tensor.split(counts.tolist()) for tensor in tape), strict=True))
        expected = torch.cat(stack.cycle(eager, slots.tolist(), chunks, accepted.tolist()), dim=1)
        outputs = captured(slots.tolist(), tape, accepted.tolist(), counts.tolist())
        graphed.validate()
        assert same_bits(outputs[:, : int(counts.sum())], expected), cycle
        assert all(map(torch.equal, eager.cursors(), graphed.cursors()))
    assert same_bits(eager.data, graphed.data)
    assert eager.stats() == graphed.stats() and eager.stats()["flushes"] > 20


FIRST_CALL = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from mixer import SUPER_TP8, Stack, same_bits
from trtllm_replayssm import MambaGeometry, ReplayConfig, ops
geometry = SUPER_TP8 if sys.argv[2] == "tuned" else MambaGeometry(4, 24, 2, 64)
stack = Stack(geometry, ReplayConfig(window=4, max_step_tokens=2), num_layers=1, device="cuda")
pool, twin = stack.pool(2), stack.pool(2)
slots = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
long, short = stack.tape(1, 20), stack.tape(2, 4)
streams = torch.tensor([7, 8], device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    pool.reset(slots, streams)
    outputs = []
    for op, tape, count in ((ops.prefill, long, 10), (ops.step, short, 2), (ops.step, short, 2), (ops.step, short, 2)):
        plan = pool.plan(slots, count)
        outputs.append(stack.mixers[0](pool, 0, plan, *tape, op))
        pool.commit(plan)
    state = pool.materialize(0, slots)
graph.replay()
twin.reset(slots, streams)
for (op, tape, count), graphed in zip(
    ((ops.prefill, long, 10), (ops.step, short, 2), (ops.step, short, 2), (ops.step, short, 2)), outputs, strict=True
):
    plan = twin.plan(slots, count)
    assert same_bits(stack.mixers[0](twin, 0, plan, *tape, op), graphed)
    twin.commit(plan)
assert twin.stats()["flushes"] == pool.stats()["flushes"] == 2
assert same_bits(twin.materialize(0, slots)[0], state[0])
pool.validate()
print("captured")
"""


@pytest.mark.parametrize("kernels", ["tuned", "generic"])
def test_capture_as_the_very_first_call(kernels, pytestconfig, tmp_path):
    """A35: in a fresh process, no op ran before the capture."""
    arguments = [sys.executable, "-c", FIRST_CALL, str(pytestconfig.rootpath / "tests"), kernels]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "captured"


def test_no_op_synchronises():
    stack = Stack(SUPER_TP8, CONFIG, device=CUDA)
    pool = stack.pool(4)
    tape, slots = stack.tape(1, 8), torch.tensor([1, 3], dtype=torch.int32, device=CUDA)
    accepted = torch.tensor([4, 2], dtype=torch.int32, device=CUDA)
    pool.reset(slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for op in (ops.prefill, ops.step, ops.step):
            plan = pool.plan(slots, 4)
            for layer, mixer in enumerate(stack.mixers):
                mixer(pool, layer, plan, *tape, op)
            pool.commit(plan, None if op is ops.prefill else accepted)
        pool.copy(slots[:1], slots[:1] - 1)
        for layer, saved in enumerate([pool.materialize(layer, slots) for layer in range(2)]):
            pool.restore(layer, slots, *saved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pool.validate()
    assert pool.cursors([0, 1, 3]).tokens.tolist() == [12, 3, 3]


def test_host_values_are_refused_during_capture():
    pool = StatePool(SUPER_TP8, CONFIG, 4, 1, CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="slots: expected an torch.int32 tensor on cuda"):
        pool.plan([0, 1])
    assert not pool.table.any()


def test_ops_run_on_the_current_stream():
    """Interleaved steps of two pools on two streams equal those on one."""
    stack = Stack(SUPER_TP8, CONFIG, device=CUDA)
    pools = [stack.pool(2) for _ in range(3)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    tapes = [stack.tape(seed, 100) for seed in (1, 2)]
    for pool in pools:
        pool.reset([0, 1])
    expected = [stack.run(pools[2], slot, tapes[slot], chunk=4) for slot in (0, 1)]
    torch.cuda.synchronize()
    outputs = [[], []]
    for first in range(0, 100, 4):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                chunk = tuple(t[first : first + 4] for t in tapes[which])
                outputs[which].append(stack.cycle(pools[which], [which], [chunk])[0])
    torch.cuda.synchronize()
    for which in (0, 1):
        assert same_bits(torch.cat(outputs[which], dim=1), expected[which])


def test_errors_stay_until_they_are_read():
    """The first error of several is kept, good rows of the same call proceed, and later steps work."""
    stack = Stack(SUPER_TP8, CONFIG, num_layers=1, device=CUDA)
    pool = stack.pool(4)
    pool.reset([0, 1, 2, 3])
    slots = torch.tensor([2, 9, 2], dtype=torch.int32, device=CUDA)
    tape = stack.tape(1, 3)
    plan = pool.plan(slots)
    outputs = stack.mixers[0](pool, 0, plan, *tape, ops.step)
    assert outputs[0].any() and not outputs[1:].any()
    pool.commit(plan)
    plan = pool.plan(torch.tensor([7], dtype=torch.int32, device=CUDA))
    pool.abandon(plan)
    with pytest.raises(ValueError, match="row (1: slot is 9|2: slot 2)"):
        pool.validate()
    pool.validate()
    assert pool.cursors().tokens.tolist() == [0, 0, 1, 0]
    assert pool.cursors().flags.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("word", [-1, 1, 1 << 30, (1 << 31) - 1, -(1 << 31)])
@pytest.mark.parametrize(
    "op, checkpoint, read_copy, rows",
    [
        (ops.step, "fp32", "none", 24),
        (ops.step, "fp16_sr", "none", 1),
        (ops.step, "fp16_sr", "none", 4),
        (ops.step, "fp16_sr", "none", 24),
        (ops.step, "fp16_sr", "none", 40),
        (ops.step, "fp16_sr", "nvfp4", 1),
        (ops.step, "fp16_sr", "nvfp4", 8),
        (ops.step, "fp16_sr", "nvfp4", 16),
        (ops.step, "fp16_sr", "nvfp4", 40),
        (ops.conventional_step, "fp32", "none", 4),
    ],
)
def test_nothing_depends_on_what_the_memory_of_a_plan_held(op, checkpoint, read_copy, rows, word):
    """A kernel that begins while the plan is made, as in a graph, looks at it for where to fetch from: slots, counts
    and rows to flush may be any numbers then.
    """
    config = ReplayConfig(window=8, max_step_tokens=2, checkpoint=checkpoint, read_copy=read_copy)
    geometry, steps = MambaGeometry(64, 64, 4, 128), 20
    weights, slots = Weights.random(geometry, CUDA), torch.arange(rows, dtype=torch.int32, device=CUDA)
    tokens = random_tokens(geometry, torch.bfloat16, rows, CUDA).span(0, rows)
    results = []
    for spoiled in (False, True):
        pool = StatePool(geometry, config, rows, 3, CUDA)
        pool.reset(slots)
        plan = Plan(pool, rows)

        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            if spoiled:
                plan.buffer.view(torch.int32).fill_(word)
            pool.plan(slots, 1, out=plan)
            outputs = [op(pool, layer, plan, *tokens, *weights) for layer in range(3)]
            pool.commit(plan)
        for _ in range(steps):
            graph.replay()
        pool.validate()
        results.append((torch.stack(outputs), pool.data))
    assert all(map(same_bits, *results))


def flush_then_step(pool, layer, plan, x, B, C, dt, A_log, D, dt_bias, out):
    """The two operators that engines have."""
    operators, call = torch.ops.trtllm_replayssm, (pool.table, pool.data, pool.spec, layer, plan.buffer, plan.rows)
    plan.note_use(STEPPED, layer)
    operators.flush(*call, A_log)
    operators.step(*call, x, B, C, dt, A_log, D, dt_bias, out, 0.0, float("inf"), plan.max_count, True)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "op, tokens, checkpoint, read_copy, activation, heads",
    [
        (ops.step, 1, "fp32", "none", "bf16", 64),
        (ops.step, 2, "fp32", "none", "bf16", 64),
        (ops.step, 1, "fp32", "none", "fp16", 64),
        (ops.step, 2, "fp32", "none", "fp16", 64),
        (ops.step, 1, "fp16_sr", "none", "bf16", 64),
        (ops.step, 1, "fp16_sr", "none", "bf16", 160),
        (ops.step, 1, "fp16_sr", "nvfp4", "bf16", 64),
        (ops.step, 1, "fp16_sr", "nvfp4", "bf16", 320),
        (ops.step, 1, "fp16_sr", "nvfp4", "bf16", 1400),
        (ops.step, 1, "fp16_sr", "nvfp4", "fp16", 256),
        (ops.step, 1, "fp16_sr", "e2m2", "fp16", 256),
        (ops.step, 2, "fp16_sr", "none", "bf16", 320),
        (ops.step, 2, "fp16_sr", "nvfp4", "bf16", 64),
        (flush_then_step, 1, "fp32", "none", "bf16", 64),
        (flush_then_step, 1, "fp16_sr", "nvfp4", "bf16", 64),
        (ops.conventional_step, 1, "fp32", "none", "bf16", 64),
    ],
)
def test_steps_that_load_before_the_plan_is_made(op, tokens, checkpoint, read_copy, activation, heads, layers, rows):
    """In a graph a step begins while the plan before it is made, or while the step that wrote its states is just over:
    rows change their slots, histories and flushes from step to step. The same bits as of steps that wait. Small heads
    of 16-bit floats: there a fold's part of shared memory reaches into that of a step's second half.
    """
    head_dim = 16 if activation == "fp16" else 64
    geometry, slots = MambaGeometry(heads, head_dim, 4, 128), 3
    formats = {"checkpoint": checkpoint, "read_copy": read_copy, "activation": activation}
    config = ReplayConfig(window=8, max_step_tokens=2, **formats)
    dtype = torch.float16 if activation == "fp16" else torch.bfloat16
    weights, given = Weights.random(geometry, CUDA), random_tokens(geometry, dtype, rows * tokens, CUDA)
    orders = [
        torch.tensor(order, dtype=torch.int32, device=CUDA) for order in itertools.permutations(range(slots), rows)
    ]
    accepted = torch.arange(rows, dtype=torch.int32, device=CUDA) % tokens + 1
    results = []
    for captured in (False, True):
        pool = StatePool(geometry, config, slots, layers, CUDA)
        pool.reset(range(slots))
        plan = Plan(pool, rows)
        outputs = torch.zeros(len(orders), layers, rows * tokens, heads, head_dim, dtype=dtype, device=CUDA)
        for slot in range(slots):  # so that slots flush at different times
            for _ in range(3 * slot):
                alone = pool.plan([slot], tokens)
                for layer in range(layers):
                    op(pool, layer, alone, *given.span(0, tokens), *weights, out=outputs[0, layer, :tokens])
                pool.commit(alone, None if op is ops.conventional_step else [1])

        def cycle(number, pool=pool, plan=plan, outputs=outputs, captured=captured):
            pool.plan(orders[number], tokens, out=plan)
            for layer in range(layers):
                op(pool, layer, plan, *given.span(0, rows * tokens), *weights, out=outputs[number, layer])
                if not captured:
                    torch.cuda.synchronize()
            pool.commit(plan, None if op is ops.conventional_step else accepted)

        if captured:
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                for number in range(len(orders)):
                    cycle(number)
        for _ in range(12):
            if captured:
                graph.replay()
            else:
                for number in range(len(orders)):
                    cycle(number)
        pool.validate()
        results.append((outputs, pool.data))
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("checkpoint, read_copy", [("fp16_sr", "none"), ("bf16", "none"), ("fp16_sr", "nvfp4")])
def test_bits_of_a_row_alone_and_among_others(head_dim, checkpoint, read_copy, count):
    """However many heads the warps of small batches take: only the last of the batches is a large one. Histories of up
    to two tiles of 16 records.
    """
    geometry, batches, steps = MambaGeometry(18, head_dim, 2, 128), (1, 10, 25, 50, 75), 30
    config = ReplayConfig(window=24, max_step_tokens=3, checkpoint=checkpoint, read_copy=read_copy)
    weights = Weights.random(geometry, CUDA)
    tokens = random_tokens(geometry, torch.bfloat16, batches[-1] * count, CUDA)
    results = []
    for rows in batches:
        pool = StatePool(geometry, config, rows, 1, CUDA)
        pool.reset(range(rows))
        outputs = []
        for step in range(steps):
            plan = pool.plan(range(rows), count)
            given = tokens.span(0, rows * count)
            outputs.append(ops.step(pool, 0, plan, *(t.roll(step, -1) for t in given), *weights)[:count])
            pool.commit(plan)
        pool.validate()
        results.append((torch.stack(outputs), pool.data[0, 0]))
    assert results[0][0].isfinite().all()
    for outputs, data in results[1:]:
        assert same_bits(outputs, results[0][0]) and same_bits(data, results[0][1])


@pytest.mark.parametrize(
    "tokens, checkpoint, read_copy, rows, heads",
    [
        *itertools.product([1, 2], ["fp32"], ["none"], [1, 4], [(32, 64, 2)]),
        *itertools.product([1], ["fp16"], ["none"], [1, 4], [(32, 64, 2)]),
        *itertools.product([1], ["fp32"], ["nvfp4"], [1, 4, 80], [(32, 64, 2)]),
        (2, "fp16_sr", "nvfp4", 80, (32, 64, 2)),
        (1, "fp16_sr", "nvfp4_amax", 300, (32, 64, 2)),
        # Tasks of half of the heads: 8 and 4 of 12 or, of 20, 8 and 8 and of the other four 4 and none.
        (1, "fp16_sr", "nvfp4", 120, (96, 80, 8)),
        (2, "fp16_sr", "nvfp4_amax", 300, (80, 64, 4)),
    ],
)
def test_steps_begin_whatever_the_plan_holds_before_it_is_made(tokens, checkpoint, read_copy, rows, heads):
    """Its rows name other slots, histories and flags, in range or not; slots are reset and a plan is abandoned."""
    geometry, steps = MambaGeometry(*heads, 128), 24
    config = ReplayConfig(window=8, max_step_tokens=2, checkpoint=checkpoint, read_copy=read_copy)
    weights, given = Weights.random(geometry, CUDA), random_tokens(geometry, torch.bfloat16, rows * tokens, CUDA)
    generator = torch.Generator().manual_seed(0)
    slots = torch.stack([torch.randperm(rows, generator=generator) for _ in range(steps)]).to(CUDA, torch.int32)
    values = torch.tensor([-(2**31), -1, 0, 1, 2, 3, 5, 8, 9, 2**31 - 1], dtype=torch.int32)
    streams = torch.arange(rows, device=CUDA)
    results = []
    for captured in (False, True):
        pool = StatePool(geometry, config, rows, 1, CUDA)
        pool.reset(range(rows), range(rows))
        plan = Plan(pool, rows)
        held = values[torch.randint(len(values), (steps, plan.buffer.numel() // 4), generator=generator)].to(CUDA)
        # Of each row slot, first token, count, history, flags (FLUSH) and ring row: tokens far outside of the tensors.
        flushing = torch.tensor([0, 2**31 - 1, -(2**31), 1, 1, 0], dtype=torch.int32, device=CUDA)
        held[5, 16 : 16 * (1 + rows)].view(rows, 16)[:, 6:12] = flushing
        # What may be loaded and folded, but is not the row.
        flushing = torch.tensor([0, 0, 1, 5, 1, 3], dtype=torch.int32, device=CUDA)
        held[9, 16 : 16 * (1 + rows)].view(rows, 16)[:, 6:12] = flushing
        outputs = torch.zeros(steps, rows * tokens, *heads[:2], dtype=torch.bfloat16, device=CUDA)

        def step(number, pool=pool, plan=plan, held=held, outputs=outputs):
            if number == steps // 2:
                pool.reset(slots[number], streams)
                pool.plan(slots[number], tokens, out=plan)
                pool.abandon(plan)
            plan.buffer.view(torch.int32).copy_(held[number])
            pool.plan(slots[number], tokens, out=plan)
            ops.step(pool, 0, plan, *given.span(0, rows * tokens), *weights, out=outputs[number])
            pool.commit(plan)

        if captured:
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                for number in range(steps):
                    step(number)
            graph.replay()
        else:
            for number in range(steps):
                step(number)
                torch.cuda.synchronize()
        pool.validate()
        assert pool.stats()["flushes"] > 0
        results.append((outputs, pool.data))
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("head_dim, checkpoint", [(64, "fp32"), (64, "fp16"), (80, "fp32")])
def test_conventional_bits_of_a_row_alone_and_among_others(head_dim, checkpoint):
    """Few heads are shared out among more CTAs."""
    geometry = MambaGeometry(16, head_dim, 2, 128)
    rows, config = 40, ReplayConfig(window=8, max_step_tokens=2, checkpoint=checkpoint)
    weights, tokens = Weights.random(geometry, CUDA), random_tokens(geometry, torch.bfloat16, rows, CUDA)
    for verify in (False, True):
        outputs, states = [], []
        for first, last in ((0, rows), (17, 18)):
            pool = StatePool(geometry, config, last - first, 1, CUDA)
            pool.reset(range(last - first))
            more = {"snapshots": pool.allocate_snapshots()[0]} if verify else {}
            op = ops.conventional_verify if verify else ops.conventional_step
            for _ in range(2):
                plan = pool.plan(range(last - first))
                out = op(pool, 0, plan, *tokens.span(first, last), *weights, **more)
                pool.commit(plan, check=True)
            outputs.append(out[17 - first]), states.append(pool.data[0, 17 - first])
        assert same_bits(*outputs) and same_bits(*states)


@pytest.mark.parametrize("head_dim, tokens, window", [(64, 1, 8), (64, 3, 8), (80, 1, 32), (80, 16, 32)])
def test_bits_of_float32_rows_alone_and_among_others(head_dim, tokens, window):
    """On a GPU of 132 multiprocessors: alone its heads have a CTA each, all of which begin before the plan is made;
    among five of its like some don't; among twenty they don't all find room; among eighty CTAs take several heads.
    """
    geometry, config = MambaGeometry(120, head_dim, 2, 128), ReplayConfig(window=window, max_step_tokens=tokens)
    weights, given = Weights.random(geometry, CUDA), random_tokens(geometry, torch.bfloat16, 80 * tokens, CUDA)
    outputs, states = [], []
    for first, last in ((0, 80), (0, 20), (15, 20), (17, 18)):
        pool = StatePool(geometry, config, last - first, 1, CUDA)
        pool.reset(range(last - first))
        outputs.append([])
        for _ in range(2 * window // tokens + 2):
            plan = pool.plan(range(last - first), tokens)
            out = ops.step(pool, 0, plan, *given.span(first * tokens, last * tokens), *weights)
            pool.commit(plan, check=True)
            outputs[-1].append(out.unflatten(0, (-1, tokens))[17 - first])
        assert pool.stats()["flushes"] >= last - first
        outputs[-1] = torch.stack(outputs[-1])
        states.append(pool.data[0, 17 - first])
    assert all(same_bits(outputs[0], other) for other in outputs[1:])
    assert all(same_bits(states[0], other) for other in states[1:])


@pytest.mark.parametrize("tokens, flush_first", [(1, False), (2, False), (2, True)])
def test_batches_whose_jobs_are_claimed(tokens, flush_first):
    """Two batches of one pool at the same time, on two streams, in a graph; so large, on a GPU of up to 148
    multiprocessors, that CTAs claim their jobs. Some rows are padded, first all of them, then so many that there are
    fewer jobs than CTAs. The bits of small batches; the plans' counters are zero afterwards.
    """
    geometry, rows, layers = MambaGeometry(13, 16, 1, 128), 800, 2
    config = ReplayConfig(window=8, max_step_tokens=2)
    weights, given = Weights.random(geometry, CUDA), random_tokens(geometry, torch.bfloat16, 2 * rows * tokens, CUDA)
    order = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(0)).int()
    order[::37] = -1
    accepted = torch.arange(2 * rows, dtype=torch.int32, device=CUDA) % tokens + 1

    def step(pool, layer, plan, first, out):
        span = slice(first * tokens, (first + plan.rows) * tokens)
        inputs = (*given.span(span.start, span.stop), *weights)
        if not flush_first:
            ops.step(pool, layer, plan, *inputs, out=out[layer, span])
            return
        plan.note_use("stepped", layer)
        call = (pool.table, pool.data, pool.spec, layer, plan.buffer, plan.rows)
        torch.ops.trtllm_replayssm.flush(*call, weights.A_log)
        bounds = (0.0, float("inf"), plan.max_count)
        torch.ops.trtllm_replayssm.step(*call, *inputs, out[layer, span], *bounds, True)

    def cycle(pool, slots, size, out):
        """Plans of so many rows: the first half of them on this stream, the others on another."""
        plans = [pool.plan(slots[first : first + size], tokens) for first in range(0, 2 * rows, size)]
        here, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(here)
        for layer in range(layers):
            for index, plan in enumerate(plans):
                with torch.cuda.stream(here if index < len(plans) / 2 else other):
                    step(pool, layer, plan, index * size, out)
        here.wait_stream(other)
        for index, plan in enumerate(plans):
            pool.commit(plan, accepted[index * size : index * size + plan.rows])
        return plans

    results = []
    for size in (rows, 100):
        pool = StatePool(geometry, config, 2 * rows, layers, CUDA)
        pool.reset(range(2 * rows))
        slots = torch.full_like(accepted, -1)
        out = torch.zeros(layers, 2 * rows * tokens, 13, 16, dtype=torch.bfloat16, device=CUDA)
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            plans = cycle(pool, slots, size, out)
        graph.replay()
        assert not out.any()
        outputs = []
        for live in [order.where(torch.arange(2 * rows) % 97 == 0, -1)] * 5 + [order] * 12:
            slots.copy_(live)
            graph.replay()
            outputs.append(out.clone())
            assert not any(plan.buffer[16:64].any() for plan in plans)
        pool.validate()
        assert pool.stats()["flushes"] > rows
        results.append((torch.stack(outputs), pool.data))
    assert all(map(same_bits, *results))


def test_cuda_agrees_with_the_cpu():
    """Prefill and steps of one sequence on both devices."""
    config = ReplayConfig(window=16, max_step_tokens=4, activation="fp32")
    results = []
    for device in ("cpu", "cuda"):
        stack = Stack(SUPER_TP8, config, device=device)
        pool = stack.pool()
        pool.reset(0)
        tape = stack.tape(3, 80)
        stack.cycle(pool, [0], [tuple(t[:20] for t in tape)], op=ops.prefill)
        results.append(stack.run(pool, 0, tuple(t[20:] for t in tape), chunk=3))
    assert oracle.relative_error(array(results[1]), array(results[0])) < 5e-6


def need_memory(gigabytes):
    free = torch.cuda.mem_get_info()[0]
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory, {free >> 30} are there")


@pytest.mark.large
def test_slots_beyond_two_to_the_31_elements():
    """A28: 2,080 slots of the Super geometry with fp16 states, steps and moves in the last slot."""
    need_memory(16)
    config = ReplayConfig(window=16, max_step_tokens=4, checkpoint="fp16")
    slots = 2080
    pool = StatePool(SUPER, config, slots, 1, CUDA)
    assert slots * 128 * 64 * 128 > 2**31 and pool.data.numel() > 2**32
    weights, tokens = Weights.random(SUPER, CUDA), random_tokens(SUPER, torch.bfloat16, 60, CUDA)
    small = StatePool(SUPER, config, 1, 1, CUDA)
    for target, slot in ((pool, slots - 1), (small, 0)):
        target.reset(slot, streams=1)
        plan = target.plan(slot, 20)
        ops.prefill(target, 0, plan, *tokens.span(0, 20), *weights)
        target.commit(plan)
    for first in range(20, 60, 4):
        results = []
        for target, slot in ((pool, slots - 1), (small, 0)):
            plan = target.plan(slot, 4)
            results.append(ops.step(target, 0, plan, *tokens.span(first, first + 4), *weights))
            target.commit(plan, check=True)
        assert same_bits(*results)
    assert same_bits(pool.data[0, -1], small.data[0, 0])
    assert not pool.data[0, :-1].any()
    pool.copy(slots - 1, slots - 2)
    pool.load(slots - 3, pool.save(slots - 2))
    assert same_bits(pool.data[0, -3], small.data[0, 0])


@pytest.mark.large
def test_prompts_beyond_two_to_the_31_elements():
    """A28: 270,000 packed tokens of the Super geometry, the last row beyond 2^31 elements of x."""
    need_memory(40)
    total, tail = 270_000, 64
    assert (total - tail) * 128 * 64 > 2**31
    pool = StatePool(SUPER, CONFIG, 2, 1, CUDA)
    pool.reset([0, 1])
    weights = Weights.random(SUPER, CUDA)
    last = random_tokens(SUPER, torch.bfloat16, tail, CUDA)
    shapes = [(total, *t.shape[1:]) for t in last]
    tokens = [torch.zeros(shape, dtype=torch.bfloat16, device=CUDA) for shape in shapes]
    for whole, part in zip(tokens, last, strict=True):
        whole[-tail:] = part
    xBC = torch.zeros((total, SUPER.conv_channels), dtype=torch.bfloat16, device=CUDA)
    raw = torch.randn((tail, SUPER.conv_channels), device=CUDA).bfloat16()
    xBC[-tail:] = raw
    weight = torch.randn((SUPER.conv_channels, 4), device=CUDA)
    bias = torch.randn(SUPER.conv_channels, device=CUDA)
    plan = pool.plan([0, 1], [total - tail, tail])
    convolved = ops.conv_step(pool, 0, plan, xBC, weight, bias)[-tail:]
    out = ops.prefill(pool, 0, plan, *tokens, *weights)[-tail:]
    pool.commit(plan, check=True)
    y, states = recur(zero_state(SUPER), last, weights)
    assert oracle.relative_error(array(out), y) < 3e-3
    assert oracle.relative_error(array(pool.materialize(0, 1)[0][0]), states[-1]) < 1e-5
    expected = oracle.convolve(np.zeros((0, SUPER.conv_channels)), array(raw), array(weight), array(bias))
    assert oracle.relative_error(array(convolved), expected) < 3e-3
