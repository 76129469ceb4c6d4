# SPDX-License-Identifier: Apache-2.0
"""A stream of requests in the embedded runtime: speculation with replay and with snapshots, and none.

A number of clients each send a request, wait for its answer and send the next; answers differ in length, so that
requests come and go at all times. They share the slots that fit into the memory given: a slot holds a request's KV rows
and Mamba state, and with snapshots the state after each token of a step too, which is how these cap concurrency.
Scheduler, prompts, drafts, verification and graphs are those of runtime.Engine; texts are not made of the tokens.

With random weights no draft would ever be right. Then acceptance is simulated (`Simulation`): a draft stands with a
given chance if those before it do, and drafts cost nothing, for replay and snapshots alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass

import torch

from .. import SlotLayout
from ..runtime.batch import Batch
from ..runtime.drafter import Drafter
from ..runtime.memory import state_bytes
from ..runtime.model_config import ATTENTION, MAMBA, CheckpointError
from ..runtime.mtp import MTP
from ..runtime.pipeline import Pass, Pipeline
from ..runtime.runner import Runner
from ..runtime.sampler import SamplingParams
from ..runtime.scheduler import Scheduler
from ..runtime.sequence import Sequence
from ..runtime.verification import Acceptance
from .models import Subject
from .records import InvalidRun

# How the state is treated (mamba_mixer.STEPS), and whether drafts are verified.
MODES = {
    "replay": ("replay", True),
    "snapshots": ("snapshots", True),
    "standard": ("conventional", False),
    "standard_replay": ("replay", False),
}
PREFILL_CHUNK, FILLING_CHUNK = 512, 4096  # most prompt tokens of a pass; before the measurement


@dataclass(frozen=True)
class Load:
    """What clients ask for. prompt: tokens of each. answer: mean tokens, spread evenly from half of it to one and a
    half.
    """

    prompt: int
    answer: int

    @property
    def longest(self) -> int:
        return self.answer + self.answer // 2


@dataclass(frozen=True)
class Case:
    batch: int
    mode: str


class ServeBench:
    """Measures cases of one model.

    Args:
        formats, window: of replay.
        draft_tokens: of a step.
        acceptance: of the simulation; None: 0.8 with random weights, else the MTP head drafts and the model decides.
        memory: bytes for weights and sequences; None: no limit.
        steps, repeats: decode steps of a timing, and timings.
        conventional_state: format of the states of the other modes than replay.
    """

    def __init__(
        self,
        model: str,
        device: torch.device,
        dtype: str,
        formats: tuple[str, str],
        window: int | None,
        *,
        draft_tokens: int,
        acceptance: float | None,
        load: Load,
        memory: int | None,
        steps: int,
        repeats: int,
        conventional_state: str = "fp32",
    ):
        if not 1 <= draft_tokens <= 15:
            raise ValueError(f"draft_tokens is {draft_tokens}, expected 1..15")
        for name, least in (("prompt", 1), ("answer", 2 * (1 + draft_tokens))):
            if getattr(load, name) < least:
                raise ValueError(f"{name} is {getattr(load, name)}, expected at least {least}")
        if acceptance is not None and not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance is {acceptance}, expected 0..1")
        self.subject = Subject(model, device, dtype)
        self.device, self.dtype, self.load, self.memory = device, dtype, load, memory
        self.draft_tokens, self.steps, self.repeats = draft_tokens, steps, repeats
        self.acceptance = 0.8 if acceptance is None and self.subject.is_random else acceptance
        if self.acceptance is None and not self.subject.has_mtp:
            raise CheckpointError(f"{model}: no MTP head to draft with, expected --acceptance to simulate it")
        self._configs = {
            ("replay", drafts): self.subject.replay_config(window, 1 + drafts, *formats) for drafts in (0, draft_tokens)
        } | {
            (way, drafts): self.subject.replay_config(2 * (1 + drafts), 1 + drafts, conventional_state)
            for way, drafts in (("snapshots", draft_tokens), ("conventional", 0))
        }

    def cases(self, batches: list[int], modes: list[str]) -> list[Case]:
        if min(batches) < 1:
            raise ValueError(f"batch is {min(batches)}, expected at least 1")
        if unknown := [mode for mode in modes if mode not in MODES]:
            raise ValueError(f"--modes: unknown {unknown[0]!r}, expected some of {' '.join(MODES)}")
        cases = [Case(batch, mode) for batch in batches for mode in modes]
        for case in cases:
            self.slots(case)
        return cases

    def identity(self, case: Case) -> dict:
        config = self._config(case)
        drafts = self._drafts(case)
        return {
            "bench": "serve",
            "model": self.subject.name,
            "weights": "random" if self.subject.is_random else "checkpoint",
            **asdict(case),
            "tokens": 1 + drafts,
            "drafts": None if not drafts else "MTP head" if self.acceptance is None else "simulated, at no cost",
            "acceptance": self.acceptance if drafts else None,
            "checkpoint": config.checkpoint,
            "read_copy": config.read_copy,
            "window": config.window if case.mode.endswith("replay") else None,
            "activation": self.dtype,
            **asdict(self.load),
            "memory": self.memory,
            "steps": self.steps,
            "repeats": self.repeats,
        }

    def bytes_per_request(self, case: Case) -> dict[str, int]:
        """Of Mamba state and of keys and values."""
        config, drafts = self.subject.config, self._drafts(case)
        layout = SlotLayout(config.geometry, self._config(case))
        mode = "replay" if MODES[case.mode][0] == "replay" else "conventional"
        layers = config.layers.count(ATTENTION) + (config.mtp_layers.count(ATTENTION) if drafts else 0)
        keys = (config.kv_heads or 0) * (config.head_dim or 0) * self.subject.dtype.itemsize
        return {
            "mamba": config.layers.count(MAMBA) * state_bytes(layout, mode, 1 + drafts if drafts else 0),
            "kv": 2 * layers * keys * self._capacity(drafts),
        }

    def slots(self, case: Case) -> int:
        """Requests at once: all clients', or as many as fit. ValueError if that is none."""
        if self.memory is None:
            return case.batch
        fit = (self.memory - self.subject.weight_bytes) // sum(self.bytes_per_request(case).values())
        if fit < 1:
            raise ValueError(
                f"memory is {self.memory} bytes, expected at least {self.subject.weight_bytes} for weights and "
                f"{sum(self.bytes_per_request(case).values())} for a request of mode {case.mode}"
            )
        return min(case.batch, fit)

    @torch.inference_mode()
    def measure(self, case: Case) -> dict:
        slots, drafts = self.slots(case), self._drafts(case)
        model, loader = self.subject.model(MODES[case.mode][0])
        drafter = None
        if drafts:
            drafter = MTP(model, loader, True) if self.acceptance is None else FreeDrafts(len(model.embeddings))
        capacity = self._capacity(drafts)
        memory = self.subject.memory(
            self._config(case), loader.attention_layers, slots, capacity, case.mode == "snapshots"
        )
        more = dict(together=True, graphs=self.device.type == "cuda", max_rows=slots)
        if drafts and self.acceptance is not None:
            runner = Simulation(model, memory, drafter, acceptance=self.acceptance, **more)
        else:
            runner = Runner(model, memory, drafter, **more)
        server = Server(runner, self.load, case.batch, slots, drafts)
        server.fill()
        server.run(self.steps)
        before = memory.pool.stats()
        server.steps.clear()
        server.prompt_seconds = 0.0
        rates, took = [], 0.0
        for _ in range(self.repeats):
            tokens, seconds = server.run(self.steps)
            rates.append(tokens / seconds)
            took += seconds
        after = memory.pool.stats()
        memory.pool.validate()
        seen = Acceptance.of(list(server.steps.elements()))
        if drafts and self.acceptance is not None:
            check_acceptance(server.steps, self.acceptance)
        return {
            "concurrency": slots,
            "tokens_per_second": round(statistics.median(rates), 1),
            "tokens_per_second_min": round(min(rates), 1),
            "tokens_per_second_max": round(max(rates), 1),
            "ms_per_step": round((took - server.prompt_seconds) * 1e3 / (self.steps * self.repeats), 2),
            "share_of_prompts": round(server.prompt_seconds / took, 3),
            "tokens_per_row_and_step": round(seen.tokens_per_step, 3),
            "flushes_per_row_and_step": round((after["flushes"] - before["flushes"]) / max(seen.steps, 1), 4),
            "bytes_per_request": self.bytes_per_request(case),
        }

    def _drafts(self, case: Case) -> int:
        return self.draft_tokens if MODES[case.mode][1] else 0

    def _config(self, case: Case):
        return self._configs[MODES[case.mode][0], self._drafts(case)]

    def _capacity(self, drafts: int) -> int:
        """Tokens that a slot holds, in whole blocks of 16: attention reads unaligned rows slowly."""
        return -(-(self.load.prompt + self.load.longest + drafts) // 16) * 16


def check_acceptance(steps: Counter[tuple[int, int]], chance: float) -> None:
    """InvalidRun unless drafts were accepted as simulated: of n, the sum of the first n powers of `chance`. Within
    three standard deviations, for which half the most drafts are a bound.

    steps: how often a row's step brought and kept so many tokens.
    """
    count = sum(steps.values())
    kept = sum(times * (kept - 1) for (_, kept), times in steps.items()) / count
    expected = sum(times * chance**power for (n, _), times in steps.items() for power in range(1, n)) / count
    tolerance = 1.5 * max(n - 1 for n, _ in steps) / count**0.5
    if abs(kept - expected) > tolerance:
        raise InvalidRun(f"{kept:.3f} drafts were accepted a step, the simulation's chance gives {expected:.3f}")


class FreeDrafts(Drafter):
    """Random tokens, made on the device at next to no cost."""

    on_device = True

    def __init__(self, vocabulary: int):
        self._vocabulary = vocabulary

    def follow(self, batch, hidden, following, last, count, memory):
        return torch.randint(self._vocabulary, (len(last), count), device=following.device)


class Simulation(Runner):
    """A runner whose model agrees with each draft with chance `acceptance`, whatever its logits say."""

    def __init__(self, *arguments, acceptance: float, **options):
        self._acceptance = acceptance
        super().__init__(*arguments, **options)

    def settle(self, batch: Batch, hidden: torch.Tensor, chosen: torch.Tensor, drafts: int) -> torch.Tensor:
        cells = batch.grid.cells
        if cells.shape[1] > 1:
            proposed = batch.tokens[cells[:, 1:]]
            agrees = torch.rand(proposed.shape, device=chosen.device) < self._acceptance
            other = (proposed + 1) % len(self.model.embeddings)
            chosen = chosen.index_put((cells[:, :-1],), torch.where(agrees, proposed, other))
        return super().settle(batch, hidden, chosen, drafts)


class _NoText:
    """In the place of a TextStream: tokens stay tokens."""

    stopped = False

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Server:
    """Clients, and a runner that serves them step by step.

    steps: how often a row's decode step brought and kept so many tokens. prompt_seconds: spent on prompts.
    """

    def __init__(self, runner: Runner, load: Load, clients: int, slots: int, drafts: int):
        self.runner, self.load, self.drafts = runner, load, drafts
        self.steps: Counter[tuple[int, int]] = Counter()
        self.prompt_seconds = 0.0
        self._scheduler = Scheduler(slots, FILLING_CHUNK)
        self._pipeline = Pipeline(self._scheduler, runner)
        self._random = random.Random(0)
        self._requests = 0
        # Whoever has a slot is somewhere in an answer, the begun part of which goes as prompt: as if the clients had
        # been at it for long. So contexts, and with them the graphs, are those of later on.
        for client in range(clients):
            length = self._length()
            begun = self._random.randrange(length - drafts) if client < slots else 0
            self._ask(length - begun, begun)

    def fill(self) -> None:
        """The prompts of all that have a slot, without decode steps between them."""
        self._admit()
        while any(sequence.in_prompt for sequence in self._scheduler.running):
            if chunks := self._scheduler.next_prompts():
                self._pipeline.launch([], chunks)
                self._hand_out(self._pipeline.ahead.popleft())
        self._scheduler.prefill_chunk = PREFILL_CHUNK

    def run(self, decode_steps: int) -> tuple[int, float]:
        """Tokens and seconds of so many decode steps and the prompts between them."""
        tokens = done = 0
        began = time.perf_counter()
        while done < decode_steps:
            is_decode, given = self._step()
            done, tokens = done + is_decode, tokens + given
        return tokens, time.perf_counter() - began

    def _length(self) -> int:
        return self._random.randint(self.load.answer // 2, self.load.longest)

    def _ask(self, length: int, begun: int = 0) -> None:
        """A request for an answer of `length` tokens, after a prompt and `begun` tokens of the answer."""
        vocabulary = len(self.runner.model.embeddings)
        prompt = [self._random.randrange(vocabulary) for _ in range(self.load.prompt + begun)]
        params = SamplingParams(max_tokens=length, stop_tokens=())
        self._scheduler.add(Sequence(self._requests, prompt, params, frozenset(), _NoText(), self.drafts))
        self._requests += 1

    def _step(self) -> tuple[bool, int]:
        """A pass of prompt chunks or a decode step, as Engine.step: whether it was the latter, and its new tokens."""
        began = time.perf_counter()
        while self._pipeline.has_room and self._launch():
            pass
        current = self._pipeline.ahead.popleft()
        given = self._hand_out(current)
        if current.kind == "prefill":
            self.prompt_seconds += time.perf_counter() - began
        return current.kind == "decode", given

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            self.runner.memory.reset(sequence.slot, sequence.request_id)

    def _launch(self) -> bool:
        self._admit()
        sequences, chunks = self._pipeline.next()
        if sequences:
            self._pipeline.launch(sequences, chunks)
        return bool(sequences)

    def _hand_out(self, done: Pass) -> int:
        """How many tokens the sequences got. Who is at the end of an answer leaves and asks anew."""
        given = 0
        for sequence, outcome in zip(done.sequences, done.outcomes(), strict=True):
            if sequence.finish_reason is not None:
                continue
            before = len(sequence.tokens)
            sequence.extend(outcome.tokens)
            given += len(sequence.tokens) - before
            sequence.drafts = outcome.drafts
            if outcome.brought:
                self.steps[outcome.brought, len(outcome.tokens)] += 1
            if sequence.finish_reason is not None:
                self._scheduler.release(sequence)
                self._ask(self._length())
        return given
