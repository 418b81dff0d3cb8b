"""`python -m tests.support.faults.replica URL FOLDER OWNER`: one replica of the reconciler, on a cluster made of files.

A submission is a file. A second submission with the same id changes nothing.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.adapters.storage.run_dirs import LocalRunDirs
from service.domain.jobs.decision import Retry
from service.domain.jobs.observation import SubmissionStatus
from service.ports import Node, SubmitRequest
from service.use_cases.jobs.reconcile import Reconciler, ReconcileTimings
from train_loop.plan import Capacity, NodeRoom

LEASE = 1.0
CPUS = 24.0


class FileCluster:
    """Submissions as files in a folder. The test that runs them adds a `.done` file for each finished one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def submit(self, launch: SubmitRequest) -> None:
        """Create the file of a submission, and append the request to the file `requests`."""
        with (self._folder / "requests").open("a") as requests:
            requests.write(f"{launch.submission_id}\n")
        # A link creates the file atomically: this process may be killed at any moment.
        with NamedTemporaryFile("w", dir=self._folder) as file:
            file.write(launch.run_dir)
            file.flush()
            with suppress(FileExistsError):
                os.link(file.name, self._folder / f"{launch.submission_id}.new")

    def status(self, submission_id: str) -> SubmissionStatus:
        """Return the status of a submission by its files."""
        if (self._folder / f"{submission_id}.done").exists():
            return SubmissionStatus.SUCCEEDED
        return (
            SubmissionStatus.RUNNING if (self._folder / f"{submission_id}.new").exists() else SubmissionStatus.MISSING
        )

    def end_of(self, submission_id: str) -> str | None:
        """Return None: it is unknown."""
        return None

    def stop(self, submission_id: str) -> None:
        """Do nothing: there is no driver to stop."""

    def capacity(self) -> Capacity | None:
        """Return the fixed capacity."""
        return Capacity({"CPU": CPUS})

    def rooms(self) -> tuple[NodeRoom, ...]:
        """Return nothing: the nodes are unknown."""
        return ()

    def nodes(self) -> list[Node] | None:
        """Return None: the nodes are unknown."""
        return None

    def dashboard(self, submission_id: str | None) -> str | None:
        """Return None: there is no dashboard."""
        return None


def main() -> None:
    """Reconcile until the process is killed."""
    url, folder, owner = sys.argv[1:]
    store = SqlJobStore(open_database(url))
    pace = ReconcileTimings(lease=LEASE, retry=Retry(base=0.2, cap=1.0))
    reconciler = Reconciler(store, FileCluster(Path(folder)), LocalRunDirs(), time.time, owner, pace)
    reconciler.run(threading.Event(), interval=0.05)


if __name__ == "__main__":
    main()
