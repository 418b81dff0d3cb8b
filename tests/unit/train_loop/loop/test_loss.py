"""The chunked loss equals the loss over whole logits, with every added term; chunks apply if they save memory."""

from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn import functional as F

from tests.support.builders.specs import TINY, spec
from train_loop.data.dataset import IGNORE
from train_loop.loop.objectives.token_cross_entropy import LossRule, chunked_sum, sum_in_halves
from train_loop.model.folder import model_shape
from train_loop.plan import chunk_rows

RULES = [LossRule(), LossRule(label_smoothing=0.1), LossRule(z_loss=0.01), LossRule(0.2, 0.1)]


def draw(tokens: int, vocab: int, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return hidden [N, H], weight [V, H], bias [V] and labels [N], of which some are not trained."""
    torch.manual_seed(tokens)
    hidden, weight = torch.randn(tokens, 16), torch.randn(vocab, 16)
    labels = torch.randint(0, vocab, (tokens,)).where(torch.rand(tokens) > 0.3, IGNORE)
    return hidden, weight, torch.randn(vocab) if bias else None, labels


@pytest.mark.parametrize("rule", RULES)
@given(tokens=st.integers(1, 20), rows=st.integers(1, 25), bias=st.booleans(), weighted=st.booleans())
def test_chunked_loss_and_gradients_equal_those_of_whole_logits(
    rule: LossRule, tokens: int, rows: int, bias: bool, weighted: bool
) -> None:
    *tensors, labels = draw(tokens, 50, bias=bias)
    weights = torch.rand(tokens) if weighted else None
    results = []
    for chunked in (True, False):
        hidden, weight, b = (None if t is None else t.clone().requires_grad_() for t in tensors)
        assert hidden is not None
        assert weight is not None
        if chunked:
            loss = chunked_sum(rule, hidden, weight, b, labels, rows, weights)
        else:
            loss = rule.sum(F.linear(hidden, weight, b), labels, weights)
        torch.autograd.backward(loss / 3)
        results.append([loss.detach(), *(t.grad for t in (hidden, weight, b) if t is not None)])
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert other is not None
        assert (one - other).norm() <= 1e-6 * other.norm() + 1e-6


def test_chunked_loss_without_gradients_returns_the_value() -> None:
    hidden, weight, _, labels = draw(9, 50, bias=False)
    with torch.no_grad():
        for weights in (None, torch.rand(9)):
            loss = chunked_sum(LossRule(), hidden, weight.requires_grad_(), None, labels, 4, weights)
            assert not loss.requires_grad
            assert loss == pytest.approx(LossRule().sum(F.linear(hidden, weight), labels, weights).item(), rel=1e-6)


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, labels = draw(9, 50, bias=False)
    torch.autograd.backward(chunked_sum(LossRule(), hidden.requires_grad_(), weight, None, labels, 4))
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 9.0, 1.0, 0.0, 2.5])])
def test_smoothing_and_z_loss_equal_their_papers(weights: Tensor | None) -> None:
    logits, labels = torch.randn(5, 7), torch.tensor([1, IGNORE, 3, 0, 6])
    kept = labels != IGNORE
    log_p, log_z = logits.log_softmax(-1)[kept], logits.logsumexp(-1)[kept]
    true = -log_p[torch.arange(4), labels[kept]]
    each = 0.9 * true - 0.1 * log_p.mean(-1) + 0.01 * log_z.square()
    expected = (each if weights is None else each * weights[kept]).sum().item()
    found = LossRule(label_smoothing=0.1, z_loss=0.01).sum(logits, labels, weights)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_token_of_weight_zero_is_not_trained(rule: LossRule) -> None:
    logits, labels, weights = torch.randn(2, 6, 50), torch.randint(0, 50, (2, 6)), torch.rand(2, 6)
    weights[:, ::2] = 0
    results = []
    for targets, counts in ((labels, weights), (labels.where(weights > 0, IGNORE), weights.where(weights > 0, 1.0))):
        leaf = logits.clone().requires_grad_()
        loss = rule.sum(leaf, targets, counts)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", RULES)
def test_weights_of_one_give_the_bits_of_no_weights_in_order(rule: LossRule) -> None:
    """Check many sizes: two ways to sum differ in about every second one."""
    rule = replace(rule, in_order=True)
    for tokens in range(1, 60):
        torch.manual_seed(tokens)
        logits, labels = torch.randn(tokens, 50), torch.randint(0, 50, (tokens,))
        results = []
        for weights in (None, torch.ones(tokens)):
            leaf = logits.clone().requires_grad_()
            loss = rule.sum(leaf, labels, weights)
            results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


def test_sum_does_not_depend_on_threads_and_alignment() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 1000, 100_001):
            values, sums = torch.randn(count + 8), set[float]()
            for number, shift in product((1, 2, 3), range(8)):
                torch.set_num_threads(number)
                moved = torch.empty(count + 8)[shift : shift + count].copy_(values[:count])
                sums.add(sum_in_halves(moved).item())
            assert len(sums) == 1
            assert sums.pop() == pytest.approx(values[:count].double().sum().item(), abs=1e-3)
    finally:
        torch.set_num_threads(threads)


def rows_of(*, vocab: int, tokens: int, wanted: bool | None = None) -> int | None:
    job = spec(model={"config": TINY | {"vocab_size": vocab}}, training={"chunked_loss": wanted})
    return chunk_rows(job, model_shape(job.model), tokens=tokens)


def test_head_is_chunked_if_whole_logits_take_more_memory() -> None:
    # fp32: 12 bytes for each logit, 2**29 for a chunk, and the head's gradient of 4 bytes x 32 x vocab.
    assert rows_of(vocab=151_936, tokens=4096) == 2**29 // (12 * 151_936)
    assert rows_of(vocab=384, tokens=4096) is None
    assert rows_of(vocab=151_936, tokens=300) is None, "expected whole logits: a chunk and the gradient take more"


def test_spec_overrides_the_choice_of_chunks() -> None:
    assert rows_of(vocab=384, tokens=40, wanted=True) == 40
    assert rows_of(vocab=151_936, tokens=4096, wanted=False) is None
