# SPDX-License-Identifier: Apache-2.0
"""The commands on a GPU: what CUDA graphs, their events and the cold cache add."""

from itertools import pairwise

import pytest
import torch

from trtllm_replayssm import _core
from trtllm_replayssm.bench.clock import repeatable
from trtllm_replayssm.bench.kernel import Case, DecodeLoop
from trtllm_replayssm.bench.models import Subject
from trtllm_replayssm.bench.step import Step, _Stopwatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and _core.has_cuda()),
        reason="needs a GPU and the CUDA ops: run scripts/gpu/test.sh on a machine that has them",
    ),
]


def test_kernel(bench):
    """Flushes of replayed graphs are counted, and no step is faster than its bytes."""
    records, _ = bench(
        "kernel", "--geometry", "16x64x1x128", "--batches", 64, "--tokens", 1, 4, "--modes", "replay", "--steps", 16,
        "--repeats", 2, "--json", device="cuda",
    )  # fmt: skip
    for record in records:
        assert record["flushes_per_step"] == pytest.approx(record["expected_flushes_per_step"], rel=0.02)
        assert 0 < record["fraction_of_read_bandwidth"] < 1.05


def test_a_step_passes_through_four_times_the_cache():
    loop = DecodeLoop(Case("16x64x1x128", 8, 1, "replay"), 16, torch.device("cuda"))
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    slots = loop.num_layers * 8 * loop.pool.layout.slot_stride
    assert 4 * cache <= slots < 4 * cache + 8 * loop.pool.layout.slot_stride


def test_step(bench):
    arguments = ("--model", "tiny", "--batches", 3, "--contexts", 64, "--steps", 24, "--repeats", 2, "--json")
    for record in bench("step", *arguments, device="cuda")[0]:
        assert all(us > 0 for us in record["parts_us"].values())


@torch.inference_mode()
def test_parts_fill_a_replayed_step():
    """Each replay has its own times, between events before and behind it, in the order of the layers."""
    device = torch.device("cuda")
    subject = Subject("tiny", device, "bfloat16")
    model, loader = subject.model("replay")
    memory = subject.memory(subject.replay_config(8, 1), loader.attention_layers, 2, 4, False)
    step, watch = Step(model, memory, 4), _Stopwatch(device)
    inside = {"mamba": ["ssm", "mamba_dense", "ssm", "mamba_dense", "ssm"], "moe": ["mlp"]}
    order = [part for layer in subject.config.layers for part in ("other", *inside.get(layer, [layer]))] + ["other"]
    with watch.inside(model):
        replay = repeatable(lambda: watch.step(step.run), device)
        for _ in range(3):
            before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            replay()
            behind.record()
            parts = watch.read()
            behind.synchronize()
            marks = [before, *(mark for _, mark in watch._marks), behind]
            assert all(one.elapsed_time(other) >= 0 for one, other in pairwise(marks))
            assert [part for part, _ in parts] == order
            whole, resolution = marks[1].elapsed_time(marks[-2]) * 1e3, 1
            assert sum(us for _, us in parts) == pytest.approx(whole, abs=len(parts) * resolution)


def test_serve(bench):
    arguments = ("--model", "tiny", "--batches", 6, "--steps", 8, "--repeats", 2, "--prompt", 5, "--answer", 12)
    records, _ = bench("serve", *arguments, "--memory", "4MB", "--json", device="cuda")
    assert [record["mode"] for record in records] == ["replay", "snapshots", "standard"]
    assert records[1]["concurrency"] < records[0]["concurrency"]
    assert all(record["tokens_per_second"] > 0 for record in records)
