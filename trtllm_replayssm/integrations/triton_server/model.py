# SPDX-License-Identifier: Apache-2.0
"""The Python-backend model that Triton loads: reads requests, hands them to the Service, sends what it answers.

Imported in the process that Triton starts for a model, where `triton_python_backend_utils` exists.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from .interface import INTERFACES
from .metrics import Metrics
from .service import Overloaded, Request, Service
from .settings import Settings


class TritonPythonModel:
    def initialize(self, args: dict) -> None:
        check_numbers()
        name = args["model_name"]
        parameters = json.loads(args["model_config"])["parameters"]
        try:
            settings = Settings.read({key: value["string_value"] for key, value in parameters.items()})
            engine = settings.engine()
        except (ValueError, TypeError, ImportError, OSError, RuntimeError, MemoryError) as error:
            raise pb_utils.TritonModelException(f"model {name!r}: {error}") from None
        self._interface = INTERFACES[settings.interface]
        slots = engine.memory.pool.num_slots
        pb_utils.Logger.log_info(f"model {name!r}: mode {engine.mode}, {slots} sequences at once, on {engine.device}")
        metrics = Metrics(pb_utils, name, slots)
        log = lambda text: pb_utils.Logger.log_error(f"model {name!r}: {text}")  # noqa: E731
        self._service = Service(engine, settings.max_waiting, metrics.publish, log)

    def execute(self, requests: list) -> None:
        for request in requests:
            client = _Client(request, self._interface)
            try:
                tensors = [(tensor.name(), tensor.as_numpy()) for tensor in request.inputs()]
                wish = self._interface.read(tensors, request.parameters())
                client.stream, client.echo = wish.stream, wish.prompt if wish.echo else ""
                if wish.stop_request:
                    self._service.cancel(request.request_id())
                    client.send({}, final=True)
                    continue
                tokens = self._service.encode(wish.prompt)
                self._service.submit(Request(client, request.request_id(), tokens, wish.params))
            except Exception as error:
                self._service.refused()
                client.failed(error)

    def finalize(self) -> None:
        """Triton calls this when the last answer is out."""
        self._service.stop()


class _Client:
    """Answers one request. What cannot be sent is dropped, and its sender counts as gone."""

    def __init__(self, request, interface):
        self._sender = request.get_response_sender()
        self._interface = interface
        self._gone = False
        self.stream, self.echo = False, ""

    def grown(self, text: str, first: int) -> None:
        if self.stream:
            self.send({"text_output": self._text(text, first)}, final=False)

    def finished(self, request) -> None:
        if request.sequence.finish_reason == "cancelled":
            return self._fail(pb_utils.TritonError("the request was cancelled", pb_utils.TritonError.CANCELLED))
        sequence = request.sequence
        acceptance = sequence.acceptance
        self.send(
            {
                "text_output": self._text(request.text, request.given),
                "finish_reason": sequence.finish_reason,
                "num_input_tokens": len(sequence.prompt),
                "num_output_tokens": len(sequence.tokens),
                "num_decode_steps": acceptance.steps,
                "total_draft_tokens": acceptance.drafts,
                "total_accepted_draft_tokens": acceptance.accepted,
                "acceptance_rate": acceptance.rate,
                "arrival_time_ns": request.arrived,
                "first_token_time_ns": request.first_token,
                "last_token_time_ns": request.last_token,
            },
            final=True,
        )

    def failed(self, error: Exception) -> None:
        kind = pb_utils.TritonError.INTERNAL
        if isinstance(error, (ValueError, TypeError)):
            kind = pb_utils.TritonError.INVALID_ARG
        elif isinstance(error, Overloaded):
            kind = pb_utils.TritonError.UNAVAILABLE
        self._fail(pb_utils.TritonError(str(error), kind))

    def left(self) -> bool:
        return self._gone or self._sender.is_cancelled()

    def _text(self, text: str, first: int) -> str:
        if not self.stream or self._interface.cumulative:
            return self.echo + text
        return text[first:] if first else self.echo + text

    def send(self, values: dict, final: bool) -> None:
        values = values | {name: 0 for name in self._interface.constants} if values else {}
        tensors = [pb_utils.Tensor(name, self._interface.array(name, value)) for name, value in values.items()]
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), final)

    def _fail(self, error) -> None:
        self._send(pb_utils.InferenceResponse(error=error), final=True)

    def _send(self, response, final: bool) -> None:
        try:
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
        except Exception as error:
            pb_utils.Logger.log_warn(f"an answer could not be sent: {error}")
            self._gone = True


def check_numbers() -> None:
    """Older builds of Triton's Python backend silently corrupt numbers under numpy 2: refuses to go on with such."""
    expected = torch.tensor([[3, -1], [2**31 - 1, 7]], dtype=torch.int32)
    # DLPack hands over the bytes alone, as the server does; a Tensor made of an array would just return it.
    given = pb_utils.Tensor.from_dlpack("probe", torch.utils.dlpack.to_dlpack(expected)).as_numpy()
    if given.dtype != np.int32 or given.tolist() != expected.tolist():
        raise pb_utils.TritonModelException(
            f"numpy {np.__version__}: this build of Triton's Python backend reads the tensor {expected.tolist()} as "
            f"{given.tolist()}; install numpy < 2 in {sys.prefix}"
        )
