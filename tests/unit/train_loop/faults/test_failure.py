"""Failure reports of a run: whether a retry can help, and the message."""

from pathlib import Path

import pytest
from ray.exceptions import RaySystemError, RayTaskError

from train_loop.errors import CheckpointError, DataError, FencedError
from train_loop.faults.failure import failed, reason, report_failure
from train_loop.loop.session import Session
from train_loop.run_dir import Outcome, RunDir, read_lines
from train_loop.spec import Problem, SpecError

SPEC_ERROR = SpecError([Problem("/strategy/ulysses_size", "ulysses_size=3 does not divide")])


def a_session(run_dir: Path) -> Session:
    return Session(0, 1, 0, 1, RunDir(run_dir), lambda *_: iter(()))


class WorkersFailed(Exception):
    """A worker group error as Ray Train raises it."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        self.worker_failures = failures


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DataError("no rows"), Outcome(result="failed", code="data_error", reason="no rows")),
        (
            SPEC_ERROR,
            Outcome(
                result="failed",
                code="invalid_spec",
                reason="/strategy/ulysses_size: ulysses_size=3 does not divide",
            ),
        ),
        (
            OSError("disk full"),
            Outcome(result="failed", code="worker_failure", reason="OSError: disk full", retryable=True),
        ),
        (
            WorkersFailed({0: ConnectionError("connection lost"), 1: DataError("no rows")}),
            Outcome(result="failed", code="data_error", reason="no rows"),
        ),
    ],
    ids=["a mistake in the data", "a mistake in the spec", "a fault", "a mistake that made others lose their peer"],
)
def test_only_user_errors_are_not_retried(error: Exception, outcome: Outcome) -> None:
    assert failed(error) == outcome


def test_user_error_in_a_task_is_unwrapped_from_the_error_of_ray() -> None:
    wrapped = RayTaskError("encode", "a traceback", DataError("no rows")).as_instanceof_cause()
    assert isinstance(wrapped, DataError)
    assert failed(wrapped) == Outcome(result="failed", code="data_error", reason="no rows")


TRACEBACK = '  File "a.py", line 1, in f\n    g()\nValueError: boom'


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RayTaskError("f", f"\x1b[36mray::f()\x1b[39m (pid=1)\n{TRACEBACK}", "not an error"), "ValueError: boom"),
        (
            RaySystemError("not readable", f"Traceback (most recent call last):\n{TRACEBACK}"),
            "ray.exceptions.RaySystemError: System error: not readable\nValueError: boom",
        ),
    ],
)
def test_reason_contains_no_traceback_of_ray(error: Exception, reason: str) -> None:
    assert failed(error).reason == reason


def test_user_error_is_the_cause_regardless_of_earlier_errors() -> None:
    mistake = DataError("no rows")
    mistake.__cause__ = OSError("no such file")
    assert failed(mistake) == Outcome(result="failed", code="data_error", reason="no rows")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("no rows\nat all"), [("data_error", "no rows")]),
        (SPEC_ERROR, [("invalid_spec", str(SPEC_ERROR))]),
        # The successor may share the event log: its training has not finished.
        (FencedError("group 2 took over"), []),
        (OSError("disk full"), []),
    ],
)
def test_events_report_the_final_failure(tmp_path: Path, error: Exception, expected: list[tuple[str, str]]) -> None:
    with pytest.raises(type(error)), report_failure(a_session(tmp_path)):
        raise error
    ends = [line for line in read_lines(RunDir(tmp_path).attempt(1).events) if line["event"] == "training_ended"]
    assert [(line["code"], line["reason"]) for line in ends] == expected


def test_outcome_known_to_all_ranks_is_reported_once(tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(DataError), report_failure(a_session(tmp_path)):
            raise DataError("no rows")
    (end,) = [line for line in read_lines(RunDir(tmp_path).attempt(1).events) if line["event"] == "training_ended"]
    assert end["reason"] == "no rows"


@pytest.mark.parametrize(
    ("error", "behind", "traced"),
    [
        (DataError("no rows"), None, None),
        (DataError("no rows"), KeyError("text"), KeyError),
        (OSError("disk full"), None, OSError),
    ],
    ids=["a mistake", "a mistake that a library noticed", "a fault"],
)
def test_log_has_a_traceback_unless_the_message_suffices(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    behind: Exception | None,
    traced: type[Exception] | None,
) -> None:
    with pytest.raises(type(error)), report_failure(a_session(tmp_path)):
        raise error from behind
    (record,) = caplog.records
    assert str(error) in record.getMessage()
    assert (record.exc_info and record.exc_info[0]) is traced


def test_reason_of_our_own_error_is_its_message_without_the_name_of_its_class() -> None:
    saves = "3 checkpoints in a row were not committed: disk full; make the storage writable again"
    assert reason(WorkersFailed({0: CheckpointError(saves)})) == saves
    assert reason(OSError(28, "No space left")) == "OSError: [Errno 28] No space left"
