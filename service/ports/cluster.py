"""Where drivers run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from service.domain.decide import Submission
from train_loop.plan import Capacity


@dataclass(frozen=True)
class Launch:
    """What the cluster is told of an attempt."""

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
    """Its hostname, or its address if Ray does not know the hostname."""
    address: str
    alive: bool = True
    is_head: bool = False
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] | None = None
    """What nothing reserves, a few seconds old; None if unknown."""
    started_at: float = 0.0
    ended_at: float | None = None
    message: str | None = None
    """Why it died, as the cluster reports it."""


class Cluster(Protocol):
    """Where drivers run. Every call may raise ClusterError, except those that have a word for not knowing."""

    def submit(self, launch: Launch) -> None:
        """Start a driver; one that is there already under this id is fine if it is the same."""

    def status(self, submission_id: str) -> Submission:
        """What became of a driver; UNKNOWN when the cluster does not answer."""

    def stop(self, submission_id: str) -> None:
        """End a driver now; one that is gone is fine."""

    def capacity(self) -> Capacity | None:
        """What all nodes have, those an autoscaler may add among them; None when the cluster does not answer."""

    def nodes(self) -> list[Node] | None:
        """Return the nodes, also those that died in the last hour; None if the cluster does not answer."""

    def dashboard(self, submission_id: str | None) -> str | None:
        """The page that shows a submission, or the cluster."""
