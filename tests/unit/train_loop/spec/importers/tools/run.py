"""A run as a tool plans it: its steps, batches, rates and trained parameters."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from tests.support.builders.specs import TINY
from tests.unit.train_loop.spec.importers.cases import imported
from train_loop.model.families.choose import family_of
from train_loop.model.lora.saved import choose
from train_loop.model.lora.targets import find_targets
from train_loop.optim.schedule import build_scheduler
from train_loop.plan import plan_batch
from train_loop.plan.batch import plan_steps
from train_loop.spec import parse

ROWS = 10_240
"""Rows of a run: a multiple of all batches that are drawn, so that no tool has a shorter one."""
Draws = random.Random


@dataclass(frozen=True)
class Run:
    """A run of a model with the names of TINY."""

    steps: int
    batch: int
    """Sequences of all processes in a step."""
    rates: tuple[float, ...]
    """The learning rate of some steps."""
    adapted: frozenset[str] | None
    """Full names of the modules with adapters; None if all weights are trained."""
    whole: frozenset[str] = frozenset()
    """Full names of the modules that are trained whole, besides adapters."""
    scale: float | None = None
    """Factor of the adapters."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Other values, by their path in a spec."""


def places(steps: int) -> list[int]:
    """Return the steps whose rates are compared."""
    return sorted({0, 1, 2, steps // 20, steps // 10, steps // 4, steps // 2, steps - 2, steps - 1} & set(range(steps)))


def rates_of(rule: Callable[[int], float], rate: float, steps: int) -> tuple[float, ...]:
    """Return the rates of a rule, which maps steps to factors."""
    return tuple(rate * rule(step) for step in places(steps))


def rates_of_trainer(
    name: str, rate: float, *, steps: int, warmup: int, options: dict[str, Any] | None = None
) -> tuple[float, ...]:
    """Return the rates of transformers' Trainer."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps,
                              scheduler_specific_kwargs=options)  # fmt: skip
    return rates_of(scheduler.lr_lambdas[0], rate, steps)


def as_imported(file: dict[str, Any] | str, paths: Sequence[str], *, processes: int) -> Run:
    """Return the run of the spec that a file becomes, on a number of processes; `paths` are the settings to compare."""
    raw: Any = imported(file).spec
    raw["model"] = {key: one for key, one in raw["model"].items() if key not in ("path", "attn_implementation")}
    raw["model"] |= {"config": TINY}
    raw["data"] |= {"train": {"path": "stdlib://*.py"}, "columns": {"text": "text"}}
    raw["scaling"] = {"num_workers": processes}
    job = parse(raw)
    training = job.training
    batch = plan_batch(training, dp=processes // job.strategy.peers).global_batch
    steps = plan_steps(training, samples=ROWS, tokens=1, global_batch=batch)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    scheduler: Any = build_scheduler(optimizer, training, steps=steps)
    adapted, whole = None, frozenset[str]()
    if job.model.lora is not None:
        targets = find_targets(choose(family_of(job).build(job.model), job.model))
        adapted, whole = frozenset(targets.modules), frozenset(targets.saved)
    return Run(
        steps,
        batch,
        rates_of(scheduler.lr_lambdas[0], training.learning_rate, steps),
        adapted,
        whole,
        None if job.model.lora is None else job.model.lora.scale,
        {path: value_at(job, path) for path in paths},
    )


def value_at(job: Any, path: str) -> Any:
    """Return the value at a dotted path of a spec."""
    for name in path.split("."):
        job = getattr(job, name)
    return job


def sometimes(draws: Draws, file: dict[str, Any], name: str, values: Sequence[Any], share: float = 0.5) -> Any:
    """Write one of the values into a file in some of the cases; return it, or None."""
    if draws.random() >= share:
        return None
    file[name] = draws.choice(values)
    return file[name]


def differences(found: Run, expected: Run) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two runs, by name; rates are rounded."""
    pairs = [(_values(found), _values(expected))]
    return {name: (one[name], other[name]) for one, other in pairs for name in other if one[name] != other[name]}


def _values(run: Run) -> dict[str, Any]:
    rates = [float(f"{rate:.9g}") for rate in run.rates]
    own = {name: getattr(run, name) for name in ("steps", "batch", "adapted", "whole", "scale")}
    return own | {"rates": rates} | run.settings
