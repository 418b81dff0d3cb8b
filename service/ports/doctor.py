"""What an examination asks of the cluster and of the storage."""

from collections.abc import Sequence
from typing import Protocol

from service.domain.checkup import Greeting
from train_loop.run_dir import ClusterVisit


class ClusterProbe(Protocol):
    """Questions to the cluster. Every call may raise what went wrong."""

    def greet(self) -> Greeting:
        """How it answers."""

    def nodes(self) -> int:
        """How many are alive."""

    def visit(self, folder: str | None, *, seconds: float) -> ClusterVisit:
        """What each node is, and whether it sees what lies in a folder."""


class StorageProbe(Protocol):
    """Trials of the storage, after which nothing is left. Every call may raise what went wrong."""

    @property
    def runs(self) -> str:
        """URI below which run directories go."""

    def read(self) -> str:
        """List all roots; what was seen."""

    def write(self) -> str:
        """Write, read back and list; what was seen."""

    def replace(self) -> str:
        """Replace a file that is being read; what was seen."""

    def leave_token(self, folder: str) -> str:
        """Write something that nobody can guess into a folder; what it is."""

    def answers(self, folder: str, token: str, nodes: Sequence[str]) -> frozenset[str]:
        """Of which nodes there is an answer in the folder with the same token, after a while."""

    def remove(self, folder: str) -> None:
        """Remove a folder and all in it; none is fine."""
