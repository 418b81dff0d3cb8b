"""Measurements of the cluster and the storage, which the doctor's checks judge."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from service.domain.jobs.head_node import HeadNode
from train_loop.run_dir import ClusterVisit


class Reachability(StrEnum):
    """The result of a request to the cluster's dashboard."""

    ANSWERS = "answers"
    NOBODY = "nobody"
    REFUSED = "refused"
    STRANGE = "strange"
    """Something answers, but not like Ray."""
    STARTING = "starting"


@dataclass(frozen=True)
class ProbeReply:
    """The answer of the cluster's dashboard: result, URL and message."""

    reach: Reachability
    url: str
    message: str
    ahead: tuple[float, float] | None = None
    """Minimum and maximum seconds by which the head's clock is ahead of the service's."""


@dataclass(frozen=True)
class ProbeFailure:
    """The reason why a measurement failed, in place of its value."""

    what: str


@dataclass(frozen=True)
class RayPods:
    """The Ray pods of the chart, as it has rendered them."""

    cluster: str | None = None
    """Name of KubeRay's RayCluster."""
    digests: frozenset[str] = frozenset()
    """Digests of the pods' specifications; empty without the chart."""
    lost_node: Callable[[], HeadNode | None] = lambda: None
    """Return the Kubernetes node of a head that has been silent for minutes."""


@dataclass(frozen=True)
class Measured:
    """All measurements. A string describes the observation of a passed check."""

    reply: ProbeReply | ProbeFailure
    nodes: int | ProbeFailure
    visit: ClusterVisit | ProbeFailure
    token: str | ProbeFailure
    """Token that the service wrote to the storage for the nodes to read."""
    arrived: frozenset[str] | ProbeFailure
    """Nodes whose answers on the storage the service has read."""
    read: str | ProbeFailure
    write: str | ProbeFailure
    replace: str | ProbeFailure
    runs: str = ""
    """URI of the folder that holds the run directories."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package versions of the service."""
    pods: RayPods = RayPods()
    uid: int | None = None
    """User id that the service runs as."""
    connections: tuple[int, int] = (0, 0)
    """Number of connections that the open-file limit allows, and the limit in the settings."""
