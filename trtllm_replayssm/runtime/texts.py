# SPDX-License-Identifier: Apache-2.0
"""Rows of equal length, cut from text files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import torch

from .tokenizer import Tokenizer


def read_rows(tokenizer: Tokenizer, files: Sequence[str | Path], rows: int, tokens: int) -> torch.Tensor:
    """int64 [rows, tokens]: `rows` different pieces of the files, none overlapping, spread evenly over all of them.

    Raises OSError for a file that cannot be read, ValueError for one that is no UTF-8 text or named twice and if there
    is too little text, all by name.
    """
    pieces, lengths, seen = [], [], {}
    for file in files:
        status = Path(file).stat()
        inode = status.st_dev, status.st_ino
        if inode in seen:
            raise ValueError(f"texts: expected different files, got {seen[inode]} and {file}, which are the same")
        seen[inode] = file
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


def require_different(rows: torch.Tensor, files: Sequence[str | Path]) -> None:
    """ValueError if two of `rows` int64 [rows, tokens], which are of `files`, are no independent texts: if one holds a
    quarter of the other, at least 64 tokens, which no two texts share by chance. So half of a text suffices, wherever
    it begins.
    """
    texts = ["".join(map(chr, row)) for row in rows.tolist()]  # a str finds whole tokens, bytes would find parts
    tokens = rows.shape[1]
    quarter = min(max(tokens // 4, 64), tokens)
    for (i, one), (j, other) in permutations(enumerate(texts), 2):
        if any(one[at : at + quarter] in other for at in range(0, tokens - quarter + 1, quarter)):
            raise ValueError(
                f"rows {min(i, j)} and {max(i, j)} of {', '.join(map(str, files))} share {quarter} tokens in a row, "
                "expected different texts"
            )
