"""Access of a rank to the run directory in which it saves and from which it resumes."""

from typing import NamedTuple

from train_loop.run_dir import Fence, RunDir
from train_loop.telemetry.event_log import EventLog


class RunAccess(NamedTuple):
    """A run directory as one rank of a worker group accesses it."""

    run_dir: RunDir
    token: Fence
    """Fencing token of the worker group."""
    journal: EventLog
    """The event log of the rank."""
    patience: float
    """Seconds for which a start retries failed storage."""
