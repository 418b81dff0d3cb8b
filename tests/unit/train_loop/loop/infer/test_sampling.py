"""Sampling: the distribution of drawn tokens, and what they depend on."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from train_loop.loop.infer.sampling import choose_tokens, gumbel_noise, keep_probable
from train_loop.spec import GenerationSpec

ROWS = torch.arange(20_000)


def test_drawn_tokens_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf]).expand(len(ROWS), 5)
    drawn = choose_tokens(logits, GenerationSpec(temperature=1.5), ROWS, 0)
    counts = torch.bincount(drawn, minlength=5)
    expected = len(ROWS) * (logits[0] / 1.5).softmax(-1)
    assert counts[4] == 0
    # Chi-square of 3 degrees of freedom: above 21 in 1 of 10,000 cases, and the numbers are always the same.
    assert float(((counts - expected)[:4] ** 2 / expected[:4]).sum()) < 21


def test_noise_depends_on_seed_row_position_and_token_alone() -> None:
    noise = gumbel_noise(7, ROWS[:50], 3, 11)
    assert torch.equal(gumbel_noise(7, ROWS[40:50], 3, 11), noise[40:])
    assert torch.equal(gumbel_noise(7, ROWS[:50], 3, 9), noise[:, :9])
    # No two of them share a value: not seeds and rows, nor rows and positions.
    every = [gumbel_noise(seed, ROWS[:50], position, 11) for seed in (0, 1, 7, 2**63 - 1) for position in range(5)]
    values = torch.cat(every).flatten().tolist()
    assert len(set(values)) == len(values)


def test_noise_has_the_moments_of_a_gumbel_distribution_without_correlation() -> None:
    noise = gumbel_noise(0, ROWS, 0, 8)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(1.6449, abs=0.04)
    following = gumbel_noise(0, ROWS + 1, 0, 8), gumbel_noise(0, ROWS, 1, 8), gumbel_noise(1, ROWS, 0, 8)
    for other in (*following, noise.roll(1, 1)):
        pair = torch.stack([noise.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.01


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (5, 1.0), (12, 0.7), (1, 0.01), (400, 0.3)])
def test_excluded_tokens_are_those_of_transformers(top_k: int, top_p: float) -> None:
    scores = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    spec = GenerationSpec(temperature=1.0, top_k=top_k, top_p=top_p)
    expected = scores
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(keep_probable(scores, spec), expected)


def test_first_of_equally_probable_tokens_is_chosen() -> None:
    logits = torch.zeros(2, 300, dtype=torch.bfloat16)
    logits[1, 7:9] = 1.0
    assert choose_tokens(logits, GenerationSpec(), torch.arange(2), 0).tolist() == [0, 7]
