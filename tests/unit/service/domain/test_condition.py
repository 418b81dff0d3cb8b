"""Conditions: reasons for missing progress, read from the events of an attempt."""

from typing import Any

import pytest

from service.domain.jobs.condition import Conditions
from service.domain.jobs.reason import Code

STARTED = {"event": "group_started", "epoch": 1, "hosts": {"0": "node2", "1": "node3"}}
SILENT = {"event": "host_silent", "host": "node3", "seconds": 8.0}
WAITING = {"event": "waiting_for_capacity", "missing": "4 CPU", "left": ["node3"], "since": 3723.0}
STALLED = {"event": "stalled", "waiting": [0, 1, 3], "for": [2], "hosts": ["node3"], "step": 7, "seconds": 12.0}
MOVING = {"event": "moving", "ranks": [1], "hosts": ["node3"]}
STORAGE = {"event": "storage_unavailable", "root": "file:///shared", "since": 3723.0, "error": "no marker file"}


def read(*events: dict[str, Any]) -> Conditions:
    conditions = Conditions()
    for event in events:
        conditions.read(event)
    return conditions


@pytest.mark.parametrize(
    ("event", "code", "message"),
    [
        (SILENT, Code.HOST_LOST, "host node3 has not answered for 8 s; it is declared lost if it stays silent"),
        (WAITING, Code.CAPACITY, "waits since 01:02:03 UTC for 4 CPU; node3 left the cluster"),
        (WAITING | {"left": []}, Code.CAPACITY, "waits since 01:02:03 UTC for 4 CPU"),
        (STALLED, Code.STALLED, "step 7 has made no progress for 12 s: ranks 0, 1 and 3 wait for rank 2 on node3"),
        (
            STALLED | {"waiting": [0]},
            Code.STALLED,
            "step 7 has made no progress for 12 s: rank 0 waits for rank 2 on node3",
        ),
        (
            STALLED | {"waiting": [], "reason": "rank 2 on node3 is stopped (SIGSTOP)"},
            Code.STALLED,
            "step 7 has made no progress for 12 s: rank 2 on node3 is stopped (SIGSTOP)",
        ),
        (MOVING, Code.MOVING, "moving rank 1 away from node3, which will be removed"),
        (
            STORAGE,
            Code.STORAGE_UNAVAILABLE,
            "storage file:///shared is unavailable since 01:02:03 UTC (no marker file)",
        ),
        (
            STORAGE | {"error": None, "hosts": ["node3"]},
            Code.STORAGE_UNAVAILABLE,
            "storage file:///shared is unavailable on node3 since 01:02:03 UTC",
        ),
    ],
)
def test_condition_names_its_cause(event: dict[str, Any], code: Code, message: str) -> None:
    newest = read(STARTED, event).newest
    assert newest is not None
    assert (newest.code, newest.message) == (code, message)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("No space left on device", "free space there, or delete files if it has no inodes left (df -i)"),
        ("Disk quota exceeded", "free space there, or raise the quota"),
        ("[Errno 13] Permission denied", "let the users of service and workers read and write there"),
        ("[Errno 30] Read-only file system", "make it writable again"),
        ("file:///in/eval.jsonl matches no file; check the path", "restore it, or mount its storage on all hosts"),
        ("no marker file", "check that it is mounted and reachable on all hosts"),
        (None, "check that it is mounted and reachable on all hosts"),
    ],
)
def test_remedy_of_unavailable_storage_fits_its_error(error: str | None, remedy: str) -> None:
    newest = read(STARTED, STORAGE | {"error": error}).newest
    assert newest is not None
    assert newest.remedy == remedy


@pytest.mark.parametrize(
    ("event", "end"),
    [
        (SILENT, {"event": "progressing", "host": SILENT["host"]}),
        (STALLED, {"event": "progressing"}),
        (WAITING, STARTED),
        (MOVING, {"event": "training_started"}),
    ],
)
def test_each_condition_ends_with_its_own_event(event: dict[str, Any], end: dict[str, Any]) -> None:
    assert read(STARTED, event, end).newest is None


def test_host_silent_condition_ends_only_with_progress_of_that_host() -> None:
    other = SILENT | {"host": "node9"}
    newest = read(STARTED, other, SILENT, {"event": "progressing", "host": SILENT["host"]}).newest
    assert newest is not None
    assert "node9" in newest.message
    assert read(STARTED, SILENT, {"event": "progressing"}).newest is not None


def test_storage_unavailable_condition_outlasts_progress() -> None:
    found = read(STARTED, STORAGE, STALLED, {"event": "progressing"}).newest
    assert found is not None
    assert found.code is Code.STORAGE_UNAVAILABLE
    assert read(STORAGE, {"event": "storage_available"}).newest is None


def test_newest_of_several_conditions_wins() -> None:
    newest = read(SILENT, STALLED).newest
    assert newest is not None
    assert newest.code is Code.STALLED
    again = read(SILENT, STALLED, SILENT).newest
    assert again is not None
    assert again.code is Code.HOST_LOST


def test_group_started_ends_capacity_condition() -> None:
    assert read(STARTED, WAITING, STARTED).newest is None


def test_workers_lost_message_names_host_and_survivor_reports() -> None:
    survivors = "rank 0 reported: connection closed by peer."
    event = {"event": "workers_lost", "hosts": ["node3"], "cause": "host_lost", "error": "host node3 was lost"}
    found = read(STARTED, SILENT, event | {"survivors": survivors})
    assert (found.newest, found.left) == (None, ("node3",))
    assert found.lost is not None
    assert found.lost.code is Code.HOST_LOST
    assert found.lost.message == (
        "host node3 was lost (rank 0 reported: connection closed by peer); the run resumes from its newest checkpoint"
    )


@pytest.mark.parametrize("cause", ["killed", "hung", "disconnected", "out_of_memory", "error", None])
def test_hosts_whose_ranks_failed_have_not_left_the_cluster(cause: str | None) -> None:
    lost = {"event": "workers_lost", "hosts": ["node3"], "cause": "host_lost", "error": "host node3 was lost"}
    assert read(STARTED, lost, {"event": "group_started"}, lost | {"cause": cause}).left == ()


def test_workers_lost_to_the_oom_killer_is_out_of_memory() -> None:
    found = read({"event": "workers_lost", "hosts": ["node3"], "cause": "out_of_memory", "error": "rank 2 was killed"})
    assert found.lost is not None
    assert found.lost.code is Code.OUT_OF_MEMORY


def test_killed_rank_is_reported_as_workers_lost() -> None:
    error = "rank 2 on node3 was killed by signal 9"
    found = read({"event": "workers_lost", "hosts": ["node3"], "cause": "killed", "error": error})
    assert found.lost is not None
    assert (found.lost.code, found.lost.message) == (
        Code.WORKERS_LOST,
        f"{error}; the run resumes from its newest checkpoint",
    )


def test_preemption_notice_names_draining_hosts() -> None:
    notice = {"event": "preemption_notice", "ranks": [1, 9], "time": 50.0}
    assert read(STARTED, notice).draining == {"node3": 50.0}


@pytest.mark.parametrize("event", [STARTED, SILENT, WAITING, STALLED, MOVING, STORAGE])
def test_events_with_unexpected_field_values_are_read(event: dict[str, Any]) -> None:
    values: list[Any] = [None, "x", 3, [], {}, [{}], {"CPU": "x"}]
    for name in event.keys() - {"event"}:
        for value in values:
            read(event | {name: value})
    read({"event": event["event"]})
