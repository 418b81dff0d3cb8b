"""Optimizers, schedules, clipping and averages of sharded parameters."""

from train_loop.optim.balance import ExpertBalance
from train_loop.optim.build import Place, build_optimizers, clip_gradients, describe_groups, time_optimizers
from train_loop.optim.ema import Ema
from train_loop.optim.plateau import Plateau
from train_loop.optim.schedule import Scheduler, build_scheduler, go_to

__all__ = [
    "Ema",
    "ExpertBalance",
    "Place",
    "Plateau",
    "Scheduler",
    "build_optimizers",
    "build_scheduler",
    "clip_gradients",
    "describe_groups",
    "go_to",
    "time_optimizers",
]
