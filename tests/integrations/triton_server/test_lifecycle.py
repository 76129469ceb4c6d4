# SPDX-License-Identifier: Apache-2.0
"""Servers that end, are killed and cannot start; clients that leave."""

import itertools
import os
import shutil
import signal
import sys
import time
import urllib.error
from collections.abc import Callable

import numpy
import pytest
from runtime.prompts import PROMPTS

from trtllm_replayssm.integrations.triton_server.repository import write_model
from trtllm_replayssm.integrations.triton_server.settings import Settings
from trtllm_replayssm.runtime import SamplingParams

from .clients import Client, InferenceServerException
from .serving import DEADLINE, TINY, Launched, ended, server_python, write_repository
from .solo import solo

pytestmark = pytest.mark.timeout(DEADLINE + 60)

PROMPT = PROMPTS[0]
# Steps of 15 drafts each, one pass of the MTP head after the other: slow enough to be counted from outside.
SLOW = {"context": 512, "max_batch": 1, "max_waiting": 1, "speculation": "mtp", "draft_tokens": 15}


@pytest.fixture
def slow(tmp_path):
    """Started in a folder with a module that models import, as a checkout has them."""
    (tmp_path / "tokenizers.py").write_text("raise ImportError('in the folder that the server was started in')")
    with Launched(write_repository(tmp_path / "models", **SLOW), tmp_path / "log", cwd=tmp_path) as server:
        yield server


def test_who_leaves_frees_the_slot_within_8_steps(slow):
    """The only slot: the next in line starts once it is free. What both wrote is counted."""
    with Client(slow.grpc) as waiting:
        counted = [slow.metrics_when(lambda metrics: ended(metrics) == 1)]  # the probe

        def steps(answered: int) -> int:
            counted.append(slow.metrics_when(lambda metrics: ended(metrics) == answered))
            return counted[-1]["decode_steps_total"] - counted[-2]["decode_steps_total"]

        waiting.generate(PROMPT, sampling_param_max_tokens=8)
        alone = steps(2)
        for number, front in enumerate(("grpc", "http")):
            leaving = Client(slow.grpc)
            if front == "grpc":
                answers = leaving.stream(PROMPT, sampling_param_max_tokens=480, streaming=True)
            else:
                answers = slow.stream(text_input=PROMPT, sampling_param_max_tokens=480, streaming=True)
            next(answers)
            waiting.send(waiting.tensors(text_input=PROMPT, sampling_param_max_tokens=8))
            seen = 1 + len(list(itertools.islice(answers, 9)))
            answers.close()
            leaving.close(cancel=True)
            assert waiting.receive(30).text == solo(PROMPT, SamplingParams(max_tokens=8)).text
            # The first response has the prompt's token, each other one a step or more: some end inside a character.
            assert seen - 1 <= steps(4 + 2 * number) - alone <= seen - 1 + 8
        assert counted[-1]["requests_total cancelled"] == 2


@pytest.mark.parametrize("front", ["grpc", "http"])
def test_sigterm_lets_a_stream_finish_and_refuses_new_work(slow, front):
    """tritonserver closes its fronts one after the other, HTTP first: each refuses once it is its turn."""
    expected = solo(PROMPT, SamplingParams(max_tokens=200, stop_tokens=())).text
    if front == "http":
        answers = slow.stream(text_input=PROMPT, sampling_param_max_tokens=200, streaming=True)
        next(answers)
        slow.process.terminate()
        time.sleep(0.5)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            slow.generate(text_input=PROMPT, max_tokens=1)
        assert list(answers)[-1]["text_output"] == expected
    else:
        with Client(slow.grpc) as client, Client(slow.grpc) as other:
            answers = client.stream(PROMPT, sampling_param_max_tokens=200, streaming=True)
            next(answers)
            slow.process.terminate()
            time.sleep(0.5)
            with pytest.raises(InferenceServerException):
                other.generate(PROMPT, sampling_param_max_tokens=1)
            assert list(answers)[-1].text == expected
    assert slow.wait() == 0
    assert slow.left() == []


def test_streams_that_stay_open_do_not_keep_it_alive(tmp_path):
    """tritonserver itself would wait for ever."""
    with Launched(write_repository(tmp_path / "models", **SLOW), tmp_path / "log", "--exit-timeout=1") as server:
        with Client(server.grpc) as client:
            client.generate(PROMPT, sampling_param_max_tokens=1)
            server.process.terminate()
            assert server.wait() == 1
        assert server.left() == []
    assert "connections stayed open: tritonserver was killed" in (tmp_path / "log").read_text()


def test_streams_that_stay_open_when_the_launcher_is_killed(tmp_path):
    """Nobody is there to kill the server but its guardian."""
    options = write_repository(tmp_path / "models", **SLOW), tmp_path / "log", "--exit-timeout=1"
    with Launched(*options, TMPDIR=str(tmp_path)) as server:
        with Client(server.grpc) as client:
            client.generate(PROMPT, sampling_param_max_tokens=1)
            os.kill(server.launcher, signal.SIGKILL)
            assert server.left(15) == []
    assert list(tmp_path.glob("replayssm-triton-*")) == []


