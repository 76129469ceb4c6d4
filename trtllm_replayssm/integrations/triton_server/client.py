# SPDX-License-Identifier: Apache-2.0
"""A gRPC client of a served model, for measurements and tests: any Triton client of the interface works as well."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tritonclient.grpc as triton

from .interface import LLMAPI, NUMPY_TYPES, Interface


@dataclass(frozen=True)
class Answer:
    """One response. text: as the interface streams it. values: its other outputs. final: no more will come. at: when it
    came, time.perf_counter().
    """

    text: str
    values: dict
    final: bool
    at: float


class Client:
    """A connection, with one stream for all its requests, of which it follows one at a time.

    strict: an error ends the stream and has its gRPC status; else it ends its request only, and is but a message.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("In the beginning", sampling_param_max_tokens=16).text)
    """

    def __init__(self, address: str, interface: Interface = LLMAPI, model: str | None = None, *, strict: bool = False):
        self._interface, self._model = interface, model or interface.model
        self._kinds = {each.name: each.type for each in interface.inputs}
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._client = triton.InferenceServerClient(address)
        self._client.start_stream(
            lambda result, error: self._answers.put((result, error, time.perf_counter())),
            headers={"triton_grpc_error": "true"} if strict else None,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self, cancel: bool = False) -> None:
        """cancel: ends what is running, rather than to wait for it."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def generate(self, prompt: str, **inputs) -> Answer:
        """The last answer of a request. Raises as `stream` does."""
        *_, last = self.stream(prompt, **inputs)
        return last

    def stream(self, prompt: str, seconds: float = 60.0, id: str = "", **inputs) -> Iterator[Answer]:
        """Answers as they come. InferenceServerException: the server's error; queue.Empty: none for so many seconds."""
        self.send(self.tensors(text_input=prompt, **inputs), id)
        while True:
            answer = self.receive(seconds)
            yield answer
            if answer.final:
                return

    def tensors(self, **inputs) -> list[triton.InferInput]:
        """Inputs by name, values of one or several."""
        made = []
        for name, value in inputs.items():
            values = np.array(value if isinstance(value, list) else [value], NUMPY_TYPES[self._kinds[name]])
            values = values[None] if self._interface.batched else values
            kind = {"STRING": "BYTES"}.get(self._kinds[name], self._kinds[name])
            made.append(triton.InferInput(name, list(values.shape), kind))
            made[-1].set_data_from_numpy(values)
        return made

    def send(self, tensors: list[triton.InferInput], id: str = "") -> None:
        self._client.async_stream_infer(self._model, tensors, request_id=id, enable_empty_final_response=True)

    def receive(self, seconds: float) -> Answer:
        result, error, at = self._answers.get(timeout=seconds)
        if error is not None:
            raise error
        response = result.get_response()
        values = {output.name: result.as_numpy(output.name).reshape(-1)[0] for output in response.outputs}
        values = {name: value.decode() if isinstance(value, bytes) else value.item() for name, value in values.items()}
        final = response.parameters["triton_final_response"].bool_param
        return Answer(values.pop("text_output", ""), values, final, at)
