# SPDX-License-Identifier: Apache-2.0
"""One request and how far it has come."""

from __future__ import annotations

from .frontier import Turn
from .memory import SavedSlot
from .sampler import SamplingParams
from .tokenizer import TextStream
from .verification import Acceptance


class Sequence:
    """A prompt being prefilled, then a text growing by one or, with drafts, more tokens a step.

    slot: its memory while it runs, else None. saved: its memory while it is pre-empted, else None.
    prefix: what must be in memory before it decodes: its prompt and, where its state was lost, what was generated then.
    prefilled: how much of that is. lost_at: how many tokens it had when its state was lost last. tokens, pieces: what
    was generated, and the text that each token settled. finish_reason: None while it runs, then "stop" (stop token or
    string), "length", "cancelled" or "error".
    max_drafts: most drafts a step. draft_length: how many its next step shall have; `adapt` changes it. drafts: those
    that were proposed for it. steps: tokens that each decode step brought (1 + drafts) and kept.
    """

    def __init__(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        stop_tokens: frozenset[int],
        text: TextStream,
        max_drafts: int = 0,
    ):
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.stop_tokens, self._text = stop_tokens, text
        self.slot: int | None = None
        self.saved: SavedSlot | None = None
        self.prefix, self.prefilled = prompt, 0
        self.lost_at: int | None = None
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish_reason: str | None = None
        self.max_drafts = self.draft_length = max_drafts
        self.drafts: list[int] = []
        self.steps: list[tuple[int, int]] = []

    @property
    def in_prompt(self) -> bool:
        return self.prefilled < len(self.prefix)

    @property
    def length(self) -> int:
        """Tokens in memory. The newest generated token is not: the next step brings it."""
        if self.in_prompt:
            return self.prefilled
        return len(self.prompt) + max(len(self.tokens) - 1, 0)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(self.steps)

    @property
    def tokens_left(self) -> int:
        """How many it may still get."""
        return self.params.max_tokens - len(self.tokens)

    def turn(self) -> Turn:
        """Its next step: the newest token and its drafts, no more than the text may still need."""
        return Turn(self.slot, self.length, [self.tokens[-1], *self.drafts[: self.tokens_left - 1]])

    def turn_ahead(self) -> Turn:
        """The step after the one on its way, which brings a token at least."""
        last = len(self.prompt) + self.params.max_tokens - 2  # behind the last but one come no drafts
        return Turn(self.slot, drafts=max(min(self.draft_length, self.tokens_left - 2), 0), last=last)

    def extend(self, tokens: list[int]) -> None:
        """Takes the next generated tokens, up to where the text ends."""
        for token in tokens:
            if self.finish_reason is None:
                self._append(token)

    def begin_again(self) -> None:
        """Its memory is empty: the prompt and all tokens so far go through prompt chunks, the last of which brings the
        next token."""
        self.prefix, self.prefilled, self.drafts = [*self.prompt, *self.tokens], 0, []
        self.lost_at = len(self.tokens)

    def adapt(self) -> None:
        """One draft more after a step whose drafts were all accepted, one less after one that lost more than half of
        them; from 1 to `max_drafts`.
        """
        brought, kept = self.steps[-1]
        drafts, accepted = brought - 1, kept - 1
        if accepted == drafts > 0:
            self.draft_length = min(self.draft_length + 1, self.max_drafts)
        elif 2 * accepted < drafts:
            self.draft_length = max(self.draft_length - 1, 1)

    def _append(self, token: int) -> None:
        """Finishes the sequence if it ends with this token. A stop token has no text."""
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
