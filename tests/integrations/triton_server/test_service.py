# SPDX-License-Identifier: Apache-2.0
"""The loop of a served engine, without a server: who is told what, and when a slot is free."""

import queue
import threading
import time

import pytest
from runtime.prompts import PROMPTS

from trtllm_replayssm.integrations.triton_server.service import Overloaded, Request, Service
from trtllm_replayssm.runtime import Drafter, Engine, SamplingParams

from .serving import TINY
from .solo import solo


class Client:
    """Leaves after `patience` texts."""

    def __init__(self, patience=None):
        self.patience, self.texts, self.end = patience, [], queue.SimpleQueue()

    def grown(self, text, first):
        assert first == len("".join(self.texts))
        self.texts.append(text[first:])

    def finished(self, request):
        self.end.put(request)

    def failed(self, error):
        self.end.put(error)

    def left(self):
        return self.patience is not None and len(self.request.sequence.tokens) >= self.patience


class Held(Engine):
    """Waits before each step until it may go."""

    def __init__(self, **options):
        super().__init__(TINY, device="cpu", context=512, **options)
        self.go = threading.Event()
        self.go.set()

    def step(self):
        self.go.wait(30)
        return super().step()


@pytest.fixture
def serve():
    services = []

    def make(max_waiting=100, **options):
        published, log = [], []
        service = Service(Held(**options), max_waiting, lambda *values: published.append(values), log.append)
        service.published, service.log = published, log
        services.append(service)
        return service

    yield make
    for service in services:
        service.engine.go.set()
        service.stop()
        assert not service._thread.is_alive()


def ask(service, client, prompt=PROMPTS[0], id="", **params):
    client.request = Request(client, id, service.encode(prompt), SamplingParams(stop_tokens=(), **params))
    service.submit(client.request)


@pytest.mark.parametrize("patience", [1, 2, 3, 4, 5, 17])
def test_who_leaves_frees_the_slot_within_8_steps(serve, patience):
    service = serve(max_batch=1)
    service.engine.go.clear()
    leaving, waiting = Client(patience), Client()
    ask(service, leaving, max_tokens=400)
    ask(service, waiting, max_tokens=4)
    service.engine.go.set()
    sequence = leaving.end.get(timeout=30).sequence
    assert sequence.finish_reason == "cancelled"
    assert patience <= len(sequence.tokens) <= patience + 8
    assert waiting.end.get(timeout=30).text == solo(PROMPTS[0], SamplingParams(max_tokens=4, stop_tokens=())).text


def test_who_waits_and_leaves_is_taken_out_of_the_line(serve):
    service = serve(max_batch=1)
    gone, running = Client(0), Client()
    ask(service, running, max_tokens=100)
    ask(service, gone, max_tokens=5)
    assert gone.end.get(timeout=30).sequence.tokens == []
    assert len(running.end.get(timeout=30).sequence.tokens) == 100


def test_more_than_max_waiting_are_told_to_come_later(serve):
    service = serve(max_waiting=2, max_batch=1)
    service.engine.go.clear()
    clients = [Client() for _ in range(5)]
    for client in clients:
        ask(service, client, max_tokens=3)
    service.engine.go.set()
    ends = [client.end.get(timeout=30) for client in clients]
    assert [isinstance(end, Overloaded) for end in ends] == [False] * 3 + [True] * 2
    assert "2 requests wait already" in str(ends[-1])


def test_growing_text_and_statistics(serve):
    service = serve(max_batch=2, speculation="mtp")
    client = Client()
    ask(service, client, max_tokens=40)
    request = client.end.get(timeout=30)
    assert request.text == solo(PROMPTS[0], SamplingParams(max_tokens=40, stop_tokens=())).text
    assert request.text.startswith("".join(client.texts)) and request.given == len("".join(client.texts))
    service.stop()
    statistics, running, waiting, ended = service.published[-1]
    assert (running, waiting, ended["length"], sum(ended.values())) == (0, 0, 1, 1)
    assert statistics["generated_tokens"] == 40
    assert statistics["decode_steps"] == request.sequence.acceptance.steps < 39


def test_refused_requests_harm_nobody(serve):
    service = serve(max_batch=1)
    running, bad = Client(), Client()
    ask(service, running, max_tokens=30)
    ask(service, bad, max_tokens=513)
    ask(service, bad, draft_tokens=1)
    assert "more than the context of 512" in str(bad.end.get(timeout=30))
    assert "draft_tokens is 1" in str(bad.end.get(timeout=30))
    with pytest.raises(ValueError, match="1000000 characters, more than the context of 512 tokens can hold"):
        service.encode("a" * 1_000_000)
    assert len(running.end.get(timeout=30).sequence.tokens) == 30


