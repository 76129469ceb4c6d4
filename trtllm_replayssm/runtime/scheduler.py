# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: who has a slot, and what the next forward pass is."""

from __future__ import annotations

from collections import deque

from .sequence import Sequence

_FEW = 1 / 8  # of all that run: so few prompts wait for company


class Scheduler:
    """Requests wait in line for one of `slots` slots, then run until they finish, leave, or are pre-empted.

    Prompt chunks begin at multiples of `prefill_chunk` whatever else is running, so that a request is cut, and hence
    summed, the same way in every company.
    """

    def __init__(self, slots: int, prefill_chunk: int):
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free = deque(range(slots))
        self._decoded = 1  # steps since the last pass of prompts

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Gives free slots to those who waited longest and returns them; their slots are not prepared yet."""
        admitted = []
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            sequence.slot = self.take_slot()
            admitted.append(sequence)
        self.running += admitted
        return admitted

    def take_slot(self) -> int:
        """A free slot for the caller's own use; RuntimeError if there is none."""
        if not self._free:
            raise RuntimeError("all slots are taken")
        return self._free.popleft()

    def give_slot(self, slot: int) -> None:
        self._free.append(slot)

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.give_slot(sequence.slot)
        sequence.slot = None

    def preempt(self, sequence: Sequence) -> None:
        """Back to the end of the line; its memory must have been saved."""
        self.release(sequence)
        self.waiting.append(sequence)

    def next_prompts(self) -> list[tuple[Sequence, int]] | None:
        """The next prompt chunks (sequence, tokens), as many as fit `prefill_chunk` together; None if it is decoding's
        turn.

        Where there are both, they take turns: neither starves the other. Before a pass for few prompts come two decode
        steps, for it would take about as long as one for many.
        """
        prompts = [sequence for sequence in self.running if sequence.in_prompt]
        waiting = sum(len(sequence.prefix) - sequence.prefilled for sequence in prompts)
        are_few = len(prompts) < _FEW * len(self.running) and waiting < self.prefill_chunk
        if not prompts or (self._decoded < 1 + are_few and len(prompts) < len(self.running)):
            self._decoded += 1
            return None
        self._decoded = 0
        chunks, total = [], 0
        for sequence in prompts:
            count = min(self.prefill_chunk, len(sequence.prefix) - sequence.prefilled)
            if chunks and total + count > self.prefill_chunk:
                break
            chunks.append((sequence, count))
            total += count
        return chunks

    def decoding(self) -> list[Sequence]:
        return [sequence for sequence in self.running if not sequence.in_prompt]
