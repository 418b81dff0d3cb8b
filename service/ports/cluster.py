"""Port to the cluster that runs the drivers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from service.domain.jobs.observation import SubmissionStatus
from train_loop.plan import Capacity, NodeRoom


@dataclass(frozen=True)
class SubmitRequest:
    """The submission of an attempt to the cluster."""

    submission_id: str
    job_id: str
    name: str
    attempt: int
    run_dir: str
    project: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """A node of the cluster, alive or dead. Times are Unix seconds."""

    id: str
    host: str
    """Hostname, or the address if Ray does not know the hostname."""
    address: str
    alive: bool = True
    is_head: bool = False
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] | None = None
    """Unreserved resources, a few seconds old; None if unknown."""
    started_at: float = 0.0
    ended_at: float | None = None
    message: str | None = None
    """Cause of death, as the cluster reports it."""
    memory: int | None = None
    """Host memory in bytes, within the limit of its container; None if unknown."""
    gpu_memory: tuple[int, ...] | None = None
    """Memory of each GPU in bytes; None if unknown."""
    gpu: str | None = None
    """Name of the GPUs, as CUDA reports it; None if it is unknown or if they differ."""
    object_store: int = 0
    """Bytes of host memory that Ray's objects may take."""


class Cluster(Protocol):
    """The cluster that runs the drivers. Calls raise ClusterError, unless they can return UNKNOWN or None instead."""

    def submit(self, launch: SubmitRequest) -> None:
        """Start a driver. Do nothing if the same driver already exists under this id."""

    def status(self, submission_id: str) -> SubmissionStatus:
        """Return the status of a driver; UNKNOWN if the cluster does not answer."""

    def end_of(self, submission_id: str) -> str | None:
        """Return how a driver ended, as a clause: "it was killed by signal 9 (SIGKILL)"; None if it is unknown."""

    def stop(self, submission_id: str) -> None:
        """Stop a driver now. Do nothing if it does not exist."""

    def capacity(self) -> Capacity | None:
        """Return the resources of all nodes, also of nodes that an autoscaler may add.

        Returns None if the cluster does not answer.
        """

    def rooms(self) -> tuple[NodeRoom, ...]:
        """Return resources and memory of the live nodes; empty if the nodes of a job are unknown."""

    def nodes(self) -> list[Node] | None:
        """Return the nodes, also nodes that died in the last hour; None if the cluster does not answer."""

    def dashboard(self, submission_id: str | None) -> str | None:
        """Return the dashboard URL of a submission, or of the cluster if `submission_id` is None."""
