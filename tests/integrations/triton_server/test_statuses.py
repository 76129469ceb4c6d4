# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a request has the status INVALID_ARGUMENT on gRPC streams that ask for statuses."""

import pytest

from .bad_requests import JSON, TENSORS, tensors_of
from .clients import Client, InferenceServerException
from .serving import DEADLINE, Launched, write_repository

pytestmark = pytest.mark.timeout(DEADLINE + 60)


class Servers:
    """One after the other: 2.51 now and then crashes in its own front under a stream that follows one which ended with
    a status.
    """

    def __init__(self, folder):
        self._folder, self._started = folder, 0
        self._repository = write_repository(folder / "models", context=512, max_batch=2)
        self._server = self._start()

    def _start(self) -> Launched:
        self._started += 1
        return Launched(self._repository, self._folder / f"log {self._started}").__enter__()

    def status_of(self, kind: str) -> tuple[str, str]:
        """And the message. Asks again if the server has crashed, a new one, which has had no such stream yet."""
        status, message = self._ask(kind)
        if status == "StatusCode.UNAVAILABLE" and self._server.wait(30) == 1:
            self.end()
            self._server = self._start()
            status, message = self._ask(kind)
        return status, message

    def _ask(self, kind: str) -> tuple[str, str]:
        with Client(self._server.grpc, strict=True) as client:
            tensors, _ = tensors_of(client, kind)
            try:
                client.send(tensors)
            except InferenceServerException:
                pass  # the stream has ended already: `receive` says how
            with pytest.raises(InferenceServerException) as error:
                client.receive(30)
        return error.value.status(), error.value.message()

    def end(self) -> None:
        self._server.end()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    servers = Servers(tmp_path_factory.mktemp("statuses"))
    yield servers
    servers.end()


@pytest.mark.parametrize("kind", [*JSON, *TENSORS])
def test_bad_requests_are_invalid_arguments(servers, kind):
    status, message = servers.status_of(kind)
    # A tensor whose dtype is wrong does not get to the model, and the server itself never gives a status on a stream.
    assert status == ("StatusCode.INVALID_ARGUMENT" if kind != "wrong dtype" else None)
    assert (JSON | TENSORS)[kind][1] in message
