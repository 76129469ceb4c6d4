# SPDX-License-Identifier: Apache-2.0
"""Whether a text is the one that an engine would have written, or parts from it where two logits nearly tie."""

from __future__ import annotations

from itertools import accumulate

from .engine import Serving
from .sequence import Sequence


def margin_of_difference(engine: Serving, expected: Sequence, text: str) -> float | None:
    """The distance of the two best logits of `engine` at the token where `text` parts from the text of `expected`,
    which is finished. None if they are equal. What follows the first difference is not compared.
    """
    if text == expected.text:
        return None
    pairs = enumerate(zip(text, expected.text, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), min(len(text), len(expected.text)))
    last = sum(end <= same for end in accumulate(map(len, expected.pieces)))
    last = min(last, len(expected.tokens) - 1)
    first = last
    while first and not expected.pieces[first - 1]:  # half a character: it may be another one's
        first -= 1
    logits = engine.logits(expected.prompt + expected.tokens[:last])[len(expected.prompt) - 1 + first :]
    best, second = logits.topk(2).values.unbind(-1)
    return float((best - second).min())
