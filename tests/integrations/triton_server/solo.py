# SPDX-License-Identifier: Apache-2.0
"""What a request's text must be: that of an engine which serves nobody else."""

from functools import cache

from trtllm_replayssm.runtime import Engine, SamplingParams
from trtllm_replayssm.runtime.agreement import margin_of_difference

from .serving import TINY

MARGIN = 1e-3  # of the two best logits, where another order of sums may choose the other


@cache
def engine(device: str = "cpu") -> Engine:
    return Engine(TINY, device=device, dtype="float32", max_batch=1, context=512)


@cache
def solo(prompt: str, params: SamplingParams, device: str = "cpu"):
    """The finished sequence."""
    return engine(device).generate([prompt], params)[0]


def assert_solo(prompt: str, params: SamplingParams, text: str, device: str = "cpu") -> None:
    """`text` is the solo run's, or parts from it where its two best logits nearly tie."""
    expected = solo(prompt, params, device)
    margin = margin_of_difference(engine(device), expected, text)
    assert margin is None or margin < MARGIN, f"{prompt!r}, {params}: {text!r} is not {expected.text!r}"
