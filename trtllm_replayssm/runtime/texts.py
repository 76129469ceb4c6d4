# SPDX-License-Identifier: Apache-2.0
"""Rows of equal length, cut from text files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .tokenizer import Tokenizer


def read_rows(tokenizer: Tokenizer, files: Sequence[str | Path], rows: int, tokens: int) -> torch.Tensor:
    """int64 [rows, tokens]: `rows` different pieces of the files, none overlapping, spread evenly over all of them.

    Raises OSError for a file that cannot be read, ValueError for one that is no UTF-8 text and if there is too little
    text, both by name.
    """
    pieces, lengths = [], []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected UTF-8 text, got byte {error.start} ({error.reason})") from None
        encoded = torch.tensor(tokenizer.encode(text), dtype=torch.int64)
        lengths.append(f"{file} has {len(encoded)}")
        pieces += encoded[: len(encoded) // tokens * tokens].split(tokens)
    pieces = [piece for piece in pieces if len(piece) == tokens]
    if len(pieces) < rows:
        raise ValueError(
            f"{rows} different texts of {tokens} tokens were asked for, the files hold {len(pieces)}: "
            f"{', '.join(lengths)} tokens"
        )
    return torch.stack([pieces[index * len(pieces) // rows] for index in range(rows)])
