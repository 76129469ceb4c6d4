# SPDX-License-Identifier: Apache-2.0
"""Runs of the command on small sizes."""

import json

import pytest
import torch

from trtllm_replayssm import SlotLayout
from trtllm_replayssm.bench import kernel
from trtllm_replayssm.bench.kernel import Case, parse_geometry
from trtllm_replayssm.cli import main

GEOMETRY = "4x16x2x64"
SMALL = ("kernel", "--geometry", GEOMETRY, "--steps", 16, "--repeats", 2, "--no-plot")
FIELDS = {
    "bench", "geometry", "batch", "tokens", "mode", "checkpoint", "read_copy", "window", "flushes", "tokens_in",
    "with_conv", "steps", "repeats",
    "us", "us_min", "us_max", "layers", "accepted_per_row_and_step", "flushes_per_step", "expected_flushes_per_step",
    "bytes_read_per_step", "bytes_written_per_step", "fraction_of_read_bandwidth", "fraction_of_copy_bandwidth",
    "read_bandwidth", "copy_bandwidth", "gpu", "device", "date", "commit", "command",
}  # fmt: skip


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


@pytest.fixture
def known_bandwidths(monkeypatch):
    monkeypatch.setattr(kernel, "bandwidths", lambda device: {"read_bandwidth": 10**9, "copy_bandwidth": 5 * 10**8})


def layout(tokens=1, checkpoint="fp32", read_copy="none"):
    return SlotLayout(parse_geometry(GEOMETRY), Case(GEOMETRY, 1, tokens, "replay", checkpoint, read_copy).config)
