"""What a visit to the nodes of a cluster finds: told by `train_loop.doctor`, read by the service."""

from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from pydantic import BaseModel, ConfigDict

from train_loop.run_dir.durable import storage_path
from train_loop.run_dir.remote import is_remote, list_folder

VISIT_MARK = "trainshed-visit "
"""Begins the line of a driver's log that holds the visit as JSON."""
TOKEN_FILE = "token"
ALL_NODES = "all nodes"
SERVICE_VERSION_VARIABLE = "TRAINSHED_SERVICE_VERSION"
"""By which the service tells drivers its own version."""
_PACKAGES = ("trainshed", "ray", "torch")


class Sight(BaseModel):
    """What a node sees of the storage."""

    model_config = ConfigDict(frozen=True)

    token: str | None = None
    """What the service left there; None where the node does not see it."""
    fault: str | None = None
    """What went wrong when the node looked, or wrote an answer."""
    unreadable: dict[str, str] = {}
    """By root: why it cannot be listed."""


class NodeVisit(BaseModel):
    """One node: what it is, and what it sees."""

    model_config = ConfigDict(frozen=True)

    node: str
    address: str
    versions: dict[str, str] | None = None
    """None: it did not say."""
    uid: int | None = None
    """The user that its tasks run as."""
    ahead: tuple[float, float] | None = None
    """Seconds by which its clock is ahead of the driver's: at least, at most."""
    sight: Sight | None = None
    trouble: str | None = None
    """Why something is None."""


class NetworkVisit(BaseModel):
    """Whether ranks on different nodes could train together: connections between each two, then an all-reduce."""

    model_config = ConfigDict(frozen=True)

    nodes: int
    """How many nodes took part."""
    failed: dict[str, str] = {}
    """Pairs that cannot communicate, as "ADDRESS and ADDRESS", with the error; or ALL_NODES."""


class ClusterVisit(BaseModel):
    """All nodes, or as many as are asked."""

    model_config = ConfigDict(frozen=True)

    nodes: list[NodeVisit]
    cpus: float
    free_cpus: float
    network: NetworkVisit | None = None
    """None: there is one node only, or the time was up."""
    left_out: int = 0
    """Nodes that were too many to ask."""


def answer_file(node: str) -> str:
    """The name of what a node writes beside the token."""
    return f"from-{node}"


def versions_here() -> dict[str, str]:
    """What this process runs, by name; what is not installed is left out."""
    found = {"python": python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def own_version() -> str:
    """The version of Trainshed that this process runs."""
    return version("trainshed")


def why_unreadable(root: str) -> str | None:
    """Why this process cannot list a folder; None where it can."""
    try:
        place = storage_path(root)
        if is_remote(place):
            # There are no empty folders there: one in which nothing lies is as good as one that is not there.
            list_folder(place)
        else:
            next(place.iterdir(), None)
    except Exception as error:
        return str(error) or type(error).__name__
    return None
