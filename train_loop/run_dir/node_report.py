"""The report of a cluster's nodes, which `train_loop.doctor.node_check` writes and the service reads."""

from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from pydantic import BaseModel, ConfigDict

from train_loop.run_dir.files.durable import storage_path
from train_loop.run_dir.remote import is_remote, list_folder

VISIT_MARK = "trainshed-visit "
"""Prefix of the line in a driver's log that holds the report as JSON."""
TOKEN_FILE = "token"
ALL_NODES = "all nodes"
SERVICE_VERSION_VARIABLE = "TRAINSHED_SERVICE_VERSION"
"""Environment variable with the service's version, which the service sets for drivers."""
NODE_NAME_VARIABLE, POD_DIGEST_VARIABLE = "TRAINSHED_NODE_NAME", "TRAINSHED_POD_DIGEST"
"""Environment variables of the chart's Ray pods: name of the Kubernetes node, and digest of the specification."""
_PACKAGES = ("trainshed", "ray", "torch")


class PathCheck(BaseModel):
    """A node's check of the storage."""

    model_config = ConfigDict(frozen=True)

    token: str | None = None
    """The token that the service wrote to the storage; None if the node does not see it."""
    fault: str | None = None
    """Error from reading the storage or writing an answer."""
    unreadable: dict[str, str] = {}
    """Reason why a root cannot be listed, by root."""


class NodeReport(BaseModel):
    """The report of one node: its properties and its check of the storage."""

    model_config = ConfigDict(frozen=True)

    node: str
    address: str
    versions: dict[str, str] | None = None
    """Package versions by name; None if the node did not report them."""
    uid: int | None = None
    """Id of the user that runs its tasks."""
    pod_digest: str | None = None
    """Digest of the pod's specification; None if the chart has not made the pod."""
    ahead: tuple[float, float] | None = None
    """Lower and upper bound in seconds by which the node's clock is ahead of the driver's."""
    sight: PathCheck | None = None
    trouble: str | None = None
    """Reason why another field is None."""


class NetworkVisit(BaseModel):
    """The check of the network between nodes: connections between each pair, then an all-reduce."""

    model_config = ConfigDict(frozen=True)

    nodes: int
    """Number of nodes that took part."""
    failed: dict[str, str] = {}
    """Errors by pair of nodes that cannot communicate, as "ADDRESS and ADDRESS", or by ALL_NODES."""


class ClusterVisit(BaseModel):
    """The report of a cluster's nodes, or of as many as are checked."""

    model_config = ConfigDict(frozen=True)

    nodes: list[NodeReport]
    cpus: float
    free_cpus: float
    network: NetworkVisit | None = None
    """Network check; None if the cluster has only one node, or time ran out."""
    left_out: int = 0
    """Number of nodes beyond the limit, which were not checked."""


def answer_file(node: str) -> str:
    """Return the name of the file that a node writes next to the token."""
    return f"from-{node}"


def versions_here() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in this process, by name."""
    found = {"python": python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def own_version() -> str:
    """Return the version of Trainshed in this process."""
    return version("trainshed")


def why_unreadable(root: str) -> str | None:
    """Return the reason why this process cannot list a folder; None if it can."""
    try:
        place = storage_path(root)
        if is_remote(place):
            # Object storage has no empty folders: a missing folder is treated like an empty one.
            list_folder(place)
        else:
            next(place.iterdir(), None)
    except Exception as error:
        return str(error) or type(error).__name__
    return None
