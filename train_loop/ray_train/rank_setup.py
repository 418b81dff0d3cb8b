"""Start of a rank in its worker process.

The controller imports this module. It must not import modules that only ranks need: they take seconds.
"""

import os
import pkgutil
from typing import Any, NamedTuple

import ray

from train_loop.liveness import heartbeat
from train_loop.liveness.fencing import EPOCH_VARIABLE
from train_loop.liveness.heartbeat import Target
from train_loop.ray_train.warm_up import wait_until_ready
from train_loop.system.gc import no_automatic_collection
from train_loop.system.network import socket_settings


class RankSettings(NamedTuple):
    """Settings that a worker group's ranks receive before they start."""

    epoch: int
    heartbeats: Target


def set_up_rank(settings: RankSettings, rank: int, address: str) -> Any:
    """Set a rank's epoch and network interface and start its heartbeats, before it joins the process group.

    Runs in the rank's process. Returns the placement group of the worker group.
    """
    wait_until_ready()
    os.environ[EPOCH_VARIABLE] = str(settings.epoch)
    os.environ.update(socket_settings(address, os.environ))
    heartbeat.start(settings.heartbeats, rank=rank, epoch=settings.epoch)
    return ray.util.get_current_placement_group()


def work(config: dict[str, Any]) -> None:
    """Run one rank in its worker process."""
    with no_automatic_collection():
        train = pkgutil.resolve_name("train_loop.ray_train.worker:work")
    train(config)