def test_sigterm_while_models_load(tmp_path):
    server = Launched(write_repository(tmp_path / "models", **SLOW), tmp_path / "log", "--exit-timeout=1")
    try:
        while not server.running("triton_python_backend_stub"):
            time.sleep(0.01)
        server.process.terminate()
        assert server.wait(20) == 0
    finally:
        server.end()
    assert "ready: " not in (tmp_path / "log").read_text()


def test_kill_9_and_restart(tmp_path):
    """The server's ports and shared memory are free again, whoever was killed."""
    repository = write_repository(tmp_path / "models", **SLOW)
    ports = None
    for victim in ("tritonserver", "launcher"):
        with Launched(repository, tmp_path / victim, ports=ports) as server:
            ports = server.ports
            with Client(server.grpc) as client:
                answers = client.stream(PROMPT, sampling_param_max_tokens=480, streaming=True)
                next(answers)
                os.kill(server.launcher if victim == "launcher" else server.pid_of(victim), signal.SIGKILL)
                client.close(cancel=True)
            assert server.wait() == (1 if victim == "tritonserver" else -signal.SIGKILL)
            assert server.left(15) == []
    assert "tritonserver ended by itself with -9" in (tmp_path / "tritonserver").read_text()


def test_who_comes_when_the_line_is_full_is_told_so(slow):
    with Client(slow.grpc) as running, Client(slow.grpc) as waiting:
        answers = running.stream(PROMPT, sampling_param_max_tokens=480, streaming=True)
        next(answers)
        waiting.send(waiting.tensors(text_input=PROMPT, sampling_param_max_tokens=8))
        slow.metrics_when(lambda metrics: metrics["requests_waiting"] == 1)
        status, answer = slow.generate(text_input=PROMPT)
        assert (status, answer["error"]) == (400, "1 requests wait already: come again later")
        running.close(cancel=True)
        assert waiting.receive(30).text == solo(PROMPT, SamplingParams(max_tokens=8)).text


def test_dead_model_process_is_noticed(tmp_path):
    """The server calls a model ready whose process is gone, or, if that held a lock just then, ends itself."""
    repository = write_repository(tmp_path / "models", **SLOW)
    with Launched(repository, tmp_path / "log", "--probe-interval=1", "--exit-timeout=1") as server:
        os.kill(server.pid_of("triton_python_backend_stub"), signal.SIGKILL)
        assert server.wait(60) == 1
        assert server.left() == []
    log = (tmp_path / "log").read_text()
    assert "Stub process 'tensorrt_llm_0_0' is not healthy" in log or (
        "interprocess::lock_exception" in log and "tritonserver ended by itself with -6" in log
    )


def test_broken_models_are_reported_by_name(tmp_path):
    """All of them, each with its reason; the server that could not load them is ended."""
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint")
    models = tmp_path / "models"

    def write(name: str, change: Callable[[str], str] = str, **settings) -> None:
        write_model(models, name, Settings(str(checkpoint), device="cpu", max_batch=1, **settings))
        config = models / name / "config.pbtxt"
        config.write_text(change(config.read_text()))

    write("truncated")
    write("tree", lambda text: text.replace('"ngram"', '"tree"'), speculation="ngram")
    write("unknown", lambda text: text + "nonsense: 1\n")
    os.truncate(checkpoint / "model.safetensors", 1000)
    server = Launched(models, tmp_path / "log")
    try:
        assert server.wait() == 2
    finally:
        server.end()
    (error,) = [
        line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("trtllm-replayssm: error")
    ]
    for name, reason in (
        ("truncated", f"{checkpoint / 'model.safetensors'}: not a complete safetensors file"),
        ("unknown", "its config.pbtxt was not accepted"),
        ("tree", "speculation 'tree' drafts trees, which ReplaySSM cannot verify"),
    ):
        reported = error[error.index(f"model {name!r} could not be loaded") :]
        assert reason in reported.split("; model ")[0]


def test_library_that_computes_wrong_is_refused(tmp_path, wrong_libm):
    """A29: the model's self-test, on a machine whose exponentials are off by 1e-4."""
    server = Launched(write_repository(tmp_path / "models"), tmp_path / "log", LD_PRELOAD=str(wrong_libm))
    try:
        assert server.wait() == 2
    finally:
        server.end()
    error = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("trtllm-replayssm: error")]
    assert "model 'tensorrt_llm' could not be loaded" in error[0]
    assert "self-test on the CPU: conv_step has a relative error of" in error[0]


def test_numpy_that_corrupts_numbers_is_refused(tmp_path):
    """The stub embeds the launcher's Python: here that of these tests."""
    if int(numpy.__version__.split(".")[0]) < 2:
        pytest.skip(f"the Python of these tests has numpy {numpy.__version__}: nothing to refuse")
    packages = server_python().parents[1].glob("lib/python3*/site-packages")
    repository = write_repository(tmp_path / "models")
    server = Launched(repository, tmp_path / "log", python=sys.executable, PYTHONPATH=str(next(packages)))
    try:
        assert server.wait() == 2
    finally:
        server.end()
    error = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("trtllm-replayssm: error")]
    assert "reads the tensor [[3, -1], [2147483647, 7]] as" in error[0] and "install numpy < 2" in error[0]
