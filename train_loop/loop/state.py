"""What a run has reached, and the generators it draws from."""

import hashlib
import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from train_loop.optim import Ema


@dataclass
class LossWindow:
    """Losses of the steps since the last line that logging_steps asks for."""

    total: float = 0.0
    """Sum of those that are finite."""
    steps: int = 0
    """Number of those."""
    newest: float = math.nan

    def add(self, loss: float) -> None:
        """Take in the loss of a step."""
        self.newest = loss
        if math.isfinite(loss):
            self.total += loss
            self.steps += 1

    @property
    def mean(self) -> float:
        """Mean of the finite losses; if there is none, the newest."""
        return self.total / self.steps if self.steps else self.newest

    def clear(self) -> None:
        """Begin anew, behind a line."""
        self.total, self.steps = 0.0, 0


@dataclass
class TrainState:
    """Model, optimizers, schedules, average and counters; the counters are the same on every rank."""

    model: PreTrainedModel
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[LambdaLR, ...]
    """One for each optimizer, all at the same step and learning rate."""
    scaler: GradScaler
    """Scales the loss of fp16 runs; for other dtypes it does nothing."""
    ema: Ema | None = None
    step: int = 0
    """Optimizer steps done, skipped ones included."""
    tokens: int = 0
    """Tokens seen, padding not counted."""
    consumed: int = 0
    """Samples taken from the order."""
    skipped: int = 0
    """Steps in a row, up to here, that were not finite and changed no weight."""
    losses: LossWindow = field(default_factory=LossWindow)

    @property
    def lr(self) -> float:
        """The learning rate of the step to come."""
        return float(self.schedulers[0].get_last_lr()[0])

    def apply_gradients(self) -> None:
        """Step optimizers, schedules and average; a collective call."""
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        if self.ema is not None:
            self.ema.update()

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
    """The state of every generator that a model may draw from on this rank."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """The inverse of `rng_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_generators(seed: int, *, step: int, rank: int) -> None:
    """Generators for a rank whose state was never saved: at the start, or when the world has another size."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "little"))
    torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
