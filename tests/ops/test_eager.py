# SPDX-License-Identifier: Apache-2.0
"""A12: a pool of 32 slots serves batches of 1, 31 and 32 rows as single launches, of no graph, in any order."""

import os
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from mixer import Tokens, Weights, assert_accurate, random_tokens, recur

from trtllm_replayssm import MambaGeometry, ReplayConfig, StatePool, ops

BATCHES = 1, 31, 32
SLOTS, DRAFTS, PROMPT = 32, 3, 5
TUNED = MambaGeometry(num_heads=2, head_dim=64, num_groups=1, state_dim=128)
GENERIC = MambaGeometry(num_heads=2, head_dim=24, num_groups=1, state_dim=64)


@pytest.mark.parametrize("geometry, activation", [(TUNED, "bf16"), (GENERIC, "fp32")])
@pytest.mark.parametrize("way", ["step", "verify", "conventional_step", "conventional_verify"])
def test_batches_of_1_31_and_32(device, way, geometry, activation):
    """Prompts, then twelve steps, in a window that is full after eight tokens: each output is the oracle's."""
    width = 1 + DRAFTS if "verify" in way else 1
    pool = StatePool(geometry, ReplayConfig(8, width, activation=activation), SLOTS, 1, device)
    pool.data.fill_(0xFF)
    pool.reset(list(range(SLOTS)))
    weights = Weights.random(geometry, device)
    op = {"verify": ops.step}.get(way) or getattr(ops, way)
    if way == "conventional_verify":
        op = partial(op, snapshots=pool.allocate_snapshots()[0])
    states = np.zeros((SLOTS, geometry.num_heads, geometry.head_dim, geometry.state_dim))
    random = np.random.default_rng(0)

    def run(op, slots, count, seed):
        tokens = random_tokens(geometry, pool.activation, len(slots) * count, device, seed)
        plan = pool.plan(slots, count)
        out = op(pool, 0, plan, *tokens, *weights)
        by_row = Tokens(*(tensor.unflatten(0, (len(slots), count)) for tensor in tokens))
        expected, after = recur(states[slots], by_row, weights)
        assert_accurate(out.unflatten(0, (len(slots), count)), expected)
        accepted = random.integers(1, count + 1, len(slots)) if op is not ops.prefill else np.full(len(slots), count)
        pool.commit(plan, None if op in (ops.prefill, ops.conventional_step) else accepted.tolist())
        states[slots] = after[accepted, np.arange(len(slots))]

    run(ops.prefill, list(range(SLOTS)), PROMPT, 0)
    for step in range(12):
        rows = BATCHES[step % len(BATCHES)]
        run(op, random.permutation(SLOTS)[:rows].tolist(), width, 1 + step)
    pool.validate()
    if way != "conventional_verify":
        given, _ = pool.materialize(0, list(range(SLOTS)))
        assert_accurate(given, states)


@pytest.mark.gpu
def test_no_access_beyond_what_is_theirs():
    """The same on a GPU under compute-sanitizer, where every tensor is an allocation of its own."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if (sanitizer := shutil.which("compute-sanitizer")) is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    test = f"{test_batches_of_1_31_and_32.__name__} and cuda"
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q"]
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:xdist", __file__, "-k", test],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "8 passed" in result.stdout and "ERROR SUMMARY: 0 errors" in result.stdout
