# SPDX-License-Identifier: Apache-2.0
"""Generates text: from a `nemotron_h` checkpoint, torch for the dense layers and our ops for Mamba (Engine), or by an
engine folder's graphs (EngineRunner).

    from trtllm_replayssm.runtime import Engine, SamplingParams
    engine = Engine("examples/tiny-nemotron-h")
    print(engine.generate(["In the beginning"], SamplingParams(max_tokens=64))[0].text)

A request's way: Engine.add_request → Scheduler (waits for a slot) → Pipeline → Runner: prompt chunks, then steps of one
token or, with a Drafter, of several → text. On a GPU the Pipeline launches a pass before the tokens of the last one are
on the host; the Frontier has them on the device. Memory holds what sequences remember: a StatePool slot for the Mamba
layers and KVCache rows for attention. EngineRunner has a GraphRunner, whose Executor runs the graphs, and a GraphMemory
in their places.
"""

from .drafter import Drafter
from .engine import Engine, Piece
from .engine_runner import EngineRunner
from .executor import ExecutorError
from .model_config import CheckpointError, ModelConfig
from .sampler import SamplingParams
from .sequence import Sequence
from .verification import Acceptance

__all__ = [
    "Acceptance",
    "CheckpointError",
    "Drafter",
    "Engine",
    "EngineRunner",
    "ExecutorError",
    "ModelConfig",
    "Piece",
    "SamplingParams",
    "Sequence",
]
