# SPDX-License-Identifier: Apache-2.0
"""One request and how far it has come."""

from __future__ import annotations

from .memory import SavedSlot
from .sampler import SamplingParams
from .tokenizer import TextStream


class Sequence:
    """A prompt being prefilled, then a text growing token by token.

    slot: its memory while it runs, else None. saved: its memory while it is pre-empted, else None.
    prefilled: prompt tokens that are in memory. tokens, pieces: what was generated, and the text that each token
    settled. finish_reason: None while it runs, then "stop" (stop token or string), "length", "cancelled" or "error".
    """

    def __init__(
        self, request_id: int, prompt: list[int], params: SamplingParams, stop_tokens: frozenset[int], text: TextStream
    ):
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.stop_tokens, self._text = stop_tokens, text
        self.slot: int | None = None
        self.saved: SavedSlot | None = None
        self.prefilled = 0
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish_reason: str | None = None

    @property
    def in_prompt(self) -> bool:
        return self.prefilled < len(self.prompt)

    @property
    def length(self) -> int:
        """Tokens in memory. The newest generated token is not: the next step brings it."""
        return self.prefilled + max(len(self.tokens) - 1, 0)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def append(self, token: int) -> None:
        """Takes the next generated token and finishes the sequence if it ends here. A stop token has no text."""
        self.tokens.append(token)
        if token in self.stop_tokens:
            self.pieces.append("")
            return self.finish("stop")
        self.pieces.append(self._text.push(token))
        if self._text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.params.max_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        if self.pieces:
            self.pieces[-1] += self._text.finish()
        self.finish_reason = "stop" if self._text.stopped else reason
