# SPDX-License-Identifier: Apache-2.0
"""The torch operators: schemas that tell the truth, and traces by torch.compile that touch the pool in place."""

from dataclasses import replace
from functools import partial
from math import inf

import pytest
import torch
from mixer import SMALL, Mixer, Stack, Weights, random_tokens, same_bits
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from trtllm_replayssm import ReplayConfig, StatePool, ops
from trtllm_replayssm.operators import SCHEMAS, core_spec, pool_spec

CONFIG = ReplayConfig(window=8, max_step_tokens=4, activation="fp32")
_ops = torch.ops.trtllm_replayssm


def test_spec_text_tells_kinds_of_pools_apart():
    spec = pool_spec(SMALL, CONFIG, 8, 3, 16)
    assert spec == "4 16 2 64 4 8 4 fp32 none fp32 0 8 3 16 0"
    assert core_spec(spec) is core_spec(pool_spec(SMALL, CONFIG, 8, 3, 16))
    assert core_spec(spec) is not core_spec(pool_spec(SMALL, CONFIG, 8, 4, 16))


@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(device, name):
    """Declared mutations are the real ones, nothing is returned, and the fake kernel agrees."""
    config = replace(CONFIG, read_copy="fp8") if name == "refresh_read_copy" else CONFIG
    pool = StatePool(SMALL, config, 4, 2, device)
    pool.reset([0, 1])
    weights, tokens = Weights.random(SMALL, device), random_tokens(SMALL, torch.float32, 3, device)
    slots, rows = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32, device=device)
    empty = pool.plan([2, 3])
    pool.abandon(empty)
    shared, layer = (pool.table, pool.data, pool.spec), 1
    state, tail = pool.materialize(layer, [0, 1])
    if name in (
        "commit",
        "abandon",
        "conv_step",
        "flush",
        "step",
        "prefill",
        "conventional_step",
        "conventional_verify",
    ):
        plan = pool.plan(slots, rows)
        planned = (*shared, layer, plan.buffer, plan.rows)
    out = torch.zeros(3, 4, 16, device=device)
    xBC = torch.randn(3, SMALL.conv_channels, device=device)
    scan = lambda: (*planned, *tokens, *weights, out, 0.0, inf, 2)  # noqa: E731
    arguments = {
        "reset": lambda: (pool.table, pool.spec, slots, rows.long()),
        "adopt": lambda: (pool.table, pool.spec, slots, rows.long()),
        "plan": lambda: (pool.table, pool.spec, slots, rows, 0, 2, empty.buffer),
        "plan_next": lambda: (pool.table, pool.spec, slots, rows, torch.zeros_like(rows), 2, empty.buffer),
        "plan_lengths": lambda: (
            torch.zeros(8, dtype=torch.int32, device=device),
            pool.spec,
            slots,
            rows,
            rows + 1,
            torch.tensor([1, 2], dtype=torch.int32, device=device),
            False,
            empty.buffer,
        ),
        "commit": lambda: (pool.table, pool.spec, plan.buffer, 2, rows, 0),
        "abandon": lambda: (pool.table, pool.spec, plan.buffer, 2, 0),
        "conv_step": lambda: (*planned, xBC, torch.randn(320, 4, device=device), None, torch.zeros_like(xBC), 2, False),
        "rms_norm": lambda: (xBC.clone(), xBC, None, xBC[0], torch.zeros_like(xBC), 2, 1e-5),
        "relu2": lambda: (xBC.clone(),),
        "attend": lambda: (
            torch.randn(3, 4, 64, device=device).bfloat16(),
            *torch.randn(2, 2, 2, 8, 64, device=device).bfloat16(),
            torch.zeros(3, dtype=torch.int64, device=device),
            torch.arange(3, device=device),
            torch.arange(3, device=device)[None],
            torch.zeros(3, 4, 64, device=device).bfloat16(),
            0.25,
        ),
        "flush": lambda: (*planned, weights.A_log),
        "step": lambda: (*scan(), False),
        "prefill": scan,
        "conventional_step": scan,
        "conventional_verify": lambda: (*scan(), pool.allocate_snapshots()[layer]),
        "materialize": lambda: (*shared, layer, slots, None, state, tail),
        "restore": lambda: (*shared, layer, slots, state, tail),
        "refresh_read_copy": lambda: (*shared, layer, slots),
        "copy": lambda: (*shared, slots, slots + 2),
    }[name]()
    torch.library.opcheck(getattr(_ops, name).default, arguments)


