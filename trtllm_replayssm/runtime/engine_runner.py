# SPDX-License-Identifier: Apache-2.0
"""Generation by an engine folder, as `trtllm-replayssm build` makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from .. import ReplayConfig, SlotLayout, self_test
from ..builder import bundle as bundles
from .drafter import Drafter
from .engine import ACTIVATIONS, DTYPES, Serving
from .executor import Executor, ExecutorError
from .graph_memory import GraphMemory
from .graph_runner import GraphRunner
from .ngram import NGram
from .scheduler import Scheduler
from .tokenizer import Tokenizer

EXECUTORS = ("tensorrt", "reference")


class EngineRunner(Serving):
    """An engine folder with its memory, serving as Engine does: sizes and formats are what it was built with.

    Args:
        folder: what `trtllm-replayssm build` made. Every file is checked against its config.json first.
        executor: "tensorrt": the folder's plans and plugin library, on a GPU that they were built for. "reference": its
            ONNX models on the CPU, by ONNX's reference evaluator and the host ops; for tests, not for speed.
        speculation: None: one token a step. "mtp": drafts of the folder's second graph, "ngram": copied from where the
            newest tokens occurred before, or a Drafter that proposes on the host.
        draft_tokens: most drafts a step; None: what the engine was built for, which is the most.
        adaptive: as Engine.

    Raises:
        BundleError: the folder is incomplete, damaged, or of another version, by file.
        ExecutorError: it cannot run here: what it needs, and what was found.
        ValueError: an argument is out of range.
        SelfTestError: an op gives wrong numbers on this device, by name. The ops are this package's: the plugin
            library's are of the same source, built apart.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        executor: str = "tensorrt",
        speculation: str | Drafter | None = None,
        draft_tokens: int | None = None,
        adaptive: bool = False,
    ):
        if executor not in EXECUTORS:
            raise ValueError(f"executor is {executor!r}, expected one of {', '.join(EXECUTORS)}")
        folder = Path(folder)
        self.bundle = bundle = bundles.read(folder)
        engine = bundle.engine
        drafts = check_drafts(bundle, speculation, draft_tokens)
        make, device = _executor(executor, folder, bundle)
        self_test.require(device, bundle.geometry, bundle.pool.replay)
        tokenizer = Tokenizer(folder)
        memory = GraphMemory(bundle, DTYPES[engine.dtype], device)
        drafting = speculation == "mtp"
        runner = GraphRunner(make(memory), memory, step_tokens=engine.step_tokens, drafting=drafting)
        drafter = {"mtp": Drafter(), "ngram": NGram()}.get(speculation, speculation) if drafts else None
        replay = bundle.pool.replay
        conventional = ReplayConfig(2 * engine.step_tokens, engine.step_tokens, activation=ACTIVATIONS[engine.dtype])
        super().__init__(
            model=bundle.model,
            tokenizer=tokenizer,
            scheduler=Scheduler(engine.max_batch, engine.max_prefill_tokens),
            runner=runner,
            memory=memory,
            drafter=drafter,
            mode="replay",
            configs={"replay": replay, "conventional": SlotLayout(bundle.geometry, conventional).config},
            context=engine.max_seq_len,
            draft_tokens=drafts,
            adaptive=adaptive,
            device=device,
            dtype=DTYPES[engine.dtype],
        )

    def _attribute_traffic(self, next_kind: str) -> None:
        self.memory.settle()  # a step is counted when its accepted tokens are committed
        super()._attribute_traffic(next_kind)


def _executor(
    name: str, folder: Path, bundle: bundles.Bundle
) -> tuple[Callable[[GraphMemory], Executor], torch.device]:
    """What makes it of the memory that it works on, and where that must be."""
    if name == "tensorrt":
        from .tensorrt_executor import LoadedPlans, TensorRTExecutor

        plans = LoadedPlans(folder, bundle)
        return lambda memory: TensorRTExecutor(plans, memory), torch.device("cuda")
    try:
        from .reference_executor import ReferenceExecutor
    except ImportError as error:
        raise ExecutorError(
            f"executor 'reference' needs {error.name}: pip install 'trtllm-replayssm[builder]'"
        ) from None
    return lambda memory: ReferenceExecutor(folder, bundle, memory), torch.device("cpu")


def check_drafts(bundle: bundles.Bundle, speculation: str | Drafter | None, draft_tokens: int | None) -> int:
    """The most drafts a step, 0 without speculation; ValueError if this engine cannot."""
    if speculation is None:
        return 0
    if not isinstance(speculation, Drafter) and speculation not in ("mtp", "ngram"):
        raise ValueError(f"speculation is {speculation!r}, expected None, mtp, ngram or a Drafter")
    most = bundle.engine.draft_tokens
    if not most:
        raise ValueError(
            f"speculation is {speculation!r}, but the engine was built for steps of one token; build it with "
            "--draft-tokens"
        )
    if speculation == "mtp" and not bundle.model.mtp_layers:
        raise ValueError("speculation is 'mtp', but the engine has no MTP graph; 'ngram' needs none")
    if draft_tokens is None:
        return most
    if not isinstance(draft_tokens, int) or isinstance(draft_tokens, bool):
        raise TypeError(f"draft_tokens is {draft_tokens!r}, expected an int")
    if not 1 <= draft_tokens <= most:
        raise ValueError(f"draft_tokens is {draft_tokens}, expected 1..{most}, what the engine was built for")
    return draft_tokens
