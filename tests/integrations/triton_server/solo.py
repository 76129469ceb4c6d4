# SPDX-License-Identifier: Apache-2.0
"""What a request's text must be: that of an engine which serves nobody else."""

from functools import cache

from trtllm_replayssm.runtime import Engine, SamplingParams

from .serving import TINY

MARGIN = 1e-3  # of the two best logits, where another order of sums may choose the other


@cache
def engine() -> Engine:
    return Engine(TINY, device="cpu", max_batch=1, context=512)


@cache
def solo(prompt: str, params: SamplingParams):
    """The finished sequence."""
    return engine().generate([prompt], params)[0]


def assert_solo(prompt: str, params: SamplingParams, text: str) -> None:
    """`text` is the solo run's, or parts from it where its two best logits nearly tie."""
    expected = solo(prompt, params)
    if text == expected.text:
        return
    same = next((i for i, (a, b) in enumerate(zip(text, expected.text, strict=False)) if a != b), len(text))
    settled, at = 0, 0
    while at < len(expected.pieces) - 1 and settled + len(expected.pieces[at]) <= same:
        settled += len(expected.pieces[at])
        at += 1
    best = engine().logits(expected.prompt + expected.tokens[:at])[-1].topk(2).values.tolist()
    assert best[0] - best[1] < MARGIN, f"{prompt!r}, {params}: {text!r} is not {expected.text!r}"
