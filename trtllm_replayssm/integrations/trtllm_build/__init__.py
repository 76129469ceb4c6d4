# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM 1.2.x engines with ReplaySSM layers, built by `trtllm-build` (docs/deploy-trtllm-build.md).

shards.py says what goes into the TensorRT-LLM checkpoint, convert.py writes it; model.py is the model class that
trtllm-build makes the network with; contract.json lists all that is relied on in TensorRT-LLM.
"""