def test_failed_step_fails_its_requests_only(serve):
    service = serve(max_batch=2)
    service.engine.go.clear()
    client = Client()
    ask(service, client, max_tokens=30)
    runner, prompts = service.engine._runner, service.engine._runner.prompts

    def broken(*arguments):
        runner.prompts = prompts
        raise MemoryError("no memory")

    runner.prompts = broken
    service.engine.go.set()
    error = client.end.get(timeout=30)
    assert isinstance(error, MemoryError)
    assert service.log == ["a step failed: MemoryError: no memory"]
    ask(service, client, max_tokens=30)
    assert len(client.end.get(timeout=30).sequence.tokens) == 30


def test_text_that_ends_in_a_step_that_fails_for_another(serve):
    class Failing(Drafter):
        def propose(self, sequence, count):
            if sequence.request_id == 1 and len(sequence.tokens) == 3:
                raise ValueError("no draft")
            return []

    service = serve(max_batch=2, speculation=Failing())
    service.engine.go.clear()
    whole, failing = Client(), Client()
    ask(service, whole, max_tokens=3)
    ask(service, failing, max_tokens=30)
    service.engine.go.set()
    assert str(failing.end.get(timeout=30)) == "no draft"
    request = whole.end.get(timeout=30)
    assert request.text == solo(PROMPTS[0], SamplingParams(max_tokens=3, stop_tokens=())).text
    assert request.first_token < request.last_token


def test_outcomes_that_do_not_come_fail_their_requests(serve, monkeypatch):
    """Where passes run ahead of the host, the statistics that are published between two steps may wait for them."""
    monkeypatch.setattr("trtllm_replayssm.integrations.triton_server.service._PUBLISH_SECONDS", 0.0)
    service = serve(max_batch=1)
    runner, decode = service.engine._runner, service.engine._runner.decode

    def broken():
        raise RuntimeError("the device is gone")

    runner.together, runner.decode = True, lambda *arguments: decode(*arguments) and broken
    client = Client()
    ask(service, client, max_tokens=30)
    assert str(client.end.get(timeout=30)) == "the device is gone"
    runner.decode = decode
    ask(service, client, max_tokens=30)
    assert len(client.end.get(timeout=30).sequence.tokens) == 30


def test_engine_that_keeps_failing_fails_its_requests(serve, monkeypatch):
    """Nobody waits for ever, and whoever comes next is served."""
    service = serve(max_batch=1)
    service.engine.go.clear()
    running, waiting = Client(), Client()
    ask(service, running, max_tokens=30)
    ask(service, waiting, max_tokens=30)

    def broken():
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "step", broken)
        service.engine.go.set()
        assert str(running.end.get(timeout=30)) == str(waiting.end.get(timeout=30)) == "the device is gone"
    ask(service, running, max_tokens=30)
    assert len(running.end.get(timeout=30).sequence.tokens) == 30


def test_cancelling_by_id(serve):
    service = serve(max_batch=2)
    service.engine.go.clear()
    one, other = Client(), Client()
    ask(service, one, id="one", max_tokens=300)
    ask(service, other, id="other", max_tokens=20)
    service.cancel("one")
    service.engine.go.set()
    assert one.end.get(timeout=30).sequence.finish_reason == "cancelled"
    assert len(other.end.get(timeout=30).sequence.tokens) == 20


def test_stopping_finishes_what_runs(serve):
    service = serve(max_batch=2)
    client = Client()
    ask(service, client, max_tokens=50)
    service.stop()
    assert len(client.end.get(timeout=1).sequence.tokens) == 50


def test_slow_answers_do_not_hold_up_the_steps(serve):
    """Steps go on meanwhile, and what has grown is given in larger pieces; one that cannot be answered fails alone."""
    service = serve(max_batch=3)
    service.engine.go.clear()
    slow, broken, quick = Client(), Client(), Client()
    block, grown = threading.Event(), slow.grown

    def wait(text, first):
        block.wait(30)
        grown(text, first)

    def fail(*_):
        raise OverflowError("no such number")

    slow.grown, broken.grown, broken.finished = wait, fail, fail
    for client in (slow, broken, quick):
        ask(service, client, max_tokens=60)
    service.engine.go.set()
    deadline = time.monotonic() + 30
    while slow.request.sequence is None or slow.request.sequence.finish_reason is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    block.set()
    for client in (slow, quick):
        text = client.end.get(timeout=30).text
        assert text == solo(PROMPTS[0], SamplingParams(max_tokens=60, stop_tokens=())).text
        assert text.startswith("".join(client.texts)) and len(client.texts) < 5
    assert set(service.log) == {"an answer failed: OverflowError: no such number"}
