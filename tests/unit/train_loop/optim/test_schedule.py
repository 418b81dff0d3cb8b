"""Learning rates of every schedule, checked against their formulas."""

import copy
import math
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import get_scheduler

from tests.support.builders.specs import spec
from train_loop.errors import UserError
from train_loop.optim import Plateau, build_scheduler
from train_loop.spec import SpecError

PEAK, STEPS, WARMUP = 0.5, 100, 10


def rates(steps: int = STEPS, **training: Any) -> list[float]:
    """Return the learning rate of every step and of some steps after the last."""
    end = {"max_steps": None, "num_train_epochs": 1.0}
    job = spec(training={"learning_rate": PEAK, "warmup_steps": WARMUP} | end | training)
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = build_scheduler(optimizer, job.training, steps=steps)
    found = []
    for _ in range(steps + 5):
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


def part(step: int, start: int = WARMUP, end: int = STEPS) -> float:
    """Return the completed fraction of a phase."""
    return (step - start) / (end - start)


def cosine(done: float, low: float = 0.0) -> float:
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))


CASES: list[tuple[dict[str, Any], Any]] = [
    ({"lr_scheduler_type": "linear"}, lambda s: 1 - part(s)),
    ({"lr_scheduler_type": "cosine"}, lambda s: cosine(part(s))),
    ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1.5}}, lambda s: cosine(3 * part(s))),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, lambda s: cosine(part(s), 0.1)),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.1}},
        lambda s: cosine(part(s), 0.2),
    ),
    ({"lr_scheduler_type": "constant_with_warmup"}, lambda s: 1.0),
    ({"lr_scheduler_type": "polynomial"}, lambda s: (1e-7 + (PEAK - 1e-7) * (1 - part(s))) / PEAK),
    (
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 0.05}},
        lambda s: 0.1 + 0.9 * (1 - part(s)) ** 2,
    ),
    ({"lr_scheduler_type": "inverse_sqrt"}, lambda s: math.sqrt(WARMUP / s)),
    (
        {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 40}},
        lambda s: math.sqrt(40 / (s - WARMUP + 40)),
    ),
    ({"lr_scheduler_type": "wsd"}, lambda s: 1.0 if s < 90 else cosine(part(s, 90))),
    (
        {
            "lr_scheduler_type": "wsd",
            "lr_scheduler_kwargs": {"num_decay_steps": 30, "decay_type": "1-sqrt"},
        },
        lambda s: 1.0 if s < 70 else 1 - math.sqrt(part(s, 70)),
    ),
]


@pytest.mark.parametrize(("training", "formula"), CASES, ids=lambda case: str(case) if isinstance(case, dict) else "")
def test_schedule_equals_its_formula_and_stays_at_its_end(training: dict[str, Any], formula: Any) -> None:
    found = rates(**training)
    for step in range(WARMUP):
        assert found[step] == pytest.approx(PEAK * step / WARMUP)
    for step in range(WARMUP, STEPS + 1):
        assert found[step] == pytest.approx(PEAK * formula(step), abs=1e-12), step
    assert set(found[STEPS:]) == {found[STEPS]}


def test_constant_rate_is_constant() -> None:
    assert set(rates(lr_scheduler_type="constant", warmup_steps=0)) == {PEAK}


def test_default_decay_of_wsd_keeps_the_whole_warmup() -> None:
    found = rates(steps=20, lr_scheduler_type="wsd", warmup_steps=19)
    assert found[19] == PEAK
    assert found[20] == 0


def test_run_too_short_for_its_schedule_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"warmup_steps=10 is not less than the 10 steps of the run.*at most 9"):
        rates(steps=10)
    with pytest.raises(UserError, match=r"num_decay_steps=15 are together more.*choose num_decay_steps at most 10"):
        rates(steps=20, lr_scheduler_type="wsd", lr_scheduler_kwargs={"num_decay_steps": 15})


