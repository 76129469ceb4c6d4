# SPDX-License-Identifier: Apache-2.0
"""The commands on a GPU: what CUDA graphs, their events and the cold cache add."""

import pytest
import torch

from trtllm_replayssm import _core
from trtllm_replayssm.bench.kernel import Case, DecodeLoop

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
        assert 0.5 < sum(record["parts_us"].values()) / record["us"] < 3


def test_serve(bench):
    arguments = ("--model", "tiny", "--batches", 6, "--steps", 8, "--repeats", 2, "--prompt", 5, "--answer", 12)
    records, _ = bench("serve", *arguments, "--memory", "4MB", "--json", device="cuda")
    assert [record["mode"] for record in records] == ["replay", "snapshots", "standard"]
    assert records[1]["concurrency"] < records[0]["concurrency"]
    assert all(record["tokens_per_second"] > 0 for record in records)
