# SPDX-License-Identifier: Apache-2.0
"""Triton Inference Server: `trtllm-replayssm triton-repo` and `triton-launch`.

A request's way inside the server: TritonPythonModel.execute (model.py) reads it by an Interface (interface.py) and
hands it to the Service (service.py), one thread of which steps the engine for all requests, another answers them.
repository.py writes what the server loads, server.py starts and watches it.
"""