def test_opcheck_of_records(device):
    pool = StatePool(SMALL, CONFIG, 2, 1, device)
    pool.reset([0, 1])
    weights, tokens = Weights.random(SMALL, device), random_tokens(SMALL, torch.float32, 3, device)
    plan = pool.plan([0, 1], [1, 2])
    planned = (pool.table, pool.data, pool.spec, 0, plan.buffer, plan.rows)
    xBC, weight = (torch.randn(size, SMALL.conv_channels, device=device) for size in (3, 4))
    convolution = (*planned, xBC, weight.T.contiguous(), None, torch.zeros(3, 128, device=device), 2, True)
    torch.library.opcheck(_ops.conv_step.default, convolution)
    scan = (None, None, tokens.C, tokens.dt, *weights, torch.zeros_like(tokens.x), 0.0, inf, 2, False)
    torch.library.opcheck(_ops.step.default, (*planned, *scan))


@pytest.mark.parametrize("name", ["step", "prefill", "materialize"])
def test_opcheck_with_an_external_checkpoint(device, name):
    states = torch.randn(2, 4, 4, 16, 64, device=device)
    pool = StatePool(SMALL, CONFIG, 4, 2, device, external={"checkpoint": states})
    slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
    pool.adopt(slots)
    weights, tokens = Weights.random(SMALL, device), random_tokens(SMALL, torch.float32, 2, device)
    if name == "materialize":
        arguments = (1, slots, None, torch.zeros(2, 4, 16, 64, device=device), None)
    else:
        plan = pool.plan(slots)
        arguments = (1, plan.buffer, 2, *tokens, *weights, torch.zeros_like(tokens.x), 0.0, inf, 1)
        arguments += (False,) if name == "step" else ()
    call = (pool.table, pool.data, pool.spec, *arguments)
    torch.library.opcheck(getattr(_ops, name).default, call, {"checkpoint": states})


@pytest.mark.parametrize(
    "backend, mix",
    [
        pytest.param(backend, mix, id=f"{name}-{backend}")
        for name, mix, backends in (
            ("step", partial(Mixer.__call__, op=ops.step), ("aot_eager", "inductor")),
            ("prefill", partial(Mixer.__call__, op=ops.prefill), ("aot_eager", "inductor")),
            ("records", Mixer.by_records, ("aot_eager",)),  # to inductor they are what steps are
        )
        for backend in backends
    ],
)
def test_compiled_layers_are_the_eager_ones(device, backend, mix):
    """fullgraph=True through two layers: same bits, one graph for all cycles, and the very memory of the pool."""
    stack = Stack(SMALL, CONFIG, device=device)
    eager, compiled = stack.pool(2), stack.pool(2)
    address = compiled.data.data_ptr()

    def layers(pool, plan, raw, dt):
        return torch.stack([mix(mixer, pool, layer, plan, raw, dt) for layer, mixer in enumerate(stack.mixers)])

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    traced = torch.compile(layers, fullgraph=True, backend=counter)
    for pool in (eager, compiled):
        pool.reset([0, 1])
    for cycle in range(6):
        tape = stack.tape(cycle, 8)
        plans = [pool.plan([1, 0], 4) for pool in (eager, compiled)]
        outputs = layers(eager, plans[0], *tape), traced(compiled, plans[1], *tape)
        assert same_bits(*outputs)
        assert plans[1].use == plans[0].use
        for pool, plan in zip((eager, compiled), plans, strict=True):
            pool.commit(plan)
    assert counter.frame_count == 1
    assert compiled.data.data_ptr() == address and same_bits(eager.data, compiled.data)
    assert compiled.decay[1] is stack.mixers[1].weights.A_log


def test_inductor_copies_no_pool(device):
    """The generated code calls the operators on the pool itself: a pool is too large to be cloned."""
    stack = Stack(SMALL, CONFIG, device=device)
    pool = stack.pool(2)
    pool.reset([0, 1])

    def layers(plan, raw, dt):
        return [mixer(pool, layer, plan, raw, dt, ops.step).sum() for layer, mixer in enumerate(stack.mixers)]

    torch._dynamo.reset()
    _, code = run_and_get_code(torch.compile(layers, fullgraph=True), pool.plan([0, 1], 2), *stack.tape(1, 4))
    lines = "".join(code).splitlines()
    assert sum("trtllm_replayssm.step.default(" in line for line in lines) == 2
    assert not [line for line in lines if "= empty_strided" in line and str(pool.layout.slot_stride) in line]


def test_gradients_and_inference_mode_are_no_matter(device):
    """Parameters that require gradients, outside and inside inference mode, give the same bits."""
    mixer = Mixer(SMALL, device)
    trainable = mixer.weights._replace(A_log=torch.nn.Parameter(mixer.weights.A_log))
    tokens = random_tokens(SMALL, torch.float32, 2, device)
    results = []
    cases = [(mixer.weights, torch.no_grad), (trainable, torch.enable_grad), (trainable, torch.inference_mode)]
    for weights, context in cases:
        pool = StatePool(SMALL, CONFIG, 1, 1, device)
        with context():
            plan = pool.plan(0, 2)
            results.append(ops.step(pool, 0, plan, *tokens, *weights))
            pool.commit(plan)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])
