"""The mask of masked language models: its shares, and the numbers on which it depends."""

from typing import Any

import numpy as np
import pytest

from train_loop.data.columns import token_columns
from train_loop.data.dataset import IGNORE, Dataset, Masking, Part, Rows
from train_loop.data.masking import EVALUATION, mask_rows
from train_loop.data.order import Order, StepOrder, mix


def rows_of(samples: list[int], *, length: int = 1000, tokens: int = 1000) -> Rows:
    """Return rows whose token at each place depends on the sample; places beyond `tokens` are padding."""
    ids = np.array([np.random.default_rng(one + 1).integers(0, 300, length) for one in samples], np.int32)
    values = (np.array(samples), np.full(len(samples), tokens), ids, ids.copy(), np.zeros_like(ids))
    return Rows({column.name: value for column, value in zip(token_columns(), values, strict=True)})


def dataset_of(**rule: Any) -> Dataset:
    base = {"seed": 0, "probability": 0.15, "replaced": 0.8, "random": 0.1, "token": 4, "never": (0, 2, 3, 4)}
    masking = Masking(**(base | {"vocabulary": 300} | rule))
    return Dataset(fingerprint="x", parts=(), sequence_length=1000, aligned=True, masking=masking)


def masked(rows: Rows, epochs: Any = 0, **rule: Any) -> Rows:
    found = mask_rows(rows, dataset_of(**rule), epochs)
    assert found is not None
    return found


def test_shares_of_the_mask_are_those_of_the_rule() -> None:
    rows = rows_of([*range(200)], tokens=900)
    found = masked(rows)
    chosen = found.labels != IGNORE
    may_be = (np.arange(1000) < 900) & ~np.isin(rows.input_ids, (0, 2, 3, 4))
    assert not chosen[~may_be].any()
    assert np.array_equal(found.labels[chosen], rows.input_ids[chosen])
    assert np.array_equal(found.input_ids[~chosen], rows.input_ids[~chosen])
    inputs, own = found.input_ids[chosen], rows.input_ids[chosen]
    assert chosen.sum() / may_be.sum() == pytest.approx(0.15, abs=0.004)
    assert (inputs == 4).mean() == pytest.approx(0.8 + 0.1 / 300, abs=0.01)
    assert (inputs == own).mean() == pytest.approx(0.1 + 0.1 / 300, abs=0.01)
    drawn = inputs[(inputs != 4) & (inputs != own)]
    assert drawn.min() <= 3
    assert drawn.max() >= 296
    # Places and samples are independent: each has its share.
    assert chosen.sum(0)[:900].std() == pytest.approx((200 * 0.15 * 0.85) ** 0.5, rel=0.1)
    assert chosen.sum(1).std() == pytest.approx((900 * 0.15 * 0.85) ** 0.5, rel=0.2)


def test_mask_depends_on_seed_sample_epoch_and_place_alone() -> None:
    whole = masked(rows_of([5, 6, 7, 8]), np.array([0, 0, 1, 1]))
    for names in ([8], [7, 5], [6]):
        epochs = np.array([int(one > 6) for one in names])
        part = masked(rows_of(names), epochs)
        for place, one in enumerate(names):
            assert np.array_equal(part.input_ids[place], whole.input_ids[one - 5])
            assert np.array_equal(part.labels[place], whole.labels[one - 5])
    row, chosen = rows_of([5]), whole.labels[0] != IGNORE
    for other in (masked(row, 1), masked(row, EVALUATION), masked(row, seed=1), masked(rows_of([6]), seed=0)):
        both = (other.labels[0] != IGNORE) & chosen
        assert both.mean() == pytest.approx(0.15**2, abs=0.02)


def test_rows_without_a_mask_or_of_other_ranks_stay() -> None:
    rows = rows_of([1])
    plain = Dataset(fingerprint="x", parts=(Part(fingerprint="x", files=(), tokens=0),), sequence_length=1000)
    assert mask_rows(rows, plain, 0) is rows
    assert mask_rows(None, dataset_of(), 0) is None


def test_epoch_of_a_sample_is_that_of_its_source() -> None:
    plain = StepOrder(Order(5, 0, True, "x", 100), 2, 2)
    assert plain.epochs(4).tolist() == [[0, 1], [1, 1]]
    mixture = mix([3, 1], [4, 7])
    order = Order(mixture.epoch, 0, True, "x", 10_000, mixture)
    positions = np.arange(100)
    ids, epochs = order.at(positions), order.epochs(positions)
    for sample in range(11):
        assert epochs[ids == sample].tolist() == [*range(int((ids == sample).sum()))]
