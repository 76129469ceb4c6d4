# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token of each row from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .row_tiles import RowTiles


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    max_tokens: most tokens to generate.
    temperature: 0: greedy (the token of the largest logit); else logits are divided by it.
    top_k: sample from the k most likely tokens only; 0: all.
    top_p: sample from the fewest most likely tokens (of those) whose probability reaches top_p; 1: all.
    seed: random numbers depend on (seed, position in the sequence) only, never on the batch.
    stop_tokens: ids that end the text; None: the checkpoint's end-of-sequence tokens, (): none.
    stop: strings that end the text and are no part of it.
    draft_tokens: most drafts a step, 0: none; None: the engine's `draft_tokens`. Changes the speed, not the text.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    draft_tokens: int | None = None

    def __post_init__(self):
        for name in ("max_tokens", "top_k", "seed", "draft_tokens"):
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not is_int and not (name == "draft_tokens" and value is None):
                raise TypeError(f"{name} is {value!r}, expected an int")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}, expected a number")
        for name, valid, expected in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number of at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("seed", 0 <= self.seed < 2**64, "in 0 .. 2^64-1"),
            ("draft_tokens", self.draft_tokens is None or self.draft_tokens >= 0, "at least 0"),
            (
                "stop",
                not isinstance(self.stop, str) and all(isinstance(s, str) and s for s in self.stop),
                "a tuple of non-empty strings",
            ),
        ):
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) with 24 random bits, fp32 and exact, functions of (seed, position): two rounds of splitmix64.

    seeds, positions: int64, seeds the bits of unsigned ones.
    """
    value = seeds
    for word in (0, positions):
        value = value + word + _signed(0x9E3779B97F4A7C15)
        value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
        value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
        value = value ^ _shifted(value, 31)
    return _shifted(value, 40).float() / 2**24


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number: sums and products wrap alike."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    positions: torch.Tensor,
    tiles: RowTiles,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Next token ids int64 [k], still on the device, from logits fp32 [k, vocab].

    positions int64 [k]: where in its sequence each new token will stand. rows int64 [k]: which of `params` each goes
    by; None: one after the other.
    """
    greedy = logits.argmax(-1)
    if all(p.temperature == 0 for p in params):
        return greedy
    vocab, pinned = logits.shape[-1], logits.is_cuda
    knobs = [(max(p.temperature, 1e-30) if p.temperature else 0.0, p.top_k or vocab, p.top_p) for p in params]
    knobs = torch.tensor(knobs, dtype=torch.float32, pin_memory=pinned).to(logits.device, non_blocking=True)
    seeds = torch.tensor([_signed(p.seed) for p in params], pin_memory=pinned).to(logits.device, non_blocking=True)
    if rows is not None:
        knobs, seeds = knobs[rows], seeds[rows]
    is_greedy = knobs[:, 0] == 0
    knobs = torch.cat([knobs, uniform(seeds, positions)[:, None]], 1)
    return torch.where(is_greedy, greedy, tiles(_draw, logits, knobs))


def _draw(logits: torch.Tensor, knobs: torch.Tensor) -> torch.Tensor:
    """Inverts the cumulative distribution of each row. knobs fp32 [k, 4]: temperature, top_k, top_p, uniform number."""
    temperature, top_k, top_p, u = (column[:, None] for column in knobs.unbind(-1))
    # Rows that only pad a tile have temperature 0: their result is dropped, whatever it is.
    # Measured from the largest logit, so that no temperature overflows.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    probability = ordered.masked_fill(rank >= top_k, float("-inf")).softmax(-1)
    before = probability.cumsum(-1) - probability
    probability = probability.masked_fill((before >= top_p) & (rank > 0), 0)
    cumulative = probability.cumsum(-1)
    chosen = (cumulative <= u * cumulative[:, -1:]).sum(-1, keepdim=True)
    # u * mass may round up to the mass itself: then the last token with any probability is meant.
    chosen = torch.minimum(chosen, (probability > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return tokens.gather(-1, chosen).squeeze(-1)
