# SPDX-License-Identifier: Apache-2.0
"""The trtllm-serve adapter on doubles of TensorRT-LLM, a profile at a time, with the real ops."""

import importlib

import doubles
import pytest
from doubles.shared import Mamba2Metadata
from serving import Server

PACKAGE = "trtllm_replayssm.integrations.trtllm_serve"


@pytest.fixture
def serve(monkeypatch):
    """A function that puts up TensorRT-LLM of a profile, installs ReplaySSM and starts a server."""
    for name in ("TRTLLM_USE_MAMBA_REPLAY", "TRTLLM_USE_PY_MAMBA"):
        monkeypatch.setenv(name, "")  # so that what install sets is undone
        monkeypatch.delenv(name)

    def start(profile, environment=(), **options):
        for name, value in dict(environment).items():
            monkeypatch.setenv(f"TRTLLM_REPLAYSSM{name}", value)
        doubles.make_package(profile)
        importlib.import_module(f"{PACKAGE}.model")
        model, manager = (importlib.import_module(name) for name in (doubles.MODEL, doubles.MANAGER))
        metadata = lambda rows, chunk: Mamba2Metadata(rows, chunk, profile == "C")  # noqa: E731
        return Server(profile, model, manager, metadata, **options)

    yield start
    doubles.drop_package()


def decoder_of(server):
    return getattr(server.manager, "_impl", server.manager)._replayssm


@pytest.mark.parametrize("profile, drafts", [("A", None), ("B", 3), ("C", 3)])
def test_500_steps_are_the_oracles(serve, profile, drafts):
    server = serve(profile, drafts=drafts)
    for _ in range(500):
        server.step()
    print(server.worst, server.counts, decoder_of(server).pool.stats())
    assert server.worst < 1e-5
