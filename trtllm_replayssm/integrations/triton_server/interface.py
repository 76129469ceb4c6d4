# SPDX-License-Identifier: Apache-2.0
"""Names, types and shapes of requests and responses: those of TensorRT-LLM's two Triton templates.

"llmapi" is the model `tensorrt_llm` of the current template. "ensemble" is the text front of the older engine
templates (models `ensemble` and `tensorrt_llm_bls`), whose tensors have a batch dimension, of 1 here. Their clients
work unchanged; an input that asks for what this runtime cannot do is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...runtime.sampler import SamplingParams

NUMPY_TYPES = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
_PREFIX = "sampling_param_"


@dataclass(frozen=True)
class Input:
    """An input tensor of one value or, if `many`, of any number.

    field: what it sets in a Wish or in its SamplingParams; "" for nothing.
    neutral: where it sets nothing, the values that ask for nothing; any other is refused. None: every value does.
    """

    name: str
    type: str
    field: str = ""
    neutral: tuple | None = None
    many: bool = False
    required: bool = False


@dataclass(frozen=True)
class Output:
    name: str
    type: str


@dataclass(frozen=True)
class Wish:
    """A request as it was read. stop_request: it only ends the running ones of the same id. echo: the prompt stands
    before the text.
    """

    prompt: str
    params: SamplingParams
    stream: bool
    stop_request: bool
    echo: bool


@dataclass(frozen=True)
class Interface:
    """name: what `--interface` calls it. model: the name that its clients ask for. batched: tensors have a leading
    dimension of 1. cumulative: a streamed response has the whole text so far, rather than what is new.
    """

    name: str
    model: str
    batched: bool
    cumulative: bool
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: tuple[str, ...] = ()  # outputs that are 0 in every response with a text

    def read(self, tensors: Iterable[tuple[str, np.ndarray]], parameters: str) -> Wish:
        """tensors: name and values of each input that was given. parameters: JSON of the request's parameters, where
        HTTP's `generate` puts the keys that are no input; a known name without its prefix is meant there.

        ValueError or TypeError names the input, what was given and what is expected.
        """
        inputs = {each.name: each for each in self.inputs}
        given = {name: _values(inputs[name], array) for name, array in tensors}
        for name, value in json.loads(parameters or "{}").items():
            if name.startswith("triton_"):
                continue
            known = next((known for known in (name, _PREFIX + name) if known in inputs), None)
            if known is None:
                raise ValueError(f"{name}: no input of this model, expected among {', '.join(inputs)}")
            given.setdefault(known, value if isinstance(value, list) else [value])
        for each in self.inputs:
            if each.required and each.name not in given:
                raise ValueError(f"{each.name} is missing")
        fields = {}
        for name, values in given.items():
            each = inputs[name]
            if each.field:
                fields[each.field] = tuple(values) if each.many else values[0]
            elif each.neutral is not None and any(value not in each.neutral for value in values):
                raise ValueError(f"{name} is {values[0]!r}: not supported, expected {each.neutral[0]!r} or nothing")
        prompt, stop_request = fields.pop("prompt"), bool(fields.pop("stop_request", False))
        if not isinstance(prompt, str):
            raise TypeError(f"text_input is {prompt!r}, expected a text")
        if not prompt and not stop_request:
            raise ValueError("text_input is empty, expected a text")
        if (end := fields.pop("end_id", -1)) >= 0:
            fields["stop_tokens"] = (end,)
        return Wish(
            prompt,
            stream=bool(fields.pop("stream", False)),
            stop_request=stop_request,
            echo=fields.pop("exclude", True) is False,
            params=SamplingParams(**fields | {"stop": tuple(text for text in fields.get("stop", ()) if text)}),
        )

    def array(self, output: str, value) -> np.ndarray:
        """`value` as the tensor of that output."""
        kind = next(each.type for each in self.outputs if each.name == output)
        array = np.array([value.encode() if isinstance(value, str) else value], NUMPY_TYPES[kind])
        return array[None] if self.batched else array


def _values(each: Input, array: np.ndarray) -> list:
    values = array.reshape(-1).tolist()
    if not each.many and len(values) != 1:
        raise ValueError(f"{each.name} has shape {list(array.shape)}, expected one value")
    if each.type != "STRING":
        return values
    try:
        return [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError as error:
        raise ValueError(f"{each.name}: expected UTF-8 text, got byte {error.start} ({error.reason})") from None


_RESULTS = (
    Output("text_output", "STRING"),
    # Statistics: with the last response only.
    Output("finish_reason", "STRING"),
    Output("num_input_tokens", "INT32"),
    Output("num_output_tokens", "INT32"),
    Output("num_decode_steps", "INT32"),
    Output("total_draft_tokens", "INT32"),
    Output("total_accepted_draft_tokens", "INT32"),
    Output("acceptance_rate", "FP32"),
    Output("arrival_time_ns", "INT64"),
    Output("first_token_time_ns", "INT64"),
    Output("last_token_time_ns", "INT64"),
)

LLMAPI = Interface(
    name="llmapi",
    model="tensorrt_llm",
    batched=False,
    cumulative=True,
    inputs=(
        Input("text_input", "STRING", "prompt", required=True),
        Input("streaming", "BOOL", "stream"),
        Input("stop", "BOOL", "stop_request"),
        Input(_PREFIX + "max_tokens", "INT32", "max_tokens"),
        Input(_PREFIX + "temperature", "FP32", "temperature"),
        Input(_PREFIX + "top_k", "INT32", "top_k"),
        Input(_PREFIX + "top_p", "FP32", "top_p"),
        Input(_PREFIX + "seed", "UINT64", "seed"),
        Input(_PREFIX + "stop", "STRING", "stop", many=True),
        Input(_PREFIX + "draft_tokens", "INT32", "draft_tokens"),  # ours
        Input(_PREFIX + "best_of", "INT32", neutral=(1,)),
        Input(_PREFIX + "frequency_penalty", "FP32", neutral=(0.0,)),
        Input(_PREFIX + "presence_penalty", "FP32", neutral=(0.0,)),
        Input(_PREFIX + "exclude_input_from_output", "BOOL"),  # the text never repeats the prompt, there either
        Input(_PREFIX + "return_perf_metrics", "BOOL"),  # statistics come unasked
        Input("return_finish_reason", "BOOL"),
        Input("return_stop_reason", "BOOL", neutral=(False,)),
        Input("return_cumulative_logprob", "BOOL", neutral=(False,)),
    ),
    outputs=_RESULTS,
)

ENSEMBLE = Interface(
    name="ensemble",
    model="ensemble",
    batched=True,
    cumulative=False,
    inputs=(
        Input("text_input", "STRING", "prompt", required=True),
        Input("max_tokens", "INT32", "max_tokens", required=True),
        Input("stream", "BOOL", "stream"),
        Input("temperature", "FP32", "temperature"),
        Input("top_k", "INT32", "top_k"),
        Input("top_p", "FP32", "top_p"),
        Input("seed", "UINT64", "seed"),
        Input("stop_words", "STRING", "stop", many=True),
        Input("num_draft_tokens", "INT32", "draft_tokens"),
        Input("end_id", "INT32", "end_id"),
        Input("exclude_input_in_output", "BOOL", "exclude"),
        Input("pad_id", "INT32"),  # nothing is padded
        Input("bad_words", "STRING", neutral=("",), many=True),
        Input("length_penalty", "FP32"),  # compares beams only
        Input("repetition_penalty", "FP32", neutral=(1.0,)),
        Input("presence_penalty", "FP32", neutral=(0.0,)),
        Input("frequency_penalty", "FP32", neutral=(0.0,)),
        Input("min_tokens", "INT32", neutral=(0, 1)),
        Input("beam_width", "INT32", neutral=(1,)),
        Input("num_return_sequences", "INT32", neutral=(1,)),
        Input("return_log_probs", "BOOL", neutral=(False,)),
        Input("return_context_logits", "BOOL", neutral=(False,)),
        Input("return_generation_logits", "BOOL", neutral=(False,)),
        Input("return_perf_metrics", "BOOL"),
        Input("return_num_input_tokens", "BOOL"),
        Input("return_num_output_tokens", "BOOL"),
    ),
    outputs=(*_RESULTS, Output("batch_index", "INT32"), Output("sequence_index", "INT32")),
    constants=("batch_index", "sequence_index"),
)

INTERFACES = {each.name: each for each in (LLMAPI, ENSEMBLE)}
