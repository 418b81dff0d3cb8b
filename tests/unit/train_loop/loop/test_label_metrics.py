"""Metrics of labels are those of scikit-learn, however their counts are cut into micro-batches and ranks."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from train_loop.data.dataset import IGNORE
from train_loop.data.order import PADDING
from train_loop.loop.batch import MicroBatch
from train_loop.loop.objectives.labels import ClassLoss, NumberLoss
from train_loop.model.families.anatomy import Anatomy

LIST = [
    # true, predicted, and accuracy_score and f1_score(average="macro") of scikit-learn
    ([0, 1, 2, 0, 1, 2], [0, 2, 1, 0, 0, 1], 1 / 3, 4 / 15),
    # a class that no row has and the model predicts counts as F1 of 0
    ([0, 0, 1], [0, 2, 1], 2 / 3, (2 / 3 + 1 + 0) / 3),
    # a class that neither has does not count
    ([0, 0], [0, 0], 1.0, 1.0),
]


def anatomy(labels: int) -> Anatomy:
    """Return a model that returns the column of tokens as its scores."""
    family = SimpleNamespace(call=lambda model, columns, arguments: columns["scores"])
    return cast(Anatomy, SimpleNamespace(model=torch.nn.Identity(), family=family, labels=labels))


def batches(columns: dict[str, Tensor], cut: int) -> list[MicroBatch]:
    parts = {name: torch.split(values, cut) for name, values in columns.items()}
    return [
        MicroBatch({name: part[n] for name, part in parts.items()}, {}, last=False)
        for n in range(len(parts["#sample"]))
    ]


def metrics(objective: ClassLoss | NumberLoss, columns: dict[str, Tensor], cut: int) -> dict[str, Any]:
    """Return the metrics from the sums over micro-batches of `cut` rows."""
    rounds = [torch.stack([one.double() for one in objective.evaluate(part)]) for part in batches(columns, cut)]
    return objective.metrics(dict(zip(objective.evaluation_sums, torch.stack(rounds).sum(0), strict=True)))


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize(("true", "found", "accuracy", "f1"), LIST)
@pytest.mark.parametrize("pools", [True, False])
def test_accuracy_and_f1_are_those_of_all_samples(
    true: list[int], found: list[int], accuracy: float, f1: float, cut: int, pools: bool
) -> None:
    scores, count = torch.nn.functional.one_hot(torch.tensor([*found, 0]), 3).float(), len(true) + 1
    columns = {"#sample": torch.tensor([*range(len(true)), PADDING if pools else 9]), "scores": scores}
    if pools:
        columns["targets"] = torch.tensor([*true, 0]).float()
    else:
        columns |= {"labels": torch.tensor([*true, IGNORE])[:, None], "scores": scores[:, None]}
    result = metrics(ClassLoss(anatomy(3), pools=pools), columns, cut)
    assert (result["accuracy"], result["f1"]) == pytest.approx((accuracy, f1))
    loss = torch.nn.functional.cross_entropy(scores[:-1], torch.tensor(true)).item()
    assert (result["loss"], result["labels"]) == pytest.approx((loss, count - 1))


@pytest.mark.parametrize("cut", [1, 3])
def test_squared_error_is_that_of_all_rows(cut: int) -> None:
    columns = {
        "#sample": torch.tensor([0, 1, 2, PADDING]),
        "scores": torch.tensor([[2.5], [0.0], [2.0], [8.0]]),
        "targets": torch.tensor([3.0, -0.5, 2.0, 0.0]),
    }
    assert metrics(NumberLoss(anatomy(1)), columns, cut) == pytest.approx({"loss": 1 / 6, "mse": 1 / 6, "labels": 3})


def test_data_without_any_label_has_no_metrics() -> None:
    columns = {"#sample": torch.arange(2), "labels": torch.full((2, 1), IGNORE), "scores": torch.zeros(2, 1, 3)}
    result = metrics(ClassLoss(anatomy(3), pools=False), columns, 1)
    assert result.pop("labels") == 0
    assert all(value != value for value in result.values()), result  # NaN
