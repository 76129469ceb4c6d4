# SPDX-License-Identifier: Apache-2.0
"""How close the two best logits are where a text parts from the engine's."""

import pytest

from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.agreement import margin_of_difference

from .conftest import TINY
from .prompts import PROMPTS


def test_margin_of_the_first_difference():
    engine = Engine(TINY, device="cpu", max_batch=1, context=64)
    (text,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=16, stop_tokens=()))
    best = engine.logits(text.prompt + text.tokens).topk(2).values[len(text.prompt) - 1 :]
    margins = (best[:, 0] - best[:, 1]).tolist()
    assert margin_of_difference(engine, text, text.text) is None
    assert len(text.pieces) == 16 and all(text.pieces) and min(margins) > 0
    for token in (0, 5, 15):
        before = "".join(text.pieces[:token])
        for other in (before + "#", before):  # another character, and a text that ends there
            assert margin_of_difference(engine, text, other) == pytest.approx(margins[token], abs=1e-4)
    assert margin_of_difference(engine, text, text.text + "#") == pytest.approx(margins[15], abs=1e-4)
    # Tokens 4 and 5 are a character together: either may be another.
    text.pieces[4:6] = ["", "".join(text.pieces[4:6])]
    other = "".join(text.pieces[:4]) + "#"
    assert margin_of_difference(engine, text, other) == pytest.approx(min(margins[4:6]), abs=1e-4)
