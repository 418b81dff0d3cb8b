"""Batches of TrainingArguments: of each process, of all processes together, and under older names."""

from typing import Any

import pytest

from tests.unit.train_loop.spec.importers.cases import imported, job, marked, unreported
from train_loop.plan import plan_batch
from train_loop.spec import SpecError

SIZE = "per_device_train_batch_size"


def sequences(raw: dict[str, Any], workers: int) -> int:
    """Return the sequences of a step of an imported file."""
    launcher = {"distributed_type": "MULTI_GPU", "num_processes": workers}
    return plan_batch(job(imported(raw, launcher)).training, dp=workers).global_batch


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    ("given", "of_process", "of_all"),
    [
        ({SIZE: 8}, 8, None),
        ({SIZE: 8, "gradient_accumulation_steps": 4}, 32, None),
        ({"per_gpu_train_batch_size": 4, SIZE: 8}, 4, None),
        ({"per_gpu_train_batch_size": None, SIZE: 8}, 8, None),
        ({SIZE: 8, "accelerator_config": {"split_batches": True}}, None, 8),
        ({SIZE: 8, "accelerator_config": {"split_batches": False, "dispatch_batches": True}}, 8, None),
        ({SIZE: 8, "split_batches": True}, None, 8),
        ({SIZE: 8, "gradient_accumulation_steps": 2, "accelerator_config": {"split_batches": True}}, None, 16),
        ({"do_train": True, "accelerator_config": {"split_batches": True}}, None, 8),
        ({SIZE: 8, "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3}}}, 24, None),
        (
            {SIZE: 8, "accelerator_config": {"split_batches": True, "gradient_accumulation_kwargs": {"num_steps": 3}}},
            None,
            24,
        ),
        ({SIZE: 8, "auto_find_batch_size": True}, 8, None),
    ],
)
def test_step_has_the_sequences_of_trainer(
    given: dict[str, Any], of_process: int | None, of_all: int | None, workers: int
) -> None:
    assert sequences(given, workers) == (of_all if of_process is None else of_process * workers)
    assert unreported(imported(given), given) == set()


def test_batch_that_trainer_may_lower_is_marked() -> None:
    assert "auto_find_batch_size" in marked(imported({SIZE: 8, "auto_find_batch_size": True}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accelerator_config": "config.json"}, "accelerator_config names a file, which may change the batch"),
        (
            {
                "gradient_accumulation_steps": 2,
                "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3}},
            },
            "num_steps=3 and gradient_accumulation_steps=2 both set the accumulation; remove one",
        ),
        (
            {SIZE: "auto", "accelerator_config": {"split_batches": True}},
            "split_batches shares per_device_train_batch_size=auto among all processes; write a number",
        ),
    ],
)
def test_batch_that_is_not_clear_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        imported({"do_train": True} | given)
