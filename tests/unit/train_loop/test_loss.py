"""The loss in chunks is the loss, whatever is added to cross entropy; chunks are taken where they save memory."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn import functional as F

from tests.support.specs import TINY, spec
from train_loop.data.dataset import IGNORE
from train_loop.loss import LossRule, chunked_sum
from train_loop.model_folder import model_shape
from train_loop.plan import chunk_rows

RULES = [LossRule(), LossRule(label_smoothing=0.1), LossRule(z_loss=0.01), LossRule(0.2, 0.1)]


def draw(tokens: int, vocab: int, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """hidden [N, H], weight [V, H], bias [V] and labels [N], some of them not trained."""
    torch.manual_seed(tokens)
    hidden, weight = torch.randn(tokens, 16), torch.randn(vocab, 16)
    labels = torch.randint(0, vocab, (tokens,)).where(torch.rand(tokens) > 0.3, IGNORE)
    return hidden, weight, torch.randn(vocab) if bias else None, labels


@pytest.mark.parametrize("rule", RULES)
@given(tokens=st.integers(1, 20), rows=st.integers(1, 25), bias=st.booleans())
def test_chunks_give_the_value_and_gradients_of_whole_logits(
    rule: LossRule, tokens: int, rows: int, bias: bool
) -> None:
    *tensors, labels = draw(tokens, 50, bias=bias)
    results = []
    for chunked in (True, False):
        hidden, weight, b = (None if t is None else t.clone().requires_grad_() for t in tensors)
        assert hidden is not None
        assert weight is not None
        if chunked:
            loss = chunked_sum(rule, hidden, weight, b, labels, rows)
        else:
            loss = rule.sum(F.linear(hidden, weight, b), labels)
        torch.autograd.backward(loss / 3)
        results.append([loss.detach(), *(t.grad for t in (hidden, weight, b) if t is not None)])
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert other is not None
        assert (one - other).norm() <= 1e-6 * other.norm() + 1e-6


def test_without_gradients_chunks_give_the_value_alone() -> None:
    hidden, weight, _, labels = draw(9, 50, bias=False)
    with torch.no_grad():
        loss = chunked_sum(LossRule(), hidden, weight.requires_grad_(), None, labels, 4)
    assert not loss.requires_grad
    assert loss == pytest.approx(LossRule().sum(F.linear(hidden, weight), labels).item(), rel=1e-6)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, labels = draw(9, 50, bias=False)
    torch.autograd.backward(chunked_sum(LossRule(), hidden.requires_grad_(), weight, None, labels, 4))
    assert weight.grad is None
    assert hidden.grad is not None


def test_smoothing_and_z_loss_are_what_their_papers_say() -> None:
    logits, labels = torch.randn(5, 7), torch.tensor([1, IGNORE, 3, 0, 6])
    kept = labels != IGNORE
    log_p, log_z = logits.log_softmax(-1)[kept], logits.logsumexp(-1)[kept]
    true = -log_p[torch.arange(4), labels[kept]]
    expected = (0.9 * true - 0.1 * log_p.mean(-1)).sum() + 0.01 * log_z.square().sum()
    assert LossRule(label_smoothing=0.1, z_loss=0.01).sum(logits, labels) == pytest.approx(expected.item(), rel=1e-6)


def rows_of(*, vocab: int, tokens: int, wanted: bool | None = None) -> int | None:
    job = spec(model={"config": TINY | {"vocab_size": vocab}}, training={"chunked_loss": wanted})
    return chunk_rows(job, model_shape(job.model), tokens=tokens)


def test_the_head_is_chunked_where_whole_logits_would_take_more() -> None:
    # fp32: 12 bytes for each logit, 2**29 for a chunk, and the head's gradient of 4 bytes x 32 x vocab.
    assert rows_of(vocab=151_936, tokens=4096) == 2**29 // (12 * 151_936)
    assert rows_of(vocab=384, tokens=4096) is None
    assert rows_of(vocab=151_936, tokens=300) is None, "a chunk and the gradient take more than whole logits"


def test_the_spec_has_the_last_word_on_chunks() -> None:
    assert rows_of(vocab=384, tokens=40, wanted=True) == 40
    assert rows_of(vocab=151_936, tokens=4096, wanted=False) is None
