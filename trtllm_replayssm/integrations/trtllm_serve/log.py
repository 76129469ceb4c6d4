# SPDX-License-Identifier: Apache-2.0
"""Messages go where TensorRT-LLM's go."""

try:
    from tensorrt_llm.logger import logger
except ModuleNotFoundError:  # outside of a server
    import logging

    logger = logging.getLogger("trtllm_replayssm")