FROM_TRANSFORMERS: list[dict[str, Any]] = [
    {"lr_scheduler_type": "cosine_with_restarts"},
    {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}},
    {"lr_scheduler_type": "cosine_with_restarts", "warmup_steps": 0, "lr_scheduler_kwargs": {"num_cycles": 2}},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
    {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.05}},
    {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2, "num_cycles": 1}},
    {
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.2, "warmup_lr_rate": 0.1},
    },
    {"lr_scheduler_type": "cosine_warmup_with_min_lr", "warmup_steps": 0, "lr_scheduler_kwargs": {"min_lr": 0.05}},
    {"lr_scheduler_type": "linear", "warmup_steps": 0.055},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 30}},
]


@pytest.mark.parametrize("training", FROM_TRANSFORMERS, ids=str)
def test_schedule_equals_that_of_transformers_step_by_step(training: dict[str, Any]) -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    warmup = training.get("warmup_steps", WARMUP)
    # As TrainingArguments, which need accelerate, count it.
    steps = warmup if warmup >= 1 else math.ceil(STEPS * warmup)
    scheduler = get_scheduler(
        training["lr_scheduler_type"],
        optimizer,
        num_warmup_steps=steps,
        num_training_steps=STEPS,
        scheduler_specific_kwargs=training.get("lr_scheduler_kwargs", {}),
    )
    expected = []
    for _ in range(STEPS):
        expected.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    found = rates(**training)
    assert found[:STEPS] == expected
    # Runs by tokens may have more steps than planned.
    assert min(found[STEPS:]) >= 0
    assert len(set(found[STEPS:])) == 1


LOSSES = [3.0, 2.0, 2.0, 1.9999, 1.99, 1.99, 1.99, 1.99, 2.5, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"patience": 1},
        {"patience": 0, "factor": 0.5, "cooldown": 2},
        {"patience": 1, "threshold": 0.5, "threshold_mode": "abs", "min_lr": 0.01},
    ],
    ids=str,
)
def test_plateau_equals_torchs_after_every_evaluation_and_resume(options: dict[str, Any]) -> None:
    training = spec(
        data={"train": {"path": "stdlib://"}, "eval": {"path": "stdlib://"}},
        training={"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": options, "eval_steps": 2}
        | {"learning_rate": PEAK},
    ).training
    theirs = SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    rule = ReduceLROnPlateau(theirs, **options)
    ours = SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = build_scheduler(ours, training, steps=STEPS)
    for number, loss in enumerate(LOSSES):
        assert isinstance(scheduler, Plateau)
        for _ in range(2):
            scheduler.step()
        scheduler.evaluated(loss)
        rule.step(loss)
        assert ours.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == theirs.param_groups[0]["lr"], number
        assert scheduler.last_epoch == 2 * (number + 1)
        # A resumed run has another optimizer, whose rate is that of the start.
        saved = copy.deepcopy(scheduler.state_dict())
        ours = SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
        scheduler = build_scheduler(ours, training, steps=STEPS)
        scheduler.load_state_dict(saved)
    if options:
        assert ours.param_groups[0]["lr"] < PEAK, "expected a reduction"


def test_plateau_without_evaluations_or_with_a_warmup_is_rejected() -> None:
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau"}
    with pytest.raises(
        SpecError, match=r"after evaluations, and there are none; add data.eval and training.eval_steps"
    ):
        spec(training=plateau)
    with pytest.raises(SpecError, match=r"reduce_lr_on_plateau has no warm-up, so warmup_steps=1 has no effect"):
        spec(training=plateau | {"warmup_steps": 1, "eval_steps": 1}, data={"eval": {"path": "stdlib://"}})
    with pytest.raises(SpecError, match="has no option mode; choose from factor, patience, threshold"):
        spec(training=plateau | {"eval_steps": 1, "lr_scheduler_kwargs": {"mode": "max"}})
