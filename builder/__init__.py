# SPDX-License-Identifier: Apache-2.0
"""From a `nemotron_h` checkpoint to a TensorRT engine with ReplaySSM plugins, by way of ONNX. No GPU is needed.

from trtllm_replayssm.builder import EngineConfig, build, read
build("examples/tiny-nemotron-h", "engine", EngineConfig(max_batch=4, draft_tokens=3))
print(read("engine").state_bytes)
"""

from .assembly import build, rebuild
from .bundle import Bundle, BundleError, read
from .engine import EngineError
from .engine_config import EngineConfig
from .tensorrt_package import NoTensorRT

__all__ = ["Bundle", "BundleError", "EngineConfig", "EngineError", "NoTensorRT", "build", "read", "rebuild"]
