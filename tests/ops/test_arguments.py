# SPDX-License-Identifier: Apache-2.0
"""Wrong shapes, dtypes, devices, strides and values: an error that names the argument, and an untouched pool."""

import pytest
import torch
from mixer import SMALL, Weights, random_tokens, same_bits

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, _core, ops

CONFIG = ReplayConfig(window=8, max_step_tokens=4)
H, P, G, N, CHANNELS = 4, 16, 2, 64, 320


def scan_arguments(device):
    weights = Weights.random(SMALL, device)
    return {**random_tokens(SMALL, torch.bfloat16, 3, device)._asdict(), **weights._asdict()}


SCAN_CASES = [
    (dict(x=lambda x: x[:2]), ValueError, r"x: expected shape \(3, 4, 16\), got \(2, 4, 16\)"),
    (dict(x=lambda x: x.flatten(1)), ValueError, r"x: expected shape \(3, 4, 16\), got \(3, 64\)"),
    (dict(x=lambda x: x.float()), TypeError, "x: expected torch.bfloat16, got torch.float32"),
    (dict(x=lambda x: x.half()), TypeError, "x: expected torch.bfloat16, got torch.float16"),
    (dict(x=lambda x: x.mT.contiguous().mT), ValueError, r"x: expected a contiguous last dimension, got strides"),
    (dict(x=lambda x: None), TypeError, "x: expected a torch.Tensor, got NoneType"),
    (dict(x=lambda x: x.to("meta")), ValueError, "x: expected a tensor on (cpu|cuda:0), got one on meta"),
    (dict(B=lambda B: B[:, :1]), ValueError, r"B: expected shape \(3, 2, 64\), got \(3, 1, 64\)"),
    (dict(B=lambda B: B.double()), TypeError, "B: expected torch.bfloat16, got torch.float64"),
    (dict(C=lambda C: C[..., :32]), ValueError, r"C: expected shape \(3, 2, 64\), got \(3, 2, 32\)"),
    (dict(C=lambda C: C.tolist()), TypeError, "C: expected a torch.Tensor, got list"),
    (dict(C=lambda C: C.mT.contiguous().mT), ValueError, "C: expected a contiguous last dimension"),
    (dict(dt=lambda dt: dt[:, :3]), ValueError, r"dt: expected shape \(3, 4\), got \(3, 3\)"),
    (
        dict(dt=lambda dt: dt.int()),
        TypeError,
        "dt: expected torch.float32 or torch.bfloat16 or torch.float16, got torch.int32",
    ),
    (dict(A_log=lambda A: A[:3]), ValueError, r"A_log: expected shape \(4,\), got \(3,\)"),
    (dict(A_log=lambda A: A.double()), TypeError, "A_log: expected .*, got torch.float64"),
    (dict(A_log=lambda A: A[:1].expand(4)), ValueError, r"A_log: expected a contiguous tensor, got strides \(0,\)"),
    (dict(D=lambda D: D[:, None]), ValueError, r"D: expected shape \(4,\), got \(4, 1\)"),
    (dict(dt_bias=lambda b: b.long()), TypeError, "dt_bias: expected .*, got torch.int64"),
    (dict(dt_limit=lambda _: (0.5, 0.1)), ValueError, r"dt_limit: expected 0 <= lower <= upper, got \(0.5, 0.1\)"),
    (dict(dt_limit=lambda _: (float("nan"), 1.0)), ValueError, "dt_limit: expected 0 <= lower <= upper"),
    (dict(dt_limit=lambda _: (-1.0, 1.0)), ValueError, "dt_limit: expected 0 <= lower <= upper"),
    (dict(out=lambda _: torch.zeros(3, H, P)), TypeError, "out: expected torch.bfloat16, got torch.float32"),
    (dict(out=lambda x: x.repeat(2, 1, 1)), ValueError, r"out: expected shape \(3, 4, 16\), got \(6, 4, 16\)"),
    (dict(out=lambda x: x[:1].expand(3, H, P)), ValueError, "out: expected elements that do not overlap, got strides"),
    (dict(layer=lambda _: 2), ValueError, "layer: expected 0..1 of 2 layers, got 2"),
    (dict(layer=lambda _: -1), ValueError, "layer: expected 0..1 of 2 layers, got -1"),
    (dict(layer=lambda _: 0.0), TypeError, "layer: expected an int, got 0.0"),
    (dict(layer=lambda _: True), TypeError, "layer: expected an int, got True"),
    (dict(dt_limit=lambda _: 0.1), TypeError, r"dt_limit: expected \(lower, upper\), got 0.1"),
]


