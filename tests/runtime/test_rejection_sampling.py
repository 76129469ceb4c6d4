# SPDX-License-Identifier: Apache-2.0
"""Verification of sampled texts keeps their distribution, whatever is drafted (and for a seed even the text)."""

import pytest
import torch

from trtllm_replayssm.runtime import SamplingParams
from trtllm_replayssm.runtime.batch import Grid
from trtllm_replayssm.runtime.row_tiles import RowTiles
from trtllm_replayssm.runtime.sampler import sample
from trtllm_replayssm.runtime.verification import accept

VOCAB, ROWS = 6, 20000
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5  # logits of the token after each
KNOBS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.9},
]


def distribution(logits, temperature, top_k=0, top_p=1.0):
    """fp64 [vocab], token by token from the definition."""
    weights = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(VOCAB), key=lambda token: -weights[token])[: top_k or VOCAB]
    total = sum(weights[token] for token in order)
    kept, mass = {}, 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept[token] = weights[token] / total
        mass += kept[token]
    return torch.tensor([kept.get(token, 0.0) / mass for token in range(VOCAB)], dtype=torch.float64)


def greedy(tokens, random):
    return TABLE[tokens].argmax(-1)


def least_likely(tokens, random):
    return TABLE[tokens].argmin(-1)


def drawn(tokens, random):
    """From another distribution than the model's."""
    return torch.multinomial((TABLE[tokens] * 0.3).softmax(-1), 1, generator=random).squeeze(1)


def choose(tokens, params, positions):
    return sample(TABLE[tokens], params, torch.as_tensor(positions), RowTiles(fixed=False))


def three_tokens(first, knobs, draft):
    """[ROWS, 3] tokens after `first`, each row with its own seed: steps with up to two drafts until there are three."""
    random = torch.Generator().manual_seed(5)
    params = [SamplingParams(seed=seed, **knobs) for seed in range(ROWS)]
    texts = torch.full((ROWS, 4), first)
    done = torch.zeros(ROWS, dtype=torch.int64)
    while (rows := (done < 3).nonzero().squeeze(1)).numel():
        newest, counts = texts[rows, done[rows]], torch.minimum(3 - done[rows], torch.tensor(3))
        chain = [newest]
        for _ in range(2):
            chain.append(draft(chain[-1], random))
        width = torch.arange(3)
        packed = torch.stack(chain, 1)[width < counts[:, None]]
        grid = Grid.of(counts, 3, packed)
        owner = rows.repeat_interleave(counts).tolist()
        positions = (done[rows, None] + width + 10)[width < counts[:, None]]
        accepted, choices = accept(packed, choose(packed, [params[row] for row in owner], positions), grid)
        for step in range(3):
            taken = rows[accepted > step]
            texts[taken, done[taken] + 1 + step] = choices[accepted > step, step]
        done[rows] += accepted
    return texts[:, 1:]


def chi_square_is_plausible(counts, probabilities):
    """Impossible cells are empty; Pearson's statistic is below the 99.9 % quantile (Wilson and Hilferty's formula)."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    few = expected < 5  # cells too small for the approximation are counted as one
    observed = torch.cat([counts[possible][~few].double(), counts[possible][few].sum()[None].double()])
    expected = torch.cat([expected[~few], expected[few].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    print(f"chi-square {statistic:.1f} with {freedom} degrees of freedom, limit {limit:.1f}")
    return statistic < limit


@pytest.mark.parametrize("draft", [greedy, least_likely, drawn])
@pytest.mark.parametrize("knobs", KNOBS)
def test_three_tokens_have_the_distribution_of_plain_sampling(knobs, draft):
    """Chi-square against the exact joint distribution of 216 outcomes."""
    texts = three_tokens(2, knobs, draft)
    after = torch.stack([distribution(row, **knobs) for row in TABLE])
    joint = (after[2][:, None, None] * after[:, :, None] * after[None]).flatten()
    counts = torch.bincount((texts * torch.tensor([36, 6, 1])).sum(1), minlength=216)
    assert chi_square_is_plausible(counts, joint)


def test_acceptance_and_residual():
    """A draft x is accepted with p(x); otherwise the token comes from p without x, renormalised."""
    params = [SamplingParams(seed=seed, temperature=1.0) for seed in range(ROWS)]
    p, draft = distribution(TABLE[2], 1.0), int(TABLE[2].argmax())
    tokens = torch.tensor([2, draft]).repeat(ROWS)
    grid = Grid.of(torch.full((ROWS,), 2), 2, torch.arange(2 * ROWS))
    both = [p for p in params for _ in range(2)]
    accepted, choices = accept(tokens, choose(tokens, both, [7, 8] * ROWS), grid)
    hits = int((accepted == 2).sum())
    assert abs(hits / ROWS - p[draft]) < 4 * (p[draft] * (1 - p[draft]) / ROWS) ** 0.5
    residual = p.clone()
    residual[draft] = 0
    assert chi_square_is_plausible(
        torch.bincount(choices[accepted == 1, 0], minlength=VOCAB), residual / residual.sum()
    )
    assert chi_square_is_plausible(
        torch.bincount(choices[accepted == 2, 1], minlength=VOCAB), distribution(TABLE[draft], 1.0)
    )


def test_the_test_would_notice():
    """Accepting a draft always, as a careless verifier does, is found."""
    after = distribution(TABLE[2], 1.0)
    careless = torch.bincount(torch.full((ROWS,), int(TABLE[2].argmax())), minlength=VOCAB)
    assert not chi_square_is_plausible(careless, after)
    slightly = (after * ROWS).round()
    slightly[0] += 0.02 * ROWS
    assert not chi_square_is_plausible(slightly, after)


def test_the_longest_run_of_right_drafts_is_accepted():
    counts = torch.tensor([4, 1, 2, 4, 3])
    tokens = torch.tensor([9, 1, 2, 3] + [9] + [9, 1] + [9, 1, 2, 3] + [9, 1, 2])
    chosen = torch.tensor([1, 2, 3, 4] + [5] + [2, 1] + [1, 0, 3, 4] + [1, 2, 3])
    accepted, choices = accept(tokens, chosen, Grid.of(counts, 4, torch.arange(14)))
    assert accepted.tolist() == [4, 1, 1, 2, 3]
    new = [row[:n] for row, n in zip(choices.tolist(), accepted.tolist(), strict=True)]
    assert new == [[1, 2, 3, 4], [5], [2], [1, 0], [1, 2, 3]]
