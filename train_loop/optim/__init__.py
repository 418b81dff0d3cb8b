"""Optimizers, schedules, clipping and averages of sharded parameters."""

from train_loop.optim.balance import ExpertBalance
from train_loop.optim.build import (
    Place,
    build_optimizers,
    clip_gradients,
    describe_groups,
    plan_groups,
    time_optimizers,
)
from train_loop.optim.ema import Ema
from train_loop.optim.plateau import Plateau
from train_loop.optim.schedule import Scheduler, build_scheduler, go_to
from train_loop.optim.schedule_free import at_averages, averaged

__all__ = [
    "Ema",
    "ExpertBalance",
    "Place",
    "Plateau",
    "Scheduler",
    "at_averages",
    "averaged",
    "build_optimizers",
    "build_scheduler",
    "clip_gradients",
    "describe_groups",
    "go_to",
    "plan_groups",
    "time_optimizers",
]
