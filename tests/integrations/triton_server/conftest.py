# SPDX-License-Identifier: Apache-2.0
import time

import pytest

from .serving import SUITE_DEADLINE, Launched, write_repository

_began = time.monotonic()
SPECULATIVE = {"context": 512, "max_batch": 32, "speculation": "mtp"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The shipped checkpoint with up to 3 drafts a step, under both interfaces."""
    folder = tmp_path_factory.mktemp("triton")
    for interface in ("llmapi", "ensemble"):
        write_repository(folder / "models", interface=interface, **SPECULATIVE)
    with Launched(folder / "models", folder / "log") as server:
        yield server


@pytest.fixture(autouse=True)
def deadline():
    """Of all tests here together, whatever keeps each of them."""
    if time.monotonic() - _began > SUITE_DEADLINE:
        pytest.fail(f"the tests on tritonserver have taken {SUITE_DEADLINE} s")
