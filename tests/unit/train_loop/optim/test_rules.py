"""Rules of optimizers: equal to their papers' in plain form, and the same bits however a parameter is sharded."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.builders.specs import spec
from train_loop.model.families.causal.build import build_model
from train_loop.model.families.causal.family import CAUSAL
from train_loop.optim import at_averages, build_optimizers, build_scheduler, go_to
from train_loop.optim.host_state import HostState
from train_loop.optim.lion import Lion
from train_loop.optim.schedule_free import ScheduleFreeAdamW

STEPS, WARMUP = 6, 3
RATE, DECAY, EPSILON = 0.01, 0.1, 1e-8
Rule = Callable[[Tensor, Callable[[Tensor], Tensor], tuple[float, float]], Tensor]


def lion(start: Tensor, gradient: Callable[[Tensor], Tensor], betas: tuple[float, float]) -> Tensor:
    """Return the weights of Lion, Algorithm 2 of its paper."""
    weights, momentum = start.clone(), torch.zeros_like(start)
    for step in range(STEPS):
        own, rate = gradient(weights), RATE * min(1, (step + 1) / WARMUP)
        direction = torch.sign(betas[0] * momentum + (1 - betas[0]) * own)
        weights = weights * (1 - rate * DECAY) - rate * direction
        momentum = betas[1] * momentum + (1 - betas[1]) * own
    return weights


def adam(start: Tensor, gradient: Callable[[Tensor], Tensor], betas: tuple[float, float]) -> Tensor:
    """Return the weights of Adam with L2 regularisation."""
    weights, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(STEPS):
        own = gradient(weights) + DECAY * weights
        first = betas[0] * first + (1 - betas[0]) * own
        second = betas[1] * second + (1 - betas[1]) * own.square()
        unbiased = (second / (1 - betas[1] ** (step + 1))).sqrt() + EPSILON
        rate = RATE * min(1, (step + 1) / WARMUP)
        weights = weights - rate * first / (1 - betas[0] ** (step + 1)) / unbiased
    return weights


def schedule_free(start: Tensor, gradient: Callable[[Tensor], Tensor], betas: tuple[float, float]) -> Tensor:
    """Return the averaged weights x of schedule-free AdamW."""
    x, z, second, total = start.clone(), start.clone(), torch.zeros_like(start), 0.0
    for step in range(STEPS):
        y, rate = (1 - betas[0]) * z + betas[0] * x, RATE * min(1, (step + 1) / WARMUP)
        own = gradient(y)
        second = betas[1] * second + (1 - betas[1]) * own.square()
        z = z - rate * (own / ((second / (1 - betas[1] ** (step + 1))).sqrt() + EPSILON) + DECAY * y)
        total += rate**2
        x = x + (rate**2 / total) * (z - x)
    return x


RULES: dict[str, tuple[Rule, float]] = {
    "adam": (adam, 0.95),
    "lion": (lion, 0.99),
    "schedule_free_adamw": (schedule_free, 0.98),
}


def pull(target: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the gradient of a loss that is lowest at a target."""
    return lambda weights: (weights - target) * (1 + target.square())


@pytest.mark.parametrize("name", RULES)
def test_optimizer_equals_its_rule(name: str) -> None:
    rule, beta2 = RULES[name]
    job = spec(
        training={"optimizer": name, "learning_rate": RATE, "weight_decay": DECAY, "adam_beta2": beta2}
        | {"max_steps": 20, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": WARMUP}
    )
    model = build_model(job.model).to_empty(device="cpu")
    draw = torch.Generator().manual_seed(0)
    starts, targets = ([torch.randn(p.shape, generator=draw) for p in model.parameters()] for _ in range(2))
    for parameter, start in zip(model.parameters(), starts, strict=True):
        parameter.data.copy_(start)
    (optimizer,) = build_optimizers(CAUSAL.anatomy(model), job.training)
    scheduler = build_scheduler(optimizer, job.training, steps=20)
    if name != "schedule_free_adamw":
        go_to(scheduler, 1)  # others begin at rate 0
    for _ in range(STEPS):
        for parameter, target in zip(model.parameters(), targets, strict=True):
            parameter.grad = pull(target)(parameter.detach())
        optimizer.step()
        scheduler.step()
    with at_averages([optimizer]):
        for parameter, start, target in zip(model.parameters(), starts, targets, strict=True):
            if parameter.ndim > 1:  # norms do not decay
                expected = rule(start.double(), pull(target.double()), (0.9, beta2))
                torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-6, atol=1e-6)