@pytest.mark.parametrize("op", [ops.step, ops.prefill, ops.conventional_step])
def test_plan_is_a_plan(device, op):
    pool = StatePool(SMALL, CONFIG, 2, 2, device)
    with pytest.raises(TypeError, match="plan: expected a Plan, got NoneType"):
        op(pool, 0, None, **scan_arguments(device))


@pytest.mark.parametrize("op", [ops.step, ops.prefill, ops.conventional_step])
@pytest.mark.parametrize("change, error, match", SCAN_CASES)
def test_scan_arguments(device, op, change, error, match):
    pool = StatePool(SMALL, CONFIG, 2, 2, device)
    good = scan_arguments(device)
    plan = pool.plan([0, 1], [1, 2])
    before = pool.data.clone()
    ((name, bad),) = change.items()
    given = {"layer": 0, **good, name: bad(good.get(name, good["x"]))}
    with pytest.raises(error, match=match):
        op(pool, given.pop("layer"), plan, **given)
    assert same_bits(pool.data, before)
    assert plan.use is None
    op(pool, 0, plan, **good)
    assert not same_bits(pool.data, before)
    with pytest.raises(ValueError, match="layer: expected one whose op has not run on this plan, got 0 again"):
        op(pool, 0, plan, **good)
    with pytest.raises(
        ValueError, match="plan: expected one whose tokens went through every layer, got one without layer 1"
    ):
        pool.commit(plan)
    op(pool, 1, plan, **good)
    pool.commit(plan)


@pytest.mark.parametrize(
    "change, error, match",
    [
        (dict(xBC=lambda x: x[:, :-1]), ValueError, r"xBC: expected shape \(3, 320\), got \(3, 319\)"),
        (dict(xBC=lambda x: x.half()), TypeError, "xBC: expected torch.bfloat16, got torch.float16"),
        (dict(xBC=lambda x: x.T.contiguous().T), ValueError, "xBC: expected a contiguous last dimension"),
        (dict(weight=lambda w: w[:, None]), ValueError, r"weight: expected shape \(320, 4\), got \(320, 1, 4\)"),
        (dict(weight=lambda w: w.T.contiguous().T), ValueError, "weight: expected a contiguous tensor"),
        (dict(weight=lambda w: w.double()), TypeError, "weight: expected .*, got torch.float64"),
        (dict(bias=lambda b: b[:5]), ValueError, r"bias: expected shape \(320,\), got \(5,\)"),
        (dict(out=lambda x: x), ValueError, "out: expected a tensor that does not overlap xBC, got the same memory"),
    ],
)
def test_conv_arguments(device, change, error, match):
    pool = StatePool(SMALL, CONFIG, 2, 2, device)
    good = {
        "xBC": torch.randn(3, CHANNELS, device=device).bfloat16(),
        "weight": torch.randn(CHANNELS, 4, device=device),
        "bias": torch.randn(CHANNELS, device=device),
    }
    plan = pool.plan([0, 1], [1, 2])
    ((name, bad),) = change.items()
    with pytest.raises(error, match=match):
        ops.conv_step(pool, 0, plan, **{**good, name: bad(good.get(name, good["xBC"]))})
    assert not pool.data.any()
    ops.conv_step(pool, 0, plan, **good)
    assert pool.data.any()


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ((torch.zeros(1, dtype=torch.int64),), TypeError, "slots: expected torch.int32, got torch.int64"),
        (
            (torch.zeros((1, 1), dtype=torch.int32),),
            ValueError,
            r"slots: expected a contiguous \[rows\] tensor, got shape",
        ),
        (
            (torch.zeros(4, dtype=torch.int32)[::2],),
            ValueError,
            r"slots: expected a contiguous \[rows\] tensor, got shape",
        ),
        ((torch.zeros(1, dtype=torch.int32, device="meta"),), ValueError, "slots: expected a tensor on .* one on meta"),
        (("ab",), TypeError, "slots: expected ints, got 'ab'"),
        (([0.5],), TypeError, r"slots: expected ints, got \[0.5\]"),
        ((None,), TypeError, "slots: expected ints, got"),
        (([0, 1], [1]), ValueError, "tokens_per_row: expected 2 rows, got 1"),
        (([0, 1], -1), ValueError, r"tokens_per_row\[0\]: expected 0..2147483647, got -1"),
        (([0, 1], [3, -2]), ValueError, r"tokens_per_row\[1\]: expected 0..2147483647, got -2"),
        (([0, 1], 2**31), ValueError, r"tokens_per_row\[0\]: expected 0..2147483647, got 2147483648"),
        (([0, 1], 2**30), ValueError, "tokens_per_row: expected at most 2147483647 tokens in all, got 2147483648"),
        (([0, 1], torch.ones(2)), TypeError, "tokens_per_row: expected torch.int32, got torch.float32"),
        (([0, 1], 1, None, -1), ValueError, "most: expected 0 or more, got -1"),
        (([0, 1], 1, None, 1.0), TypeError, r"most: expected an int, got 1.0 \(float\)"),
        (([0, 1], 1, None, True), TypeError, r"most: expected an int, got True \(bool\)"),
        (([0, 1], 2, None, 1), ValueError, r"tokens_per_row\[0\]: expected at most most = 1, got 2"),
        (([0, 1], [1, 3], None, 2), ValueError, r"tokens_per_row\[1\]: expected at most most = 2, got 3"),
    ],
)
def test_plan_arguments(device, arguments, error, match):
    pool = StatePool(SMALL, CONFIG, 4, 1, device)
    moved = [a.to(device) if isinstance(a, torch.Tensor) and a.device.type == "cpu" else a for a in arguments]
    if device.type == "cuda" and isinstance(arguments[0], torch.Tensor) and arguments[0].stride() == (2,):
        moved[0] = torch.zeros(4, dtype=torch.int32, device=device)[::2]
    with pytest.raises(error, match=match):
        pool.plan(*moved)
    assert not pool.table.any()


