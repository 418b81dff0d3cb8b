"""State of a training run, and its random generators."""

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from train_loop.optim import Ema, ExpertBalance, Plateau, Scheduler, at_averages
from train_loop.run_dir import BaseWeights


@dataclass
class LossWindow:
    """Losses of the steps since the last line of logging_steps."""

    total: float = 0.0
    """Sum of the finite losses."""
    steps: int = 0
    """Number of the finite losses."""
    newest: float = math.nan

    def add(self, loss: float) -> None:
        """Add the loss of a step."""
        self.newest = loss
        if math.isfinite(loss):
            self.total += loss
            self.steps += 1

    @property
    def mean(self) -> float:
        """Return the mean of the finite losses; the newest loss if none is finite."""
        return self.total / self.steps if self.steps else self.newest

    def clear(self) -> None:
        """Reset after a metrics line."""
        self.total, self.steps = 0.0, 0


@dataclass
class TrainState:
    """Model, optimizers, schedules, average and counters; the counters are the same on every rank."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Scheduler, ...]
    """One for each optimizer, all at the same step."""
    scaler: GradScaler
    """Scales the loss of fp16 runs; for other dtypes it does nothing."""
    ema: Ema | None = None
    balance: ExpertBalance | None = None
    """Biases of routers that balance experts; None if they stay."""
    base: BaseWeights | None = None
    """The frozen weights below adapters, which checkpoints do not contain; None without adapters."""
    update_scales: Callable[[], None] | None = None
    """Computes the scales of weights that are gathered in float8; None if there are none."""
    step: int = 0
    """Optimizer steps done, skipped ones included."""
    tokens: int = 0
    """Tokens seen, without padding."""
    consumed: int = 0
    """Samples taken from the order."""
    skipped: int = 0
    """Consecutive newest steps that were not finite and changed no weight."""
    losses: LossWindow = field(default_factory=LossWindow)
    unlogged_line: dict[str, Any] = field(default_factory=dict)
    """Metrics line of the newest step, if a stop request has interrupted its evaluation; else empty."""

    @property
    def lr(self) -> float:
        """Return the learning rate of the first parameter group in the next step."""
        return self.group_rates[0]

    @property
    def group_rates(self) -> tuple[float, ...]:
        """Return the learning rate of each parameter group in the next step."""
        return tuple(float(rate) for scheduler in self.schedulers for rate in scheduler.get_last_lr())

    @property
    def rates_differ(self) -> bool:
        """Return whether parameter groups have different learning rates."""
        return len({float(group["initial_lr"]) for one in self.optimizers for group in one.param_groups}) > 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Make the model use its averaged weights within the context, if the run averages some."""
        with at_averages(self.optimizers), self.ema.applied() if self.ema is not None else nullcontext():
            yield

    def apply_gradients(self) -> None:
        """Step optimizers, schedules and EMA. A collective call."""
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        if self.update_scales is not None:
            self.update_scales()
        if self.ema is not None:
            self.ema.update()

    def evaluated(self, loss: float) -> None:
        """Take the loss of an evaluation, which is the same on all ranks; schedules may lower the learning rate."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, Plateau):
                scheduler.evaluated(loss)

    def drop_gradients(self) -> None:
        """Free the gradients of the step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def advance(self, *, tokens: int, samples: int) -> None:
        """Count one step."""
        self.step += 1
        self.tokens += tokens
        self.consumed += samples


def rng_state() -> dict[str, Any]:
    """Return the state of every random generator that a model may use on this rank."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators from `rng_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_generators(seed: int, *, step: int, rank: int) -> None:
    """Seed the generators of a rank without saved state: at the start, or after a change of world size."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "little"))
    torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
