# SPDX-License-Identifier: Apache-2.0
"""Free-running greedy decoding in a configuration, and what public reports see first when states are too coarse: texts
that grow longer and repeat themselves.
"""

from __future__ import annotations

import numpy as np
import torch

from .. import ReplayConfig
from .subject import Decoder, Subject
from .walk import walk

NGRAM = 8  # tokens of a passage that counts as repeated


def generate(subject: Subject, replay: ReplayConfig, prompts: torch.Tensor, count: int, stride: int) -> torch.Tensor:
    """int64 [rows, count]: the most likely tokens after `prompts` int64 [rows, n], past any stop token. n is a multiple
    of `stride`, the prompt's tokens a step.
    """
    rows, length = prompts.shape
    tokens = torch.zeros((rows, length + count), dtype=torch.int64, device=prompts.device)
    tokens[:, :length] = prompts
    decoder = Decoder(subject, replay, tokens)

    def forced(first: torch.Tensor, context: int) -> None:
        extend(first + stride, decoder.step(first, stride, context))

    def free(first: torch.Tensor, context: int) -> None:
        extend(first + 1, decoder.step(first, 1, context))

    def extend(after: torch.Tensor, logits: torch.Tensor) -> None:
        # Inside the prompt the text stays what it is.
        old = tokens.index_select(1, after[None])
        tokens.index_copy_(1, after[None], torch.where(after < length, old, logits[:, -1:].argmax(-1)))

    walk(forced, 0, length, stride, tokens.device)
    walk(free, length, length + count - 1, 1, tokens.device)
    decoder.memory.pool.validate()
    return tokens[:, length:]


def compare_texts(texts: np.ndarray, reference: np.ndarray, stop_tokens: tuple[int, ...]) -> dict:
    """Figures of texts [rows, n] beside those that FP32 states give.

    length: mean tokens up to a stop token, a text without one counting as n; length_growth: over that of the reference.
    unfinished: share of texts without a stop token. agreement: mean tokens before the first that differs. repeated:
    share of tokens that end a passage of NGRAM tokens which occurred before in the text.
    """
    lengths, reference_lengths = _lengths(texts, stop_tokens), _lengths(reference, stop_tokens)
    n = texts.shape[1]
    differs = texts != reference
    agreement = np.where(differs.any(1), differs.argmax(1), n)
    return {
        "tokens": n,
        "has_stop_token": bool(stop_tokens),
        "length": lengths.mean(),
        "reference_length": reference_lengths.mean(),
        "length_growth": lengths.mean() / reference_lengths.mean(),
        "unfinished": (lengths == n).mean(),
        "reference_unfinished": (reference_lengths == n).mean(),
        "agreement": agreement.mean(),
        "repeated": _repeated(texts, lengths),
        "reference_repeated": _repeated(reference, reference_lengths),
    }


def _lengths(texts: np.ndarray, stop_tokens: tuple[int, ...]) -> np.ndarray:
    stops = np.isin(texts, stop_tokens)
    return np.where(stops.any(1), stops.argmax(1), texts.shape[1])


def _repeated(texts: np.ndarray, lengths: np.ndarray) -> float:
    repeated = passages = 0
    for text, length in zip(texts.tolist(), lengths.tolist(), strict=True):
        seen = set()
        for end in range(NGRAM, length + 1):
            passage = tuple(text[end - NGRAM : end])
            repeated += passage in seen
            passages += 1
            seen.add(passage)
    return repeated / max(passages, 1)
