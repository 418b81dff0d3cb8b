"""Ray Train's controller callback: which worker failures count as lost workers."""

import queue
from pathlib import Path

import pytest

from tests.support.builders.specs import spec
from train_loop.errors import CheckpointError, ModelError
from train_loop.faults.failure import report_failure
from train_loop.loop.session import Session
from train_loop.ray_train.callbacks import GroupCallback
from train_loop.run_dir import RunDir, read_lines
from train_loop.telemetry.event_log import EventLog


@pytest.mark.parametrize(
    ("error", "lost"),
    [(ModelError("no such layer"), 0), (CheckpointError("disk full"), 1), (ConnectionError("peer left"), 1)],
)
def test_ranks_that_exit_with_a_user_error_are_not_reported_as_lost(
    tmp_path: Path, error: Exception, lost: int
) -> None:
    run_dir = RunDir(tmp_path)
    with pytest.raises(type(error)), report_failure(Session(0, 1, 0, 1, run_dir, lambda *_: iter(()))):
        raise error
    callback = GroupCallback(run_dir, 1, spec(), autoscaled=False)
    callback._journal = EventLog(run_dir.attempt(1))
    callback._events = queue.SimpleQueue()
    for name in ("workers_lost", "group_started"):
        callback._report(name)
    callback._events.put(None)
    callback._write_events()
    written = [line["event"] for line in read_lines(run_dir.attempt(1).events)]
    assert written.count("workers_lost") == lost
    assert written.count("group_started") == 1
