"""What is said of a run that failed: whether trying again can help, and for whom to read."""

from pathlib import Path

import pytest

from train_loop.errors import DataError, FencedError
from train_loop.failure import failed, failure_told
from train_loop.run_dir import Outcome, RunDir, read_lines
from train_loop.session import Session
from train_loop.spec import Problem, SpecError

SPEC_ERROR = SpecError([Problem("/strategy/ulysses_size", "ulysses_size=3 does not divide")])


class WorkersFailed(Exception):
    """As Ray Train tells of them."""

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
def test_only_mistakes_are_not_worth_another_try(error: Exception, outcome: Outcome) -> None:
    assert failed(error) == outcome


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("no rows\nat all"), [("data_error", "no rows")]),
        (SPEC_ERROR, [("invalid_spec", str(SPEC_ERROR))]),
        (FencedError("attempt 2 took over"), [("fenced", "attempt 2 took over")]),
        (OSError("disk full"), []),
    ],
)
def test_events_tell_of_what_ends_a_run_for_good(tmp_path: Path, error: Exception, said: list[tuple[str, str]]) -> None:
    run_dir = RunDir(tmp_path)
    session = Session(0, 1, 0, 1, run_dir, lambda *_: iter(()))
    with pytest.raises(type(error)), failure_told(session):
        raise error
    ends = [line for line in read_lines(run_dir.attempt(1).events) if line["event"] == "training_ended"]
    assert [(line["code"], line["reason"]) for line in ends] == said
