# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and, piece by piece, back."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import tokenizers

from .model_config import CheckpointError


class Tokenizer:
    """The `tokenizer.json` of a checkpoint."""

    def __init__(self, checkpoint: str | Path):
        path = Path(checkpoint) / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{path}: no such file")
        if not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest vocabulary entry: no token covers more of a text."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the model expects around a text."""
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        """Text of the tokens; special tokens have none."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class TextStream:
    """Turns one sequence's tokens into text as they come.

    A token may end inside a character or inside a stop string: such text is held back until it is decided. The pieces
    of a sequence, joined, are its text; no piece ever holds half a character.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._settled = 0  # tokens[:settled] are out; they stay as context, since decoding depends on what went before
        self._context = 0  # where the context that the next piece is decoded with begins
        self._held = ""  # complete characters that may begin a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became certain with `token`. Sets `stopped` when a stop string is complete."""
        self._tokens.append(token)
        known = self._tokenizer.decode(self._tokens[self._context : self._settled])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the token ends inside a character
            return ""
        self._context, self._settled = self._settled, len(self._tokens)
        return self._until_stop(text[len(known) :])

    def finish(self) -> str:
        """What is still held when the sequence ends: complete characters only."""
        known = self._tokenizer.decode(self._tokens[self._context : self._settled])
        text = self._tokenizer.decode(self._tokens[self._context :])[len(known) :]
        out = self._until_stop(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        return out if self.stopped else out + self._held

    def _until_stop(self, text: str) -> str:
        text = self._held + text
        if found := [at for stop in self._stop if (at := text.find(stop)) >= 0]:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
