# SPDX-License-Identifier: Apache-2.0
"""The runtime's front door: requests in, tokens and text out."""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from operator import index
from pathlib import Path

import torch
import torch.distributed as dist

from .. import ReplayConfig, SlotLayout, _core, self_test
from .batch import Row
from .drafter import Drafter
from .loader import Loader
from .mamba_mixer import STEPS
from .memory import Memory, StateLost, state_bytes
from .model import Model
from .model_config import ModelConfig
from .mtp import MTP
from .ngram import NGram
from .pipeline import Pass, Pipeline
from .row_tiles import RowTiles
from .runner import Outcome, Runner
from .sampler import SamplingParams
from .scheduler import Scheduler
from .sequence import Sequence
from .tensor_parallel import TensorParallel
from .tokenizer import TextStream, Tokenizer
from .traffic import Traffic, rehearse
from .verification import Acceptance
from .weights import Weights

_GREEDY = SamplingParams()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_MODES = ("replay", "conventional")
_MAX_DRAFTS = 15  # a step takes 16 tokens a row at most


@dataclass(frozen=True)
class Piece:
    """One generated token and the text that it settled ("" while a character or stop string is incomplete)."""

    token: int
    text: str


class Serving:
    """Requests in, tokens and text out, whatever runs the model: what Engine and EngineRunner share.

    For one thread: `step`, `stream`, `cancel` and `preempt` must not run at the same time.

    Args:
        model: with vocab_size and stop_tokens.
        runner: forward passes, as Runner has them. memory: what sequences remember, as Memory has it.
        drafter: None: one token a step.
        configs: how "replay" and "conventional" keep the state, with numbers for their windows; `mode` is in force.
        context: most tokens of a sequence. draft_tokens: most drafts a step.
    """

    def __init__(
        self,
        *,
        model,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        runner,
        memory,
        drafter: Drafter | None,
        mode: str,
        configs: dict[str, ReplayConfig],
        context: int,
        draft_tokens: int,
        adaptive: bool,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.config, self.tokenizer, self.memory = model, tokenizer, memory
        self.mode, self.context, self.draft_tokens = mode, context, draft_tokens
        self.device, self.dtype = device, dtype
        self._scheduler, self._runner, self._drafter = scheduler, runner, drafter
        self._pipeline = Pipeline(scheduler, runner)
        self._unreported: list[Sequence] = []  # got tokens outside of `step`
        self._failed: Exception | None = None  # outside of `step`
        self._configs, self._adaptive = configs, adaptive
        self._requests = 0
        self._kind = "prefill"  # of the last pass
        self._counted: deque[tuple[str, Callable[[], dict]]] = deque()  # kinds of passes, and counts on their way
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._steps = {"prefill": 0, "decode": 0}
        self._traffic = {"prefill": Traffic(), "decode": Traffic()}
        self._prompt_tokens = self._generated_tokens = 0
        self._acceptance = Acceptance()

    # ---- requests --------------------------------------------------------------------------------------------------

    def add_request(self, prompt: str | Several[int], params: SamplingParams = _GREEDY) -> Sequence:
        """Puts a request in line and returns it; `step` fills its `tokens`, `text` and finally `finish_reason`.

        prompt: text, or token ids as they are. Raises ValueError if it is empty, holds an unknown id, or is too long,
        and if `params` asks for more drafts than the engine has.
        """
        tokens = self._checked(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if len(tokens) + params.max_tokens > self.context:
            raise ValueError(
                f"{len(tokens)} prompt tokens and max_tokens {params.max_tokens} are more than the context "
                f"of {self.context}"
            )
        drafts = self.draft_tokens if params.draft_tokens is None else params.draft_tokens
        if drafts > self.draft_tokens:
            raise ValueError(f"draft_tokens is {drafts}, expected at most the engine's {self.draft_tokens}")
        stop_tokens = self.config.stop_tokens if params.stop_tokens is None else params.stop_tokens
        text = TextStream(self.tokenizer, params.stop)
        sequence = Sequence(self._requests, tokens, params, frozenset(stop_tokens), text, drafts)
        self._requests += 1
        self._scheduler.add(sequence)
        return sequence

    def _checked(self, tokens: Several[int]) -> list[int]:
        tokens = [index(token) for token in tokens]
        if not tokens:
            raise ValueError("the prompt has no tokens, expected at least one")
        if unknown := [token for token in tokens if not 0 <= token < self.config.vocab_size]:
            raise ValueError(f"prompt token {unknown[0]} is outside 0..{self.config.vocab_size - 1}")
        return tokens

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's slot away and puts it at the end of the line. It later continues bit for bit, in
        whatever slot is free then. A sequence that has no slot stays where it is.

        NotImplementedError with mode "conventional" and speculation.
        """
        if self.memory.snapshots is not None:
            raise NotImplementedError(
                "preempt: a slot of mode 'conventional' with speculation cannot be saved, its state is one of the "
                "snapshots of its drafts; mode 'replay' can"
            )
        self._catch_up()
        if sequence.slot is not None:
            sequence.saved = self.memory.save(sequence.slot, sequence.length)
            self._scheduler.preempt(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a request now, wherever it is; its slot is free for others."""
        if sequence.finish_reason is None:
            sequence.finish("cancelled")
            sequence.saved = None
            self._scheduler.release(sequence)

    def generate(
        self, prompts: Several[str | Several[int]], params: SamplingParams | Several[SamplingParams] = _GREEDY
    ) -> list[Sequence]:
        """Runs `prompts` (with one `params` for all, or one each) to their ends, together with whatever else is in
        line.
        """
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        sequences = []
        try:
            for prompt, p in zip(prompts, params, strict=True):
                sequences.append(self.add_request(prompt, p))
            while any(sequence.finish_reason is None for sequence in sequences):
                self.step()
        except BaseException:
            for sequence in sequences:
                self.cancel(sequence)
            raise
        return sequences

    def stream(self, prompt: str | Several[int], params: SamplingParams = _GREEDY) -> Iterator[Piece]:
        """Yields each token of one request as it is generated. Other requests advance too. Leaving the loop early
        cancels.
        """
        sequence = self.add_request(prompt, params)
        given = 0
        try:
            while True:
                while given < len(sequence.tokens):
                    given += 1
                    yield Piece(sequence.tokens[given - 1], sequence.pieces[given - 1])
                if sequence.finish_reason is not None:
                    return
                self.step()
        finally:
            self.cancel(sequence)

    @torch.inference_mode()
    def logits(self, tokens: Several[int]) -> torch.Tensor:
        """Logits fp32 [len(tokens), vocab] after each of `tokens`, in a free slot: to score or compare texts."""
        tokens = self._checked(tokens)
        if len(tokens) > self.context:
            raise ValueError(f"{len(tokens)} tokens are more than the context of {self.context}")
        self._attribute_traffic("prefill")
        slot = self._scheduler.take_slot()
        try:
            self.memory.reset(slot, self._requests)
            chunk = self._scheduler.prefill_chunk
            parts = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
            rows = [Row(slot, number * chunk, len(part)) for number, part in enumerate(parts)]
            return torch.cat([self._runner.score(row, part) for row, part in zip(rows, parts, strict=True)])
        finally:
            self._scheduler.give_slot(slot)

    @property
    def window(self) -> int:
        """ReplaySSM's window, in mode "conventional" the one that `rehearse` takes for "replay"."""
        return self._configs["replay"].window

    # ---- what happened ---------------------------------------------------------------------------------------------

    def statistics(self) -> dict:
        """Counts since the engine was made. `decode_tokens` are those that decode steps committed: without each text's
        first token, which its prompt's pass gave, and with those that were accepted after a text's end, in its last
        step or in one that was launched before its end was known.

        prefill_traffic, decode_traffic: Traffic, counted by the pool. acceptance: of all texts' steps and drafts; a
        Sequence has its own.
        """
        self._catch_up()
        self._attribute_traffic(self._kind)
        self._book()
        self.memory.pool.validate()
        return {
            "mode": self.mode,
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self._generated_tokens,
            "decode_tokens": self._traffic["decode"].tokens,
            "acceptance": self._acceptance,
            **{
                f"{kind}_{name}": values[kind]
                for kind in ("prefill", "decode")
                for name, values in (("steps", self._steps), ("seconds", self._seconds), ("traffic", self._traffic))
            },
        }

    def rehearse(self, mode: str, sequences: Several[Sequence], speculative: bool = True) -> Traffic:
        """What decoding these finished `sequences` moves in `mode`, whichever mode ran.

        speculative: with the drafts that they had and the acceptance these met; else token by token.
        """
        steps = [sequence.steps if speculative else [(1, 1)] * (len(sequence.tokens) - 1) for sequence in sequences]
        return rehearse(self.memory.pool, self._configs[mode], mode, steps)

    def memory_per_request(self, mode: str) -> int:
        """Bytes of Mamba state that a request needs in `mode`, with speculation a snapshot for each token of a step
        among them (`memory.state_bytes`).
        """
        layout = SlotLayout(self.memory.pool.geometry, self._configs[mode])
        snapshots = 1 + self.draft_tokens if self.draft_tokens else 0
        return self.memory.pool.num_layers * state_bytes(layout, mode, snapshots)

    def _attribute_traffic(self, next_kind: str) -> None:
        """Has what the pool counted since the last call booked to the kind of pass that ran, and notes the kind that
        comes. Called only when the kind changes.
        """
        self._book(1)  # the last ones may be behind passes on their way
        self._counted.append((self._kind, self.memory.pool.stats_later()))
        self._kind = next_kind

    def _book(self, left: int = 0) -> None:
        """Waits for all counts that were asked for but the last `left`."""
        while len(self._counted) > left:
            kind, counts = self._counted.popleft()
            booked = self._traffic["prefill"] + self._traffic["decode"]
            self._traffic[kind] += Traffic.of(counts()) - booked

    # ---- one forward pass ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One forward pass, of prompt chunks or of a decode step for every running text. Returns the sequences that got
        tokens.

        Where the runner can, what follows is launched first, so that the device works while the host hands out tokens.
        """
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        began = time.perf_counter()
        while self._pipeline.has_room and self._launch():  # if this fails, what was launched before is kept
            pass
        if not self._pipeline.ahead:
            return self._report([])
        current = self._pipeline.ahead.popleft()
        grown = self._hand_out(current)
        self._seconds[current.kind] += time.perf_counter() - began
        return self._report(grown)

    def _launch(self) -> bool:
        """The next pass, if there is one."""
        admitted = self._scheduler.admit()
        try:
            for sequence in admitted:
                self.memory.reset(sequence.slot, sequence.request_id)
                if sequence.saved is not None:
                    self.memory.load(sequence.slot, sequence.saved)
                    sequence.saved = None
        except BaseException:
            self._drop(admitted)
            raise
        sequences, chunks = self._pipeline.next()
        if not sequences:
            return False
        kind = "prefill" if chunks else "decode"
        if kind != self._kind:
            self._attribute_traffic(kind)
        try:
            launched = self._pipeline.launch(sequences, chunks)
        except StateLost as loss:
            self._begin_again(sequences, loss)
            return False
        except BaseException:
            self._drop(sequences)
            raise
        self._prompt_tokens += launched.prompt_tokens
        return True

    def _hand_out(self, done: Pass) -> list[Sequence]:
        """The outcomes of a pass to those who have not left since. Returns these."""
        sequences = [sequence for sequence in done.sequences if sequence.finish_reason is None]
        steps = []
        try:
            outcomes = zip(done.sequences, done.outcomes(), strict=True)
            for sequence, outcome in [pair for pair in outcomes if pair[0].finish_reason is None]:
                if outcome.brought:
                    steps.append((outcome.brought, len(outcome.tokens)))
                    sequence.steps.append(steps[-1])
                self._append(sequence, outcome)
        except BaseException:
            self._drop(sequences)
            raise
        self._acceptance += Acceptance.of(steps)
        for sequence in sequences:
            try:
                self._propose(sequence)
            except BaseException:  # its own misfortune: the others have their tokens and go on
                self._drop([sequence])
                raise
        self._steps[done.kind] += 1
        return sequences

    def _catch_up(self) -> None:
        """Hands out what is on its way; the next `step` reports it, or raises what failed."""
        while self._pipeline.ahead:
            try:
                self._unreported += self._hand_out(self._pipeline.ahead.popleft())
            except Exception as error:
                self._failed = self._failed or error

    def _report(self, grown: list[Sequence]) -> list[Sequence]:
        """With those that got tokens outside of `step`."""
        unreported, self._unreported = self._unreported, []
        return list(dict.fromkeys([*unreported, *grown]))

    def _append(self, sequence: Sequence, outcome: Outcome) -> None:
        """Hands out new tokens, and puts the drafts of the next step in place."""
        before = len(sequence.tokens)
        sequence.extend(outcome.tokens)
        self._generated_tokens += len(sequence.tokens) - before
        if sequence.finish_reason is not None:
            return self._scheduler.release(sequence)
        # Drafts from the device were made for the length that was known before the step: in any batch the same number.
        sequence.drafts = outcome.drafts[: sequence.draft_length]
        if self._adaptive and sequence.steps:
            sequence.adapt()

    def _propose(self, sequence: Sequence) -> None:
        """Asks the drafter on the host, if the one on the device gave nothing."""
        if self._drafter is None or sequence.finish_reason is not None or sequence.drafts or not sequence.draft_length:
            return
        drafts = self._drafter.propose(sequence, sequence.draft_length)[: sequence.draft_length]
        if unknown := [token for token in drafts if not 0 <= token < self.config.vocab_size]:
            raise ValueError(f"drafts: token {unknown[0]!r} is outside 0..{self.config.vocab_size - 1}")
        sequence.drafts = drafts

    def _begin_again(self, sequences: list[Sequence], loss: StateLost) -> None:
        """Has sequences whose state was lost prefilled anew, with the tokens that they have. One that is lost for the
        second time without a new token in between ends with an error, if the loss is its own or nobody's.
        """
        failed = [s for s in sequences if s.lost_at == len(s.tokens) and loss.slot in (None, s.slot)]
        self._drop(failed)
        try:
            for sequence in sequences:
                if sequence.finish_reason is None:
                    self.memory.reset(sequence.slot, sequence.request_id)
                    sequence.begin_again()
        except BaseException:
            self._drop(sequences)
            raise
        if failed:
            raise loss

    def _drop(self, sequences: list[Sequence]) -> None:
        """Ends sequences that a failure left behind; their slots are reset before reuse."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = "error"
                self._scheduler.release(sequence)


class Engine(Serving):
    """A model with its memory, serving up to `max_batch` sequences at once; more wait in line.

    Args:
        checkpoint: directory with config.json, tokenizer.json and safetensors weights in `nemotron_h` format. Weights
            that Model Optimizer quantised (NVFP4, FP8) become numbers of `dtype` when they are loaded, layer by layer;
            activations are not quantised. `dequantized` has the formats by weight.
        mode: "replay" (ReplaySSM) or "conventional" (the state is read and written every token).
        device: "cpu", "cuda", "cuda:1" …; None: CUDA where there is a GPU and the library has the CUDA ops.
        dtype: "float32", "bfloat16" or "float16"; None: as the checkpoint says on CUDA, float32 on the CPU.
        max_batch: slots.
        context: most tokens of a sequence, prompt and generated together; None: the model's max_position_embeddings, at
            most 4096. The KV cache reserves it for every slot.
        prefill_chunk: most prompt tokens of one forward pass.
        window: ReplaySSM's window, tokens between two writes of the state; "auto": what costs least
            (ReplayConfig).
        checkpoint_format, read_copy: how ReplaySSM stores the state, ReplayConfig's `checkpoint` and `read_copy`. Mode
            "conventional" keeps fp32 states whatever they are.
        speculation: None: one token a step. "mtp": the checkpoint's multi-token-prediction head drafts the tokens after
            the next one, "ngram": they are copied from where the newest tokens occurred before, or a Drafter. A step
            verifies them together; the text stays the same, but for ties that rounding decides (`deterministic`).
        draft_tokens: most drafts a step, 1..15; SamplingParams.draft_tokens may ask for fewer. Ignored without
            speculation.
        adaptive: each text's draft length follows its recent acceptance (Sequence.adapt).
        deterministic: a sequence's bits do not depend on the other sequences. Slower: dense layers run in fixed row
            tiles, attention sequence by sequence, and decode steps as single launches instead of CUDA graphs. In 16-bit
            dtypes weights, KV cache and the tensors of the Mamba ops keep 16 bits, but all between them is fp32:
            rounding inputs of dense layers to 16 bits would make texts part where speculation only adds up in another
            order.
        tensor_parallel: a group of torch.distributed, such as dist.group.WORLD, whose ranks share every layer
            (tensor_parallel.py). Each makes the same engine and the same calls in the same order, and gets the same
            tokens. `config` and memory are the rank's own.
        cuda_graphs: None: on CUDA unless `deterministic` or `tensor_parallel`.
        progress: show a bar on stderr while weights load.
        allow: modules whose quantised tensors count although the checkpoint's lists contradict them (Weights).

    Raises:
        CheckpointError: the checkpoint is incomplete or not understood, before anything is allocated.
        ValueError: an argument is out of range, or CUDA was asked for and is not there.
        SelfTestError: an op gives wrong numbers on this device, by name.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        mode: str = "replay",
        device: str | None = None,
        dtype: str | None = None,
        max_batch: int = 32,
        context: int | None = None,
        prefill_chunk: int = 512,
        window: int | str = "auto",
        checkpoint_format: str = "fp32",
        read_copy: str = "none",
        speculation: str | Drafter | None = None,
        draft_tokens: int = 3,
        adaptive: bool = False,
        deterministic: bool = False,
        tensor_parallel: dist.ProcessGroup | None = None,
        cuda_graphs: bool | None = None,
        progress: bool = False,
        allow: Several[str] = (),
    ):
        drafts = check_arguments(
            mode=mode,
            dtype=dtype,
            max_batch=max_batch,
            context=context,
            prefill_chunk=prefill_chunk,
            window=window,
            speculation=speculation,
            draft_tokens=draft_tokens,
        )
        place = pick_device(device)
        on_cuda = place.type == "cuda"
        if cuda_graphs and (deterministic or tensor_parallel or not on_cuda):
            raise ValueError("cuda_graphs need a CUDA device, deterministic=False and no tensor_parallel")
        whole = ModelConfig.read(checkpoint)
        parallel = TensorParallel(whole, tensor_parallel) if tensor_parallel else None
        config = parallel.model if parallel else whole
        dtype = dtype or (config.dtype if on_cuda else "float32")
        context = context or min(config.max_position_embeddings, 4096)
        configs = {
            "replay": replay_config(config, dtype, drafts, window, checkpoint_format, read_copy),
            # The conventional kernels keep no records: their slots carry the shortest ring that is not warned of.
            "conventional": replay_config(config, dtype, drafts, 2 * (1 + drafts)),
        }
        weights = Weights(checkpoint, whole, allow)
        self.dequantized = dict(weights.quantized)
        if self.dequantized:
            warnings.warn(_what_is_dequantized(checkpoint, self.dequantized, DTYPES[dtype]), stacklevel=2)
        if speculation == "mtp":
            MTP.require(checkpoint, config, weights)
        tokenizer = Tokenizer(checkpoint)
        self_test.require(place, config.geometry, configs[mode], conventional=mode == "conventional")
        together = on_cuda and not deterministic
        snapshots = mode == "conventional" and drafts > 0
        loader = Loader(
            config,
            weights,
            step=STEPS["snapshots" if snapshots else mode],
            dtype=DTYPES[dtype],
            activation=torch.float32 if deterministic else DTYPES[dtype],
            device=place,
            tiles=RowTiles(fixed=deterministic),
            parallel=parallel,
            progress=progress,
        )
        self.model = Model(loader)
        drafter = speculation
        if isinstance(speculation, str):
            drafter = MTP(self.model, loader, together) if speculation == "mtp" else NGram()
        memory = Memory(
            config,
            configs[mode],
            slots=max_batch,
            attention_layers=loader.attention_layers,
            capacity=context + drafts,  # the last step of a text may draft beyond its end
            snapshots=snapshots,
            dtype=DTYPES[dtype],
            device=place,
            first_head=parallel.first_head if parallel else 0,
        )
        runner = Runner(
            self.model,
            memory,
            drafter,
            together=together,
            graphs=together and parallel is None if cuda_graphs is None else cuda_graphs,
            max_rows=max_batch,
        )
        super().__init__(
            model=config,
            tokenizer=tokenizer,
            scheduler=Scheduler(max_batch, prefill_chunk),
            runner=runner,
            memory=memory,
            drafter=drafter,
            mode=mode,
            configs=configs,
            context=context,
            draft_tokens=drafts,
            adaptive=adaptive,
            device=place,
            dtype=DTYPES[dtype],
        )


def check_arguments(*, mode, dtype, max_batch, context, prefill_chunk, window, speculation, draft_tokens, **_) -> int:
    """Looks at arguments of Engine that are right or wrong whatever the checkpoint and the machine.

    Returns the most drafts a step, 0 without speculation. ValueError or TypeError as Engine.
    """
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(_MODES)}")
    for name, value in (
        ("max_batch", max_batch),
        ("prefill_chunk", prefill_chunk),
        ("window", 1 if window == "auto" else window),
        ("context", 1 if context is None else context),
    ):
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, expected an int")
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    return _draft_tokens(speculation, draft_tokens, window)


def replay_config(
    model: ModelConfig, dtype: str, drafts: int, window: int | str, checkpoint: str = "fp32", read_copy: str = "none"
) -> ReplayConfig:
    """How ReplaySSM keeps the states of `model`, with a number for its window. Raises as ReplayConfig does."""
    config = ReplayConfig(window, 1 + drafts, checkpoint, read_copy, ACTIVATIONS[dtype])
    return SlotLayout(model.geometry, config).config


def _what_is_dequantized(checkpoint: str | Path, formats: dict[str, str], dtype: torch.dtype) -> str:
    counts = " and ".join(f"{count} {name}" for name, count in sorted(Counter(formats.values()).items()))
    places = dict.fromkeys(".".join(name.split(".")[:3]) if ".layers." in name else name for name in formats)
    return (
        f"{checkpoint}: {counts} weights become {str(dtype).removeprefix('torch.')} when they are loaded "
        f"({', '.join(places)}); activations are not quantised"
    )


def _draft_tokens(speculation: str | Drafter | None, draft_tokens: int, window: int | str) -> int:
    """The most drafts a step, 0 without speculation; ValueError if this cannot work."""
    if speculation is None:
        return 0
    if speculation in ("tree", "medusa", "eagle"):
        raise ValueError(
            f"speculation {speculation!r} drafts trees, which ReplaySSM cannot verify: its records are a chain, and "
            "siblings would share one record; expected mtp or ngram"
        )
    if not isinstance(speculation, Drafter) and speculation not in ("mtp", "ngram"):
        raise ValueError(f"speculation is {speculation!r}, expected None, mtp, ngram or a Drafter")
    if not isinstance(draft_tokens, int) or isinstance(draft_tokens, bool):
        raise TypeError(f"draft_tokens is {draft_tokens!r}, expected an int")
    if not 1 <= draft_tokens <= _MAX_DRAFTS:
        raise ValueError(f"draft_tokens is {draft_tokens}, expected 1..{_MAX_DRAFTS}")
    if window != "auto" and draft_tokens + 1 > window:
        raise ValueError(
            f"draft_tokens is {draft_tokens}: steps of {draft_tokens + 1} tokens do not fit into the window of {window}"
        )
    return draft_tokens


def pick_device(name: str | None) -> torch.device:
    """The device of that name, None: a GPU that can be used, else the CPU. ValueError if it cannot be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() and _core.has_cuda() else "cpu")
    device = named_device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch finds no GPU")
    if device.type == "cuda" and not _core.has_cuda():
        raise ValueError(
            f"device is {name!r}, but trtllm-replayssm was built without CUDA; see 'trtllm-replayssm info'"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but torch finds {torch.cuda.device_count()} GPUs")
    return device


def named_device(name: str) -> torch.device:
    """The device of that name, whether it is there or not. ValueError for a name that no device of ours has."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}, expected cpu or cuda")
    return device
