"""What the driver asks of Ray for a spec."""

from pathlib import Path

import pytest

from tests.support.specs import spec
from train_loop import driver, rank, spare
from train_loop.controller import TellOfLosses
from train_loop.journal import Journal
from train_loop.run_dir import Outcome, RunDir, StorageUnavailable, forget_expected, make_folder, read_lines
from train_loop.spare import task_environment


@pytest.mark.parametrize(("wanted", "counts"), [(True, [2, 1]), (False, [0, 0])])
def test_a_run_says_whether_it_wants_them(monkeypatch: pytest.MonkeyPatch, wanted: bool, counts: list[int]) -> None:
    job = spec(failure={"spare_workers": wanted})
    assert [rank._spares(job, number) for number in (0, 1)] == counts
    variables = driver._environment(job).get("env_vars", {})
    assert (spare._HOOK in variables) == wanted
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = task_environment()
    # Its tasks run in another environment, without the hook.
    assert (environment["env_vars"][spare._HOOK] if environment else None) == ("" if wanted else None)


def test_outcome_is_retried_while_storage_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, outcome = (
        RunDir(tmp_path / "run").attempt(1),
        Outcome(result="failed", code="data_error", reason="no rows"),
    )
    write, failures = type(attempt).write_outcome, [StorageUnavailable("/mnt", "gone"), NotADirectoryError(20, "no")]

    def write_outcome(self: object, found: Outcome) -> None:
        if failures:
            raise failures.pop()
        write(attempt, found)

    monkeypatch.setattr(type(attempt), "write_outcome", write_outcome)
    driver.acknowledge(attempt, Journal(attempt), outcome)
    assert attempt.outcome() == outcome


def test_outcome_that_cannot_be_written_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRAINSHED_STORAGE_SECONDS", "0")
    (tmp_path / "run").write_text("a file")
    attempt = RunDir(tmp_path / "run").attempt(1)
    with pytest.raises(OSError):
        driver.acknowledge(attempt, Journal(attempt), Outcome(result="failed", reason="no rows"))
    assert "no rows" in caplog.text


def test_callback_while_storage_is_away_does_not_raise_into_ray(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    attempt = run_dir.attempt(1)
    # A file where the run directory should be, as some file systems show it.
    run_dir.root.write_text("a file")
    callback = TellOfLosses(attempt)
    callback.after_exception(None, {0: RuntimeError("connection lost")})
    callback.after_exception(None, {})
    forget_expected(run_dir.root)
    run_dir.root.unlink()
    make_folder(attempt.root)
    Journal(attempt).event("workers_ready")
    assert [line["event"] for line in read_lines(attempt.events)] == ["workers_ready"]
