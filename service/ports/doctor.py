"""Ports through which the doctor probes the cluster and the storage."""

from collections.abc import Sequence
from typing import Protocol

from service.domain.doctor.measurements import ProbeReply
from train_loop.run_dir import ClusterVisit


class ClusterProbe(Protocol):
    """Requests to the cluster. Every call may raise any error."""

    def greet(self) -> ProbeReply:
        """Return how the dashboard answers."""

    def nodes(self) -> int:
        """Return the number of live nodes."""

    def visit(self, folder: str | None, *, seconds: float) -> ClusterVisit:
        """Return a report of each node, including whether it sees the files in `folder`."""


class StorageProbe(Protocol):
    """Tests of the storage, which leave no files. Every call may raise any error."""

    @property
    def runs(self) -> str:
        """Return the URI of the folder that holds the run directories."""

    def read(self) -> str:
        """List all roots. Return a description of the result."""

    def write(self) -> str:
        """Write, read and list a file. Return a description of the result."""

    def replace(self) -> str:
        """Replace a file while it is read. Return a description of the result."""

    def leave_token(self, folder: str) -> str:
        """Write a random token into a folder. Return the token."""

    def answers(self, folder: str, token: str, nodes: Sequence[str]) -> frozenset[str]:
        """Return the nodes whose answer in the folder has the same token. Wait a few seconds for missing answers."""

    def remove(self, folder: str) -> None:
        """Remove a folder and its contents. Do nothing if it does not exist."""