CLASSES: dict[str, Callable[[Any], Optimizer]] = {
    "lion": lambda parameters: Lion(parameters, 0.1, weight_decay=0.1),
    "schedule_free_adamw": lambda parameters: ScheduleFreeAdamW(parameters, 0.1, weight_decay=0.1),
}


def trained(build: Callable[[Any], Optimizer], starts: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return weights after some steps, and averaged weights."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = build(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    weights = [p.detach().clone() for p in parameters]
    with at_averages([optimizer]):
        averages = [p.detach().clone() for p in parameters]
    assert all(map(torch.equal, weights, parameters))
    return [torch.cat([*weights]), torch.cat([*averages])]


@pytest.mark.parametrize("name", CLASSES)
def test_bits_do_not_depend_on_shards(name: str) -> None:
    draw = torch.Generator().manual_seed(1)
    whole, steps = torch.randn(1009, generator=draw), [torch.randn(1009, generator=draw) for _ in range(4)]
    expected = trained(CLASSES[name], [whole], [[one] for one in steps])
    for sizes in ([1, 1008], [500, 509], [13] * 77 + [8]):
        parts = [[*torch.split(one, sizes)] for one in (whole, *steps)]
        found = trained(CLASSES[name], parts[0], parts[1:])
        assert all(map(torch.equal, found, expected)), sizes


class HostScheduleFree(HostState, ScheduleFreeAdamW):
    """Schedule-free AdamW, with its state on the host."""


def steps_of(optimizer: Optimizer, gradients: Iterator[Tensor], count: int) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    for _ in range(count):
        parameter.grad = next(gradients).clone()
        optimizer.step()


@pytest.mark.parametrize("kind", [ScheduleFreeAdamW, HostScheduleFree])
def test_loaded_state_of_averages_goes_on_with_the_same_bits(kind: Any) -> None:
    draw = torch.Generator().manual_seed(2)
    start, gradients = torch.randn(40, generator=draw), [torch.randn(40, generator=draw) for _ in range(9)]
    alone = nn.Parameter(start.clone())
    steps_of(ScheduleFreeAdamW([alone], 1e-3), iter(gradients), 9)
    first = nn.Parameter(start.clone())
    before, rest = kind([first], 1e-3), iter(gradients)
    steps_of(before, rest, 5)
    second = nn.Parameter(first.detach().clone())
    after = kind([second], 1e-3)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    steps_of(after, rest, 4)
    assert torch.equal(alone, second)
    assert after.state[second]["weight_sum"].dtype is torch.float64


def test_state_of_zeros_begins_at_the_weights() -> None:
    start, gradient = torch.ones(3), torch.tensor([1.0, -2.0, 0.0])
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]
    fresh, zeroed = (ScheduleFreeAdamW([one], 0.1) for one in parameters)
    # As a checkpoint is read: a step without rate creates states, which are then zero.
    parameters[1].grad, zeroed.param_groups[0]["lr"] = torch.zeros(3), 0.0
    zeroed.step()
    for value in zeroed.state[parameters[1]].values():
        value.zero_()
    zeroed.param_groups[0]["lr"] = 0.1
    with at_averages([zeroed]):
        assert torch.equal(parameters[1], start)
    for parameter, optimizer in zip(parameters, (fresh, zeroed), strict=True):
        parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(*parameters)
