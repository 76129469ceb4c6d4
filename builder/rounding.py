# SPDX-License-Identifier: Apache-2.0
"""What rounding its weights does to a model: errors of the weights, and of the predictions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..runtime.engine import Engine
from ..runtime.model_config import ModelConfig
from ..runtime.weights import Weights
from .model_optimizer import Progress

_CPU = torch.device("cpu")
_CHUNK = 2**22  # values compared at a time
_MOST_LOGITS = 2**28  # values that are kept


@dataclass(frozen=True)
class WeightError:
    """Of a quantised weight: |W' - W| / |W|, and the cosine of the angle between them."""

    name: str
    format: str
    relative: float
    cosine: float


@dataclass(frozen=True)
class Divergence:
    """Of the quantised model's predictions from the source's, over `tokens` tokens of the calibration text. Both run in
    the embedded runtime: weights as they were rounded, activations as they are.

    kl: mean of KL(source || quantised), nats. same_top: how often the most likely token is the same. source_loss, loss:
    mean negative logarithm of the next token's probability.
    """

    tokens: int
    kl: float
    same_top: float
    source_loss: float
    loss: float


def weight_errors(source: Weights, result: Weights, progress: Progress) -> Iterator[WeightError]:
    """Of every weight that is quantised in `result`."""
    for number, (name, format) in enumerate(result.quantized.items()):
        progress("measuring errors", number, len(result.quantized))
        before, after = (weights.read(name, torch.float32, _CPU).flatten() for weights in (source, result))
        sums = torch.zeros(4, dtype=torch.float64)
        for one, other in zip(before.split(_CHUNK), after.split(_CHUNK), strict=True):
            one, other = one.double(), other.double()
            sums += torch.stack([one @ one, other @ other, one @ other, (other - one).square().sum()])
        size, now, product, error = sums.tolist()
        relative, cosine = (math.sqrt(error / size), product / math.sqrt(size * now)) if size else (0.0, 1.0)
        yield WeightError(name, format, relative, cosine)
    progress("measuring errors", len(result.quantized), len(result.quantized))


def divergence(checkpoint: str | Path, folder: Path, rows: torch.Tensor, progress: Progress) -> Divergence | None:
    """Of the model in `folder` from that of `checkpoint`, along as many of `rows` int64 [rows, length] as their logits
    can be kept of. None, with a warning, if a GPU's memory does not suffice."""
    try:
        return _compared(checkpoint, folder, rows, progress)
    except torch.OutOfMemoryError as error:
        warnings.warn(f"predictions are not compared: {error}", stacklevel=3)
        return None


def _compared(checkpoint: str | Path, folder: Path, rows: torch.Tensor, progress: Progress) -> Divergence:
    length = rows.shape[1]
    vocabulary = ModelConfig.read(checkpoint).vocab_size
    compared = rows[: max(1, _MOST_LOGITS // (length * vocabulary))]
    done, total = 0, 2 * len(compared)

    def logarithms(which: str | Path) -> Iterator[torch.Tensor]:
        nonlocal done
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that weights are dequantised: the report says so
            engine = Engine(which, max_batch=1, context=length)
        for row in compared:
            progress("comparing predictions", done, total)
            done += 1
            yield engine.logits(row.tolist()).cpu().log_softmax(-1)

    kept = list(logarithms(checkpoint))
    sums = torch.zeros(4, dtype=torch.float64)
    for row, before, after in zip(compared, kept, logarithms(folder), strict=True):
        kl = (before.exp().double() * (before.double() - after.double())).sum()
        same = (before.argmax(-1) == after.argmax(-1)).sum()
        losses = (F.nll_loss(one[:-1], row[1:], reduction="sum") for one in (before, after))
        sums += torch.tensor([kl, same, *losses], dtype=torch.float64)
    progress("comparing predictions", total, total)
    kl, same, source_loss, loss = sums.tolist()
    tokens, predicted = compared.numel(), len(compared) * (length - 1)
    return Divergence(tokens, kl / tokens, same / tokens, source_loss / predicted, loss / predicted)
