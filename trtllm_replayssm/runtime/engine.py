# SPDX-License-Identifier: Apache-2.0
"""The runtime's front door: requests in, tokens and text out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path

import torch

from .. import _core
from .batch import Batch, Row
from .cuda_graph import DecodeGraphs
from .mamba_mixer import STEPS
from .memory import Memory
from .model import Model
from .model_config import ModelConfig
from .row_tiles import RowTiles
from .sampler import SamplingParams, sample
from .scheduler import Scheduler
from .sequence import Sequence
from .tokenizer import TextStream, Tokenizer
from .traffic import Traffic, rehearse
from .weights import Weights

_GREEDY = SamplingParams()
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Piece:
    """One generated token and the text that it settled ("" while a character or stop string is incomplete)."""

    token: int
    text: str


class Engine:
    """A model with its memory, serving up to `max_batch` sequences at once; more wait in line.

    For one thread: `step`, `stream`, `cancel` and `preempt` must not run at the same time.

    Args:
        checkpoint: directory with config.json, tokenizer.json and safetensors weights in `nemotron_h` format.
        mode: "replay" (ReplaySSM) or "conventional" (the state is read and written every token).
        device: "cpu", "cuda", "cuda:1" …; None: CUDA where there is a GPU and the library has the CUDA ops.
        dtype: "float32", "bfloat16" or "float16"; None: as the checkpoint says on CUDA, float32 on the CPU.
        max_batch: slots.
        context: most tokens of a sequence, prompt and generated together; None: the model's max_position_embeddings, at
            most 4096. The KV cache reserves it for every slot.
        prefill_chunk: most prompt tokens of one forward pass.
        window: ReplaySSM's window, tokens between two writes of the state.
        deterministic: a sequence's bits do not depend on the other sequences. Slower: dense layers run in fixed row
            tiles, attention sequence by sequence, and decode steps as single launches instead of CUDA graphs.
        cuda_graphs: None: on CUDA unless `deterministic`.
        progress: show a bar on stderr while weights load.

    Raises:
        CheckpointError: the checkpoint is incomplete or not understood, before anything is allocated.
        ValueError: an argument is out of range, or CUDA was asked for and is not there.
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
        window: int = 16,
        deterministic: bool = False,
        cuda_graphs: bool | None = None,
        progress: bool = False,
    ):
        if mode not in STEPS:
            raise ValueError(f"mode is {mode!r}, expected one of {', '.join(STEPS)}")
        for name, value in (
            ("max_batch", max_batch),
            ("prefill_chunk", prefill_chunk),
            ("window", window),
            ("context", 1 if context is None else context),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(_DTYPES)}")
        self.mode = mode
        self.device = _device(device)
        on_cuda = self.device.type == "cuda"
        if cuda_graphs and (deterministic or not on_cuda):
            raise ValueError("cuda_graphs need a CUDA device and deterministic=False")
        self.config = ModelConfig.read(checkpoint)
        self.dtype = _DTYPES[dtype or (self.config.dtype if on_cuda else "float32")]
        self.context = context or min(self.config.max_position_embeddings, 4096)
        weights = Weights(checkpoint, self.config)
        self.tokenizer = Tokenizer(checkpoint)
        self.tiles = RowTiles(fixed=deterministic)
        # The conventional kernel keeps no records: its slots carry the shortest ring that ReplayConfig has no warning
        # for.
        self._windows = {"replay": window, "conventional": 2}
        self.memory = Memory(
            self.config,
            slots=max_batch,
            context=self.context,
            window=self._windows[mode],
            dtype=self.dtype,
            device=self.device,
        )
        self.model = Model(
            self.config, weights, mode=mode, dtype=self.dtype, device=self.device, tiles=self.tiles, progress=progress
        )
        self._scheduler = Scheduler(max_batch, prefill_chunk)
        if cuda_graphs is None:
            cuda_graphs = on_cuda and not deterministic
        if cuda_graphs:
            self._decode = DecodeGraphs(self._decode_together, max_batch, self.context, self.device)
        else:
            self._decode = self._decode_eagerly if on_cuda and not deterministic else self._decode_by_sequence
        self._requests = 0
        self._kind = "prefill"  # of the last step
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._steps = {"prefill": 0, "decode": 0}
        self._traffic = {"prefill": Traffic(), "decode": Traffic()}
        self._prompt_tokens = self._generated_tokens = 0

    # ---- requests --------------------------------------------------------------------------------------------------

    def add_request(self, prompt: str | Several[int], params: SamplingParams = _GREEDY) -> Sequence:
        """Puts a request in line and returns it; `step` fills its `tokens`, `text` and finally `finish_reason`.

        prompt: text, or token ids as they are. Raises ValueError if it is empty, holds an unknown id, or is too long.
        """
        tokens = self._checked(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if len(tokens) + params.max_tokens > self.context:
            raise ValueError(
                f"{len(tokens)} prompt tokens and max_tokens {params.max_tokens} are more than the context "
                f"of {self.context}"
            )
        stop_tokens = self.config.stop_tokens if params.stop_tokens is None else params.stop_tokens
        sequence = Sequence(
            self._requests, tokens, params, frozenset(stop_tokens), TextStream(self.tokenizer, params.stop)
        )
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
        whatever slot is free then. A sequence that has no slot stays where it is."""
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
            return torch.cat(
                [
                    self._run_rows([Row(slot, start, len(part))], part, is_prompt=True, wanted=None)
                    for start in range(0, len(tokens), chunk)
                    if (part := list(tokens[start : start + chunk]))
                ]
            )
        finally:
            self._scheduler.give_slot(slot)

    # ---- what happened ---------------------------------------------------------------------------------------------

    def statistics(self) -> dict:
        """Counts since the engine was made. `decode_tokens` leaves out each text's first token, which its prompt's pass
        gave.

        prefill_traffic, decode_traffic: Traffic, counted by the pool.
        """
        self._attribute_traffic(self._kind)
        self.memory.pool.validate()
        return {
            "mode": self.mode,
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self._generated_tokens,
            "decode_tokens": self._traffic["decode"].tokens,
            **{
                f"{kind}_{name}": values[kind]
                for kind in ("prefill", "decode")
                for name, values in (("steps", self._steps), ("seconds", self._seconds), ("traffic", self._traffic))
            },
        }

    def rehearse(self, mode: str, sequences: Several[Sequence]) -> Traffic:
        """What decoding these finished `sequences` moves in `mode`, whichever mode ran."""
        config = replace(self.memory.pool.config, window=self._windows[mode])
        return rehearse(self.memory.pool, config, mode, [len(sequence.tokens) - 1 for sequence in sequences])

    def _attribute_traffic(self, next_kind: str) -> None:
        """Books what the pool counted since the last call to the kind of step that ran, and notes the kind that comes.
        Called only when the kind changes: reading the counters waits for the device.
        """
        counted = Traffic.of(self.memory.pool.stats())
        booked = self._traffic["prefill"] + self._traffic["decode"]
        self._traffic[self._kind] += counted - booked
        self._kind = next_kind

    # ---- one forward pass ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One forward pass, of prompt chunks or of one token for every running text. Returns the sequences that got a
        token.
        """
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
        chunks = self._scheduler.next_prompts()
        sequences = [sequence for sequence, _ in chunks] if chunks else self._scheduler.decoding()
        if not sequences:
            return []
        kind = "prefill" if chunks else "decode"
        if kind != self._kind:
            self._attribute_traffic(kind)
        began = time.perf_counter()
        try:
            if chunks:
                logits = self._prefill(chunks)
                sequences = [sequence for sequence in sequences if not sequence.in_prompt]
            else:
                columns = [s.tokens[-1] for s in sequences], [s.slot for s in sequences], [s.length for s in sequences]
                inputs = torch.tensor(columns, dtype=torch.int64, pin_memory=self.device.type == "cuda")
                logits = self._decode(inputs, max(columns[2]) + 1)
            self._append(sequences, logits)
        except BaseException:
            self._drop(sequences)
            raise
        self._steps[kind] += 1
        self._seconds[kind] += time.perf_counter() - began
        return sequences

    def _append(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Samples and hands out the next tokens: the one place where a step waits for the device."""
        if not sequences:
            return
        positions = [len(sequence.prompt) + len(sequence.tokens) for sequence in sequences]
        tokens = sample(logits, [sequence.params for sequence in sequences], positions, self.tiles).tolist()
        self._generated_tokens += len(tokens)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
            if sequence.finish_reason is not None:
                self._scheduler.release(sequence)

    def _drop(self, sequences: list[Sequence]) -> None:
        """After a failed pass the memory of its sequences is not to be trusted: they end, their slots are reset before
        reuse.
        """
        for sequence in sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = "error"
                self._scheduler.release(sequence)

    def _prefill(self, chunks: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Logits after the chunks that complete their prompt, in order."""
        rows = [Row(sequence.slot, sequence.prefilled, count) for sequence, count in chunks]
        tokens = [
            token
            for (sequence, count), row in zip(chunks, rows, strict=True)
            for token in sequence.prompt[row.start : row.start + count]
        ]
        wanted, end = [], 0
        for sequence, count in chunks:
            end += count
            if sequence.prefilled + count == len(sequence.prompt):
                wanted.append(end - 1)
        logits = self._run_rows(rows, tokens, is_prompt=True, wanted=wanted)
        for sequence, count in chunks:
            sequence.prefilled += count
        self._prompt_tokens += len(tokens)
        return logits

    def _run_rows(
        self, rows: list[Row], tokens: list[int], *, is_prompt: bool, wanted: list[int] | None
    ) -> torch.Tensor:
        """A forward pass whose rows the host knows. wanted: as Batch.wanted."""
        positions = [row.start + i for row in rows for i in range(row.count)]
        slots = [row.slot for row in rows for _ in range(row.count)]
        tensors = torch.tensor([tokens, positions, slots], dtype=torch.int64).to(self.device)
        plan = self.memory.pool.plan([row.slot for row in rows], [row.count for row in rows])
        return self._forward(
            Batch(
                plan,
                *tensors,
                is_prompt=is_prompt,
                on_host=rows,
                wanted=None if wanted is None else torch.tensor(wanted, dtype=torch.int64).to(self.device),
            )
        )

    def _decode_by_sequence(self, inputs: torch.Tensor, context: int) -> torch.Tensor:
        tokens, slots, positions = inputs.tolist()
        rows = [Row(slot, position, 1) for slot, position in zip(slots, positions, strict=True)]
        return self._run_rows(rows, tokens, is_prompt=False, wanted=None)

    def _decode_eagerly(self, inputs: torch.Tensor, context: int) -> torch.Tensor:
        return self._decode_together(inputs.to(self.device, non_blocking=True), context)

    def _decode_together(self, inputs: torch.Tensor, context: int) -> torch.Tensor:
        """One token of every row. inputs int64 [3, rows] on the device: token, slot (-1: padded row), position."""
        tokens, slots, positions = inputs
        plan = self.memory.pool.plan(slots.to(torch.int32), 1)
        kv_slots = torch.where(slots < 0, self.memory.kv.scratch_slot, slots)
        return self._forward(Batch(plan, tokens, positions, kv_slots, is_prompt=False, context=context))

    def _forward(self, batch: Batch) -> torch.Tensor:
        try:
            logits = self.model(batch, self.memory)
        except BaseException:
            self.memory.pool.abandon(batch.plan)
            raise
        self.memory.pool.commit(batch.plan)
        return logits


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() and _core.has_cuda() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}, expected cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch finds no GPU")
    if device.type == "cuda" and not _core.has_cuda():
        raise ValueError(
            f"device is {name!r}, but trtllm-replayssm was built without CUDA; see 'trtllm-replayssm info'"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}, expected cpu or cuda")
    return device
