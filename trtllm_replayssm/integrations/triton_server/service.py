# SPDX-License-Identifier: Apache-2.0
"""The loop of a served engine: requests come from other threads, one thread steps the engine for all of them, another
gives the answers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...runtime.sampler import SamplingParams
from ...runtime.sequence import Sequence

# Steps between two looks at whether a client has left: each is a call to the server's process, of about 0.06 ms. Those
# who wait for a slot hold nothing, and are looked at less often.
_LOOK_RUNNING, _LOOK_WAITING = 4, 64
_PUBLISH_SECONDS = 0.25


class Overloaded(RuntimeError):
    """Too many requests wait already."""


class Client(Protocol):
    """Who asked. `left` is called in the thread of the steps, the others in that of the answers, `finished` or `failed`
    last and once.
    """

    def grown(self, text: str, first: int) -> None:
        """The text so far, of which everything before `first` was given before."""

    def finished(self, request: Request) -> None:
        """request.given: where in its text begins what was not given before."""

    def failed(self, error: Exception) -> None:
        """ValueError and TypeError: the request is at fault. Overloaded: it may come again later."""

    def left(self) -> bool:
        """Whether nobody waits for the answer any more."""


@dataclass(eq=False)
class Request:
    """id: what the client calls it, "" for nothing. text: so far. given: how many of its characters the client has, or
    will have when `queued` answers are out. Times in ns since the epoch.
    """

    client: Client
    id: str
    tokens: list[int]
    params: SamplingParams
    arrived: int = field(default_factory=time.time_ns)
    first_token: int = 0
    last_token: int = 0
    sequence: Sequence | None = None
    text: str = ""
    pieces: int = 0  # of the sequence, that are in `text`
    given: int = 0
    queued: bool = False


class Outbox:
    """Gives answers in a thread of its own: each is a call to the server's process, and some dozens of them take as
    long as a step. A text that grows faster than it can be given is given in larger pieces.
    """

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._answers: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="replayssm answers")
        self._thread.start()

    def grown(self, request: Request) -> None:
        if not request.queued:
            request.queued = True
            self._answers.put(lambda: self._give(request))

    def last(self, answer: Callable[[], None]) -> None:
        self._answers.put(answer)

    def stop(self) -> None:
        """When all answers are out."""
        self._answers.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (answer := self._answers.get()) is not None:
            try:
                answer()
            except Exception as error:  # of one client; the others shall have theirs
                self._log(f"an answer failed: {type(error).__name__}: {error}")

    def _give(self, request: Request) -> None:
        request.queued = False  # before the text is read: what comes later is queued again
        text, first = request.text, request.given
        if request.sequence.finish_reason is None and len(text) > first:
            request.given = len(text)
            request.client.grown(text, first)


class Service:
    """max_waiting: requests in line for a slot; more are refused. publish: called now and then with the engine's
    statistics, the slots in use, how many requests wait, and how many have ended for each reason.
    """

    def __init__(
        self,
        engine,
        max_waiting: int,
        publish: Callable[[dict, int, int, dict[str, int]], None],
        log: Callable[[str], None],
    ):
        self.engine, self._max_waiting = engine, max_waiting
        self._longest_prompt = engine.context * engine.tokenizer.longest_token
        self._publish, self._log = publish, log
        self._arrivals: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[Sequence, Request] = {}
        self._ended: dict[str, int] = dict.fromkeys(("stop", "length", "cancelled", "error", "refused"), 0)
        self._steps = 0
        self._published = 0.0
        self._outbox = Outbox(log)
        self._thread = threading.Thread(target=self._run, name="replayssm steps")
        self._thread.start()

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt. ValueError, before they are counted, for a text that cannot fit: to tokenize a very long
        one would hold up the others.
        """
        if len(text) > self._longest_prompt:
            raise ValueError(
                f"text_input has {len(text)} characters, more than the context of {self.engine.context} tokens can hold"
            )
        return self.engine.tokenizer.encode(text)

    def submit(self, request: Request) -> None:
        self._arrivals.put(lambda: self._add(request))

    def cancel(self, request_id: str) -> None:
        """Ends the requests of that id; their clients get what there is."""
        self._arrivals.put(lambda: self._cancel(request_id))

    def refused(self) -> None:
        """Counts a request that was refused before it got here."""
        self._arrivals.put(lambda: self._count("refused"))

    def stop(self) -> None:
        """Finishes what is running and ends the threads."""
        self._arrivals.put(None)
        self._thread.join()
        self._outbox.stop()

    # ---- the thread of the steps ----

    def _run(self) -> None:
        stopping = False
        while True:
            while not (stopping and self._arrivals.empty()):
                try:
                    arrival = self._arrivals.get(block=not self._live)
                except queue.Empty:
                    break
                if arrival is None:
                    stopping = True
                    break
                arrival()
                if not self._live and self._arrivals.empty():
                    self._show()
            if stopping and not self._live:
                return
            self._step()

    def _add(self, request: Request) -> None:
        try:
            if len(self._live) >= self.engine.memory.pool.num_slots + self._max_waiting:
                raise Overloaded(f"{self._max_waiting} requests wait already: come again later")
            request.sequence = self.engine.add_request(request.tokens, request.params)
        except Exception as error:
            self._count("refused")
            self._outbox.last(partial(request.client.failed, error))
        else:
            self._live[request.sequence] = request

    def _cancel(self, request_id: str) -> None:
        for request in [request for request in self._live.values() if request.id == request_id]:
            self.engine.cancel(request.sequence)
            self._end(request)

    def _step(self) -> None:
        self._drop_those_who_left()
        try:
            grown = self.engine.step()
        except Exception as error:  # the engine has ended whom it concerns, and goes on
            self._log(f"a step failed: {type(error).__name__}: {error}")
            self._fail(error)
            grown = []
        self._steps += 1
        now = time.time_ns()
        for sequence in grown:
            if (request := self._live.get(sequence)) is not None:
                self._grow(request, now)
        if not self._live or time.monotonic() - self._published > _PUBLISH_SECONDS:
            self._show()

    def _fail(self, error: Exception) -> None:
        """Ends those whom a failed step ended, or everybody if it was nobody: the next step would fail as well. Whose
        text is complete has it all the same.
        """
        for request in list(self._live.values()):
            if request.sequence.finish_reason in ("stop", "length"):
                self._grow(request, time.time_ns())
        live = list(self._live.values())
        concerned = [request for request in live if request.sequence.finish_reason is not None] or live
        for request in concerned:
            self.engine.cancel(request.sequence)
            self._end(request, error)

    def _grow(self, request: Request, now: int) -> None:
        sequence = request.sequence
        request.first_token = request.first_token or now
        request.last_token = now
        request.text += "".join(sequence.pieces[request.pieces :])
        request.pieces = len(sequence.pieces)
        if sequence.finish_reason is not None:
            self._end(request)
        elif len(request.text) > request.given:
            self._outbox.grown(request)

    def _end(self, request: Request, error: Exception | None = None) -> None:
        del self._live[request.sequence]
        self._count("error" if error else request.sequence.finish_reason)
        request.text = request.sequence.text  # its end may settle what a piece held back
        client = request.client
        self._outbox.last(partial(client.finished, request) if error is None else partial(client.failed, error))

    def _drop_those_who_left(self) -> None:
        for request in list(self._live.values()):
            sequence = request.sequence
            period = _LOOK_WAITING if sequence.slot is None else _LOOK_RUNNING
            if (self._steps + sequence.request_id) % period == 0 and request.client.left():
                self.engine.cancel(sequence)
                self._end(request)

    def _count(self, reason: str) -> None:
        self._ended[reason] += 1

    def _show(self) -> None:
        self._published = time.monotonic()
        running = sum(request.sequence.slot is not None for request in self._live.values())
        try:
            self._publish(self.engine.statistics(), running, len(self._live) - running, self._ended)
        except Exception as error:
            self._log(f"no statistics: {type(error).__name__}: {error}")
