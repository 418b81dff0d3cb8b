"""Learning rates of every schedule, checked against their formulas."""

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD

from tests.support.builders.specs import spec
from train_loop.errors import UserError
from train_loop.optim import build_scheduler

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
