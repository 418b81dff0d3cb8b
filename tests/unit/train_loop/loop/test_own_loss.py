"""The loss of own code: its random numbers in evaluations, and errors of the operating system."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from train_loop.code.load import OwnCode
from train_loop.errors import ModelError
from train_loop.loop.objectives.own_loss import call_batch, call_loss, random_numbers_of
from train_loop.spec import CodeSpec

FUNCTIONS = {"package": "/x", "model": "mymodel:build", "loss": "mymodel:loss", "batch": "mymodel:batch"}


def code(function: Any) -> OwnCode:
    return OwnCode(CodeSpec.model_validate(FUNCTIONS), Path(__file__).parent, function, function, function)


def draw() -> list[float]:
    return [torch.rand(()).item(), float(np.random.random()), random.random()]


def test_evaluations_draw_the_same_numbers_and_leave_the_generators_unchanged() -> None:
    def evaluate(sample: int) -> list[float]:
        with random_numbers_of(sample):
            return draw()

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first, other = evaluate(3), evaluate(4)
    assert torch.equal(torch.rand(1), expected)
    assert evaluate(3) == first
    assert all(one != another for one, another in zip(first, other, strict=True))


def test_missing_file_is_an_error_of_the_code_and_unavailable_storage_is_not(tmp_path: Path) -> None:
    def absent(*arguments: Any) -> None:
        (tmp_path / "absent").read_text()

    def away(*arguments: Any) -> None:
        raise TimeoutError("storage")

    with pytest.raises(
        ModelError, match=r"mymodel:loss failed: FileNotFoundError: .*absent.* \(test_own_loss.py, line"
    ):
        call_loss(code(absent), nn.Linear(1, 1), {})
    with pytest.raises(TimeoutError):
        call_loss(code(away), nn.Linear(1, 1), {})


def test_tensors_of_a_batch_in_lists_and_tuples_are_on_the_device() -> None:
    batch = call_batch(
        code(lambda columns: {"x": [torch.ones(1)], "y": ({"z": torch.ones(1)}, "a")}), {}, torch.device("meta")
    )
    assert (batch["x"][0].is_meta, batch["y"][0]["z"].is_meta, batch["y"][1]) == (True, True, "a")
