"""The choice of a next token from logits. n: rows, V: vocabulary.

A drawn token depends on the logits, the seed, the row's id and the position alone: the noise of each token of the
vocabulary is a hash of them. Ranks and batches share no state.
"""

import torch
from torch import Tensor

from train_loop.spec import GenerationSpec

_STEP, _FIRST, _SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64 (Steele et al., 2014) as signed integers, whose products wrap as those of unsigned ones."""


def choose_tokens(logits: Tensor, spec: GenerationSpec, rows: Tensor, position: int) -> Tensor:
    """Return a token [n] for each row of logits [n, V]. `rows` [n] has the rows' ids.

    The lowest of equally probable tokens is chosen. A token is drawn by the Gumbel-max trick: the maximum of
    log-probability and noise has the distribution of the softmax. Unlike a cumulative sum, it changes by rounding only
    if two tokens are nearly equal.
    """
    if spec.temperature == 0:
        return logits.float().argmax(-1)
    scores = keep_probable(logits.float() / spec.temperature, spec)
    return (scores.double() + gumbel_noise(spec.seed, rows, position, logits.shape[-1])).argmax(-1)


def keep_probable(scores: Tensor, spec: GenerationSpec) -> Tensor:
    """Return scores [n, V] with -inf at tokens that top_k, and then top_p, exclude: the rules of transformers."""
    if 0 < spec.top_k < scores.shape[-1]:
        least = scores.topk(spec.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if spec.top_p < 1:
        ordered, places = scores.sort(descending=True, stable=True)
        parts = ordered.softmax(-1)
        before = parts.cumsum(-1) - parts
        excluded = torch.zeros_like(before, dtype=torch.bool).scatter(-1, places, before >= spec.top_p)
        scores = scores.masked_fill(excluded, -torch.inf)
    return scores


def gumbel_noise(seed: int, rows: Tensor, position: int, vocabulary: int) -> Tensor:
    """Return noise [n, V] of the standard Gumbel distribution in float64."""
    start, place = torch.tensor([seed, position + 1], dtype=torch.int64, device=rows.device)
    of_row = _mix(_mix(_mix(start) + (rows + 1) * _STEP) + place * _STEP)
    tokens = torch.arange(1, vocabulary + 1, device=rows.device)
    bits = _mix(of_row[:, None] + tokens * _STEP)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _mix(values: Tensor) -> Tensor:
    """Return a hash of 64 bits of each value."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return int64 values shifted right as unsigned ones."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
