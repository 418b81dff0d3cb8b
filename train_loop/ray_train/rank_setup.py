"""Start of a rank in its worker process.

The controller imports this module. It must not import modules that only ranks need: they take seconds.
"""

import os
import pkgutil
from datetime import timedelta
from typing import Any, NamedTuple

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend

from train_loop.liveness import heartbeat
from train_loop.liveness.fencing import EPOCH_VARIABLE
from train_loop.liveness.heartbeat import Target
from train_loop.parallel.process_group import Group, Meeting, meet_at, meet_in_file, new_secret
from train_loop.ray_train.raylet import session_folder
from train_loop.system.deterministic import deterministic_settings
from train_loop.system.gc import no_automatic_collection
from train_loop.system.network import socket_settings


class RankSettings(NamedTuple):
    """Settings that a worker group's ranks receive before they start."""

    epoch: int
    heartbeats: Target
    deterministic: bool = False
    """Whether libraries must compute the same bits each time."""


def set_up_rank(settings: RankSettings, rank: int, address: str) -> Any:
    """Set a rank's environment and start its heartbeats, before it joins the process group.

    Runs in the rank's process. Returns the placement group of the worker group.
    """
    os.environ[EPOCH_VARIABLE] = str(settings.epoch)
    os.environ.update(socket_settings(address, os.environ))
    if settings.deterministic:
        os.environ.update(deterministic_settings(os.environ))
    heartbeat.start(settings.heartbeats, rank=rank, epoch=settings.epoch)
    return ray.util.get_current_placement_group()


def work(config: dict[str, Any]) -> None:
    """Run one rank in its worker process."""
    with no_automatic_collection():
        train = pkgutil.resolve_name("train_loop.ray_train.worker:work")
    train(config)


class GroupConfig(TorchConfig):  # type: ignore[misc]
    """Ray Train's settings of torch, with a process group that only the job's ranks can join.

    Ray Train's own store listens on all addresses of rank 0's host.
    """

    @property
    def backend_cls(self) -> type:
        """Return the class that Ray Train's controller calls to set up the ranks."""
        return _GroupBackend


class _GroupBackend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: GroupConfig) -> None:
        hosts = [worker.metadata for worker in worker_group.get_workers()]
        address = None if len({host.node_id for host in hosts}) == 1 else hosts[0].node_ip
        group = Group(
            meeting=worker_group.execute_single(0, open_meeting, address),
            secret=new_secret(),
            backend=backend_config.backend,
            world=len(hosts),
            timeout=timedelta(seconds=backend_config.timeout_s),
        )
        worker_group.execute(_set_torch_distributed_env_vars)
        ray.get([worker_group.execute_single_async(rank, group.join, rank) for rank in range(len(hosts))])


def open_meeting(address: str | None) -> Meeting:
    """Open the store of a worker group; runs on rank 0. `address` is None if all ranks are on its host."""
    return meet_in_file(session_folder()) if address is None else meet_at(address)
