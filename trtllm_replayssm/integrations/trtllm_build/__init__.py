# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM 1.2.x engines with ReplaySSM layers, built by `trtllm-build` (docs/deploy-trtllm-build.md).

checkpoint.py says what the TensorRT-LLM checkpoint holds, convert.py writes it; model.py is the model class that
trtllm-build makes the network with; contract.json lists all that is relied on in TensorRT-LLM.
"""

from .checkpoint import Parallelism, TensorRtLlmCheckpoint

__all__ = ["Parallelism", "TensorRtLlmCheckpoint"]
