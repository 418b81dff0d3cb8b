"""Rate limit of log lines for repeated faults."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from service.adapters.storage.run_dirs import LocalRunDirs
from service.fault_log import FaultLog
from service.ports import AttemptObservation
from tests.support.fakes.service import Clock, FakeService


@pytest.fixture
def lines() -> Iterator[list[EventDict]]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    with capture_logs() as captured:
        yield captured
    structlog.reset_defaults()


def fail(message: str) -> Exception:
    try:
        raise OSError(message)
    except OSError as error:
        return error


def test_repeated_fault_is_logged_once_a_minute_with_a_count(lines: list[EventDict]) -> None:
    clock = Clock()
    faults = FaultLog(clock)
    for second in range(120):
        clock.now = 1000.0 + second
        faults.report("reconcile_failed", fail(f"no answer {second}\nmore"), job="job-1")
    assert [(line["error"], line.get("repeated")) for line in lines] == [
        ("OSError: no answer 0", None),
        ("OSError: no answer 60", 59),
    ]
    assert all(line["exc_info"] for line in lines)


def test_faults_of_different_jobs_or_errors_are_logged_separately(lines: list[EventDict]) -> None:
    faults = FaultLog(Clock())
    for job in ("job-1", "job-2"):
        faults.report("reconcile_failed", fail("x"), job=job)
        faults.report("reconcile_failed", ValueError("x"), job=job)
    assert len(lines) == 4


def test_report_each_logs_every_request_and_one_traceback(lines: list[EventDict]) -> None:
    faults = FaultLog(Clock())
    for _ in range(3):
        faults.report_each("request_failed", fail("x"))
    assert [bool(line["exc_info"]) for line in lines] == [True, False, False]


class BrokenRunDirs(LocalRunDirs):
    def observe(self, run_dir: str, attempt: int) -> AttemptObservation:
        raise RuntimeError("a bug")


def test_job_that_fails_at_every_pass_is_logged_once(tmp_path: Path, lines: list[EventDict]) -> None:
    service = FakeService(tmp_path, run_dirs=BrokenRunDirs())
    stuck, reconciler = service.submit(), service.reconciler()
    for _ in range(5):
        reconciler.run_once()
    assert [line["job"] for line in lines if line["event"] == "reconcile_failed"] == [stuck.id]
