# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs. (test_speculation.py runs the same path without graphs on the CPU.)"""

import pytest

from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.cuda_graph import padded

from .conftest import GPU, TINY, same_text
from .prompts import PROMPTS


def test_padding():
    assert [padded(n, 24) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 24)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 24]


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("mode", ["replay", "conventional"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_single_launches_agree(device, mode, dtype):
    """A05, A15: graphs captured at one state of the cursors serve all others; requests join and leave in between."""
    texts = {}
    for graphs in (False, True):
        engine = Engine(TINY, mode=mode, device=device, dtype=dtype, max_batch=6, cuda_graphs=graphs)
        params = [SamplingParams(max_tokens=20 + 9 * index, stop_tokens=()) for index in range(len(PROMPTS))]
        texts[graphs] = engine.generate(PROMPTS, params)
        engine.memory.pool.validate()
    for one, other in zip(texts[False], texts[True], strict=True):
        same_text(engine, one, other)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("speculation", [None, "mtp"])
def test_a_graph_is_captured_once(device, speculation):
    engine = Engine(TINY, device=device, max_batch=4, context=256, speculation=speculation)
    engine.generate(PROMPTS[:4], SamplingParams(max_tokens=150, stop_tokens=()))
    captured = dict(engine._runner.graphs.captured)
    engine.generate(PROMPTS[4:8], SamplingParams(max_tokens=150, stop_tokens=()))
    assert all(engine._runner.graphs.captured[key] is graph for key, graph in captured.items())
