# SPDX-License-Identifier: Apache-2.0
"""A whole decode step of a model in the embedded runtime, one token a row: replay beside conventional.

A step is what the runtime launches for it, as a CUDA graph: plan, all layers, head, greedy choice, commit. Time on the
device is measured, without the host's share. Rows stand at staggered phases of their windows and flushes
are counted, as in `bench kernel`. The context is that of attention: every row reads so many positions.

What the parts take is measured in a second graph with events between them: an event costs about as much as a small
launch, so that the parts add up to somewhat more than the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from ..runtime.attention import Attention
from ..runtime.frontier import Turn, asked
from ..runtime.mamba_mixer import MambaMixer
from ..runtime.mlp import MLP
from ..runtime.model import Model
from ..runtime.moe import MoE
from ..runtime.runner import Runner
from .clock import repeatable, seconds, settle, spread
from .kernel import check_flushes
from .models import Subject
from .renewal import flushes_per_row_and_step

# "ssm": convolution and state of the Mamba layers; "mamba_dense": their projections and gated norms; "attention" and
# "mlp" (MoE too): those layers; "other": norms and residual sums between layers, embeddings, head, choice, plan and
# commit.
PARTS = ("ssm", "mamba_dense", "attention", "mlp", "other")
MODES = ("replay", "conventional")


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    mode: str


class StepBench:
    """Measures cases of one model. formats: of mode replay's checkpoint and read copy; conventional_state: of the
    other's state."""

    def __init__(
        self,
        model: str,
        device: torch.device,
        dtype: str,
        formats: tuple[str, str],
        window: int | None,
        steps: int,
        repeats: int,
        *,
        conventional_state: str = "fp32",
    ):
        self.subject = Subject(model, device, dtype)
        self.device, self.dtype, self.repeats = device, dtype, repeats
        self._configs = {
            "replay": self.subject.replay_config(window, 1, *formats),
            "conventional": self.subject.replay_config(2, 1, conventional_state),
        }
        window = self._configs["replay"].window
        self.steps = -(-steps // window) * window
        self._models: dict[str, tuple] = {}

    def cases(self, batches: list[int], contexts: list[int]) -> list[Case]:
        for name, values in (("batch", batches), ("context", contexts)):
            if min(values) < 1:
                raise ValueError(f"{name} is {min(values)}, expected at least 1")
        return [Case(batch, context, mode) for batch in batches for context in contexts for mode in MODES]

    def identity(self, case: Case) -> dict:
        config = self._configs[case.mode]
        return {
            "bench": "step",
            "model": self.subject.name,
            "weights": "random" if self.subject.is_random else "checkpoint",
            **asdict(case),
            "tokens": 1,
            "checkpoint": config.checkpoint,
            "read_copy": config.read_copy,
            "window": self._configs["replay"].window,
            "activation": self.dtype,
            "steps": self.steps,
            "repeats": self.repeats,
        }

    @torch.inference_mode()
    def measure(self, case: Case) -> dict:
        if case.mode not in self._models:
            self._models[case.mode] = self.subject.model(case.mode)
        model, loader = self._models[case.mode]
        config = self._configs[case.mode]
        memory = self.subject.memory(config, loader.attention_layers, case.batch, case.context, False)
        loop = Step(model, memory, case.context)
        loop.stagger(config.window)
        step = loop.repeatable()
        settle(step, config.window, self.device)
        before = memory.pool.stats()
        times = [seconds(step, self.steps, self.device) * 1e6 for _ in range(self.repeats)]
        after = memory.pool.stats()
        memory.pool.validate()
        flushes = (after["flushes"] - before["flushes"]) / (self.steps * self.repeats)
        expected = case.batch * flushes_per_row_and_step(config.window, 1) if case.mode == "replay" else 0.0
        check_flushes(flushes, expected)
        figures = spread(times)
        return {
            **figures,
            "tokens_per_second": round(case.batch / (figures["us"] * 1e-6)),
            "flushes_per_step": round(flushes, 4),
            "parts_us": loop.parts(config.window),
        }


class Step:
    """A decode step of all slots of `memory`, a token each at position `context` - 1, as often as asked for."""

    def __init__(self, model: Model, memory, context: int):
        self.model, self.memory, self.context = model, memory, context
        self.device, rows = memory.pool.device, memory.pool.num_slots
        self.runner = Runner(model, memory, None, together=True, graphs=False, max_rows=rows)
        turns = [Turn(slot, context - 1, [slot % len(model.embeddings)]) for slot in range(rows)]
        self._asked = torch.tensor(asked(turns, rows, 1), device=self.device)
        memory.pool.reset(list(range(rows)))

    def stagger(self, window: int) -> None:
        """Row r advances by r mod window tokens."""
        slots = self._asked[:, 0].clone()
        for phase in range(1, window):
            self._asked[:, 0] = torch.where(slots % window >= phase, slots, -1)
            self.run()
        self._asked[:, 0] = slots

    def run(self) -> None:
        """What the runtime launches: Runner.decode without the host's part."""
        batch = self.runner.batch_together(self._asked, self.context)
        hidden, logits = self.runner.verify(batch)
        self.runner.settle(batch, hidden, logits.argmax(-1), 0)

    def repeatable(self) -> Callable[[], object]:
        return repeatable(self.run, self.device)

    def parts(self, repeats: int) -> dict[str, float]:
        """Mean microseconds of each of PARTS over `repeats` steps."""
        watch = _Stopwatch(self.device)
        with watch.inside(self.model):
            run = repeatable(lambda: watch.step(self.run), self.device)
            totals = dict.fromkeys(PARTS, 0.0)
            for _ in range(repeats):
                run()
                for part, took in watch.read():
                    totals[part] += took / repeats
        return {part: round(us, 1) for part, us in totals.items()}


class _Stopwatch:
    """Marks on the device where one part of a step ends and another begins."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._parts = ["other"]  # entered and not left, innermost last
        self._marks: list[tuple[str, object]] = []  # the part that ends there

    def step(self, run: Callable[[], None]) -> None:
        """A step whose marks replace those of the last one."""
        self._marks.clear()
        self._mark()
        run()
        self._mark()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._mark()
        self._parts.append(name)
        try:
            yield
        finally:
            self._mark()
            self._parts.pop()

    @contextmanager
    def inside(self, model: Model) -> Iterator[None]:
        """While it lasts, the model's mixers are parts. What a Mamba mixer runs by way of its row tiles is dense."""
        layers = model.stack.layers
        mixers = [mixer for _, mixer in layers if isinstance(mixer, MambaMixer)]
        tiles = [mixer.tiles for mixer in mixers]
        model.stack.layers = [(norm, self._watched(mixer, _part(mixer))) for norm, mixer in layers]
        for mixer in mixers:
            mixer.tiles = self._watched(mixer.tiles, "mamba_dense")
        try:
            yield
        finally:
            model.stack.layers = layers
            for mixer, own in zip(mixers, tiles, strict=True):
                mixer.tiles = own

    def read(self) -> list[tuple[str, float]]:
        """(part, microseconds) of the last step, in order."""
        if self._on_cuda:
            self._marks[-1][1].synchronize()
            between = [
                start.elapsed_time(stop) * 1e3
                for (_, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False)
            ]
        else:
            between = [
                (stop - start) * 1e6 for (_, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False)
            ]
        return [(part, took) for (part, _), took in zip(self._marks[1:], between, strict=True)]

    def _watched(self, work: Callable, name: str) -> Callable:
        def watched(*arguments):
            with self.part(name):
                return work(*arguments)

        return watched

    def _mark(self) -> None:
        if self._on_cuda:
            # External: a node of the graph, timed at every replay.
            mark = torch.cuda.Event(enable_timing=True, external=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((self._parts[-1], mark))


def _part(mixer: Callable) -> str:
    kinds = {MambaMixer: "ssm", Attention: "attention", MLP: "mlp", MoE: "mlp"}
    return kinds[type(mixer)]
