"""Fake clusters and storage for tests of the doctor."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.domain.doctor.measurements import ProbeReply, Reachability
from train_loop.run_dir import ClusterVisit, NetworkVisit, NodeReport, PathCheck

VERSIONS = {"trainshed": "0.1.0", "python": "3.11.9", "ray": "2.60.0", "torch": "2.13.0"}
TOKEN = "0123"
GREETING = ProbeReply(Reachability.ANSWERS, "http://ray", "Ray 2.60.0", (-0.5, 0.5))


def a_node(name: str = "n1", **changes: object) -> NodeReport:
    """Return a node without faults."""
    node = NodeReport(
        node=name,
        address="10.0.0.1",
        versions=VERSIONS,
        uid=os.getuid(),
        ahead=(-0.01, 0.01),
        sight=PathCheck(token=TOKEN),
        trouble=None,
    )
    return node.model_copy(update=changes)


def a_visit(
    *nodes: NodeReport,
    cpus: float = 8.0,
    free_cpus: float = 4.0,
    left_out: int = 0,
    failed: dict[str, str] | None = None,
) -> ClusterVisit:
    """Return a report on these nodes, or on one; `failed` lists the pairs whose all-reduce fails."""
    network = NetworkVisit(nodes=len(nodes), failed=failed or {}) if len(nodes) > 1 else None
    return ClusterVisit(
        nodes=list(nodes or (a_node(),)), cpus=cpus, free_cpus=free_cpus, left_out=left_out, network=network
    )


@dataclass
class FakeClusterProbe:
    """A probe that returns its value, raises it, or hangs."""

    reply: ProbeReply = GREETING
    alive: int = 1
    found: ClusterVisit | Exception = field(default_factory=a_visit)
    hangs: bool = False
    visits: int = 0
    folder: str | None = None

    def greet(self) -> ProbeReply:
        """Return the configured reply."""
        return self.reply

    def nodes(self) -> int:
        """Return the number of live nodes."""
        return self.alive

    def visit(self, folder: str | None, *, seconds: float) -> ClusterVisit:
        """Return the configured report."""
        self.visits += 1
        self.folder = folder
        if self.hangs:
            time.sleep(600)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@dataclass
class FakeStorageProbe:
    """Storage whose calls succeed, except that those in `faults` raise and those in `hanging` hang."""

    faults: dict[str, Exception] = field(default_factory=dict)
    hanging: tuple[str, ...] = ()
    removed: list[str] = field(default_factory=list)
    runs: str = "file:///runs"

    def read(self) -> str:
        """List."""
        return self._do("read")

    def write(self) -> str:
        """Write."""
        return self._do("write")

    def replace(self) -> str:
        """Replace."""
        return self._do("replace")

    def leave_token(self, folder: str) -> str:
        """Leave a token."""
        self._do("leave_token")
        return TOKEN

    def answers(self, folder: str, token: str, nodes: Sequence[str]) -> frozenset[str]:
        """Return the answers of all nodes."""
        self._do("answers")
        return frozenset(nodes)

    def remove(self, folder: str) -> None:
        """Record the removed names."""
        self.removed.append(folder)

    def _do(self, call: str) -> str:
        if call in self.hanging:
            time.sleep(600)
        if call in self.faults:
            raise self.faults[call]
        return f"{call} is fine"
