# SPDX-License-Identifier: Apache-2.0
import time

import pytest
from runtime.conftest import GPU

from .serving import SUITE_DEADLINE, Launched, write_repository

_began = time.monotonic()
SPECULATIVE = {"context": 512, "max_batch": 32, "speculation": "mtp"}


def _launched(folder, **settings):
    """The shipped checkpoint with up to 3 drafts a step, under both interfaces."""
    for interface in ("llmapi", "ensemble"):
        write_repository(folder / "models", interface=interface, **SPECULATIVE, **settings)
    return Launched(folder / "models", folder / "log")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with _launched(tmp_path_factory.mktemp("triton")) as server:
        yield server


@pytest.fixture(scope="module")
def gpu_server(tmp_path_factory):
    with _launched(tmp_path_factory.mktemp("triton"), device="cuda", dtype="float32") as server:
        yield server


@pytest.fixture(params=["cpu", GPU])
def device(request):
    """Where the model of `any_server` runs."""
    return request.param


@pytest.fixture
def any_server(request, device):
    return request.getfixturevalue("server" if device == "cpu" else "gpu_server")


@pytest.fixture(autouse=True)
def deadline():
    """Of all tests here together, whatever keeps each of them."""
    if time.monotonic() - _began > SUITE_DEADLINE:
        pytest.fail(f"the tests on tritonserver have taken {SUITE_DEADLINE} s")
