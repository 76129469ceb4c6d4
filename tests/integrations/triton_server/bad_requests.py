# SPDX-License-Identifier: Apache-2.0
"""Requests of the llmapi interface that are refused with INVALID_ARGUMENT, each with what its error says."""

import math

import numpy as np
from runtime.prompts import PROMPTS

from .clients import Client, triton

PROMPT = PROMPTS[0]
LONG = "and it came to pass " * 600

JSON = {
    "missing": ({"sampling_param_max_tokens": 3}, "text_input is missing"),
    "empty": ({"text_input": ""}, "text_input is empty"),
    "negative max_tokens": (
        {"text_input": PROMPT, "sampling_param_max_tokens": -1},
        "max_tokens is -1, expected at least 1",
    ),
    "too many tokens": ({"text_input": PROMPT, "sampling_param_max_tokens": 513}, "more than the context of 512"),
    "too long": ({"text_input": LONG}, "more than the context of 512"),
    "1 MB": ({"text_input": "x" * 2**20}, "1048576 characters, more than the context of 512 tokens can hold"),
    "NaN temperature": (
        {"text_input": PROMPT, "sampling_param_temperature": math.nan},
        "temperature is nan, expected a finite number",
    ),
    "range": ({"text_input": PROMPT, "sampling_param_top_p": 1.5}, "top_p is 1.5"),
    "drafts": ({"text_input": PROMPT, "sampling_param_draft_tokens": 4}, "draft_tokens is 4, expected at most the"),
    "unsupported": ({"text_input": PROMPT, "sampling_param_best_of": 2}, "sampling_param_best_of is 2: not supported"),
}
TENSORS = {  # what JSON cannot say: (name, dtype, array), besides the prompt if it is not the prompt
    "wrong dtype": (
        ("sampling_param_max_tokens", "FP32", np.array([4], np.float32)),
        "'sampling_param_max_tokens' data-type is 'FP32'",  # the server's own answer
    ),
    "no UTF-8": (
        ("text_input", "BYTES", np.array([b"\xe4pfel"], object)),
        "text_input: expected UTF-8 text, got byte 0",
    ),
    "two prompts": (
        ("text_input", "BYTES", np.array([b"a", b"b"], object)),
        "text_input has shape [2], expected one value",
    ),
}


def tensors_of(client: Client, kind: str) -> tuple[list[triton.InferInput], str]:
    """A bad request for gRPC, and what its error says."""
    if kind in JSON:
        inputs, message = JSON[kind]
        return client.tensors(**inputs), message
    (name, dtype, array), message = TENSORS[kind]
    tensor = triton.InferInput(name, list(array.shape), dtype)
    tensor.set_data_from_numpy(array)
    return [tensor, *(client.tensors(text_input=PROMPT) if name != "text_input" else [])], message