@pytest.mark.parametrize(
    "change, error, match",
    [
        (dict(num_slots=0), ValueError, "num_slots: expected 1 or more, got 0"),
        (dict(num_slots=2**31), ValueError, "num_slots: expected a 32-bit integer, got 2147483648"),
        (dict(num_slots="4"), TypeError, r"num_slots: expected an int, got '4' \(str\)"),
        (dict(num_layers=-1), ValueError, "num_layers: expected 0 or more, got -1"),
        (dict(device="mps"), ValueError, "device: expected cpu or cuda, got mps"),
    ],
)
def test_pool_arguments(change, error, match):
    with pytest.raises(error, match=match):
        StatePool(**dict(geometry=SMALL, config=CONFIG, num_slots=1, num_layers=1, device="cpu") | change)


@pytest.mark.skipif(_core.has_cuda(), reason="this build has CUDA ops")
def test_cuda_pool_of_a_cpu_build():
    with pytest.raises(NotImplementedError, match="this build has CPU ops only"):
        StatePool(SMALL, CONFIG, 1, 1, device="cuda")


def test_plans_and_slots_of_other_kinds(device):
    pool = StatePool(SMALL, CONFIG, 2, 1, device)
    other = StatePool(MambaGeometry(4, 16, 1, 64), CONFIG, 2, 1, device)
    plan = other.plan([0, 1], [1, 2])
    with pytest.raises(ValueError, match="plan: expected a plan of this pool, got one of another pool"):
        ops.step(pool, 0, plan, **scan_arguments(device))
    for call in (lambda: pool.save([5]), lambda: pool.cursors([5]), lambda: pool.load([5], torch.zeros(1).byte())):
        with pytest.raises(ValueError, match=r"slots\[0\]: expected 0..1, got 5"):
            call()
    with pytest.raises(ValueError, match=r"slots\[1\]: expected distinct slots, got 1 again"):
        pool.save([1, 1])
    for call in (lambda: pool.materialize(1, 0), lambda: pool.materialize(-1, 0)):
        with pytest.raises(ValueError, match="layer: expected 0..0 of 1 layers"):
            call()
    with pytest.raises(TypeError, match="A_log: expected .*, got torch.int64"):
        pool.materialize(0, 0, A_log=torch.zeros(4, dtype=torch.int64, device=device))
