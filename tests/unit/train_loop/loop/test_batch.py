"""Checks of rows against the model, and the pairing of weights with labels."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import dataset_of, random_rows, replaced, token_rows, weigh
from train_loop.data.dataset import IGNORE, Rows
from train_loop.errors import DataError
from train_loop.loop.batch import StepBatch, check_vocabulary, micro_batches, share_rows
from train_loop.loop.objectives.token_cross_entropy import total_weight
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.family import CAUSAL
from train_loop.plan import plan_mesh

VOCAB = int(TINY["vocab_size"])
ONE_RANK: Any = SimpleNamespace(
    plan=plan_mesh(world=1, fsdp_size=0, ulysses_size=1), device=torch.device("cpu"), sequence_rank=0
)


@pytest.fixture(scope="module")
def model() -> Anatomy:
    return CAUSAL.build(spec().model)


def test_tokens_in_vocabulary_and_ignored_labels_pass() -> None:
    rows = random_rows(3, 8, vocab=VOCAB, packed=False)
    rows.input_ids[0, 0], rows.labels[2, 7] = VOCAB - 1, -100
    check_vocabulary(rows, VOCAB)
    check_vocabulary(None, VOCAB)


@pytest.mark.parametrize(
    ("field", "value", "description"),
    [("input_ids", VOCAB, "token 384"), ("input_ids", -100, "token -100"), ("labels", -1, "label -1")],
)
def test_token_outside_the_vocabulary_is_reported(field: str, value: int, description: str) -> None:
    rows = random_rows(3, 8, vocab=VOCAB, packed=False)
    values: np.ndarray[tuple[int, int], np.dtype[np.int32]] = getattr(rows, field)
    values[1, 5] = value
    with pytest.raises(
        DataError, match=f"sample 1 has {description} at position 5, outside the model's vocabulary of 384"
    ):
        check_vocabulary(rows, VOCAB)


def batch_of(rows: Rows) -> StepBatch:
    return share_rows(rows, count=len(rows.samples), dataset=dataset_of(rows), mesh=ONE_RANK)


def test_weight_belongs_to_the_predicted_token() -> None:
    ids, positions = np.array([[5, 6, 7, 8, 9]], np.int32), np.array([[0, 1, 2, 0, 1]], np.int32)
    # No position predicts the first token of a document, so its weight is unused.
    weights = np.array([[9, 2, 0.1, 7, 3]], np.float32)
    batch = batch_of(replaced(token_rows(ids, ids, positions), weights=weights))
    assert batch.labels.tolist() == [[6, 7, IGNORE, 9, IGNORE]]
    assert batch.weights is not None
    assert torch.equal(batch.weights, torch.tensor([[2, 0.1, 0, 3, 0]]))
    assert total_weight(batch.labels, batch.weights) == pytest.approx(5.1)


def test_weight_of_zero_ignores_the_label() -> None:
    rows = weigh(random_rows(4, 16, vocab=VOCAB, packed=True))
    assert rows.weights is not None
    masked = token_rows(rows.input_ids, np.where(rows.weights == 0, IGNORE, rows.labels), rows.position_ids)
    assert torch.equal(batch_of(rows).labels, batch_of(masked).labels)


def test_divisor_without_weights_counts_tokens() -> None:
    batch = batch_of(random_rows(1, 16, vocab=VOCAB, packed=False))
    assert not total_weight(batch.labels, batch.weights).is_floating_point()


@pytest.mark.parametrize(("others", "kept"), [(1.0, False), (2.0, True)])
def test_weights_that_are_all_one_are_omitted(model: Anatomy, others: float, kept: bool) -> None:
    rows = random_rows(4, 16, vocab=VOCAB, packed=True)
    weights = np.ones(rows.labels.shape, np.float32)
    weights[-1, -1] = others
    # Untrained tokens have weight 0, regardless of the data.
    weights[rows.labels == IGNORE] = 5
    micro = list(micro_batches(batch_of(replaced(rows, weights=weights)), 2, model, ONE_RANK))
    assert [batch.weights is not None for batch in micro] == [kept, kept]
