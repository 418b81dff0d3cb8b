"""Rows are held against the model before they reach it."""

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.support.gradients import random_rows
from tests.support.specs import TINY, spec
from train_loop.batch import check_vocabulary
from train_loop.errors import DataError
from train_loop.model.build import build_model

VOCAB = int(TINY["vocab_size"])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_model(spec().model)


def test_rows_of_the_vocabulary_and_labels_that_do_not_count_pass(model: PreTrainedModel) -> None:
    rows = random_rows(3, 8, vocab=VOCAB, packed=False)
    rows.input_ids[0, 0], rows.labels[2, 7] = VOCAB - 1, -100
    check_vocabulary(rows, model)
    check_vocabulary(None, model)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("input_ids", VOCAB, "token 384"), ("input_ids", -100, "token -100"), ("labels", -1, "label -1")],
)
def test_a_token_outside_the_vocabulary_is_named(model: PreTrainedModel, field: str, value: int, said: str) -> None:
    rows = random_rows(3, 8, vocab=VOCAB, packed=False)
    values: np.ndarray[tuple[int, int], np.dtype[np.int32]] = getattr(rows, field)
    values[1, 5] = value
    with pytest.raises(DataError, match=f"sample 1 has {said} at position 5, outside the model's vocabulary of 384"):
        check_vocabulary(rows, model)
