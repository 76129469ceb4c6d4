# SPDX-License-Identifier: Apache-2.0
"""From a `nemotron_h` checkpoint to a TensorRT engine with ReplaySSM plugins, by way of ONNX. No GPU is needed.

from trtllm_replayssm.builder import EngineConfig, build
build("examples/tiny-nemotron-h", "engine", EngineConfig(max_batch=4, draft_tokens=3))
"""
