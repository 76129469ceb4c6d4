# SPDX-License-Identifier: Apache-2.0
"""Runs of the command on small sizes."""

import json

import pytest
import torch

from trtllm_replayssm.cli import main


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def bench(capsys):
    """bench(*arguments, code=0, device="cpu"): what the command printed: stdout, with --json as objects, and stderr."""

    def run(*arguments, code=0, device="cpu"):
        given = main(["bench", *map(str, arguments), "--device", device])
        out, err = capsys.readouterr()
        assert given == code, err
        return json.loads(out) if "--json" in arguments else out, err

    return run
