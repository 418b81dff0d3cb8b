"""An export on object storage has one event, also if two processes complete it at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from train_loop.checkpoint.export import status
from train_loop.checkpoint.export.status import finish
from train_loop.run_dir import ExportStatus, ExportWish, RunDir, read_lines

WISH = ExportWish(dtype="fp32")


@pytest.fixture
def run_dir() -> RunDir:
    MemoryFileSystem.store.clear()
    return RunDir.at("memory://runs/default/job")


def completed_at(time: float) -> ExportStatus:
    return ExportStatus(step=3, wish=WISH, state="running", time=time, completed=time)


def events(run_dir: RunDir) -> list[float]:
    return [line["completed"] for line in read_lines(run_dir.attempt(1).events)]


def test_two_processes_that_complete_the_same_export_write_one_event(run_dir: RunDir) -> None:
    together = threading.Barrier(2)

    def end(time: float) -> None:
        together.wait()
        finish(run_dir, completed_at(time))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(end, (100.0, 200.0)))
    (first,) = events(run_dir)
    found = run_dir.exports.status(3, WISH, now=200.0)
    assert found is not None
    assert (found.state, found.completed) == ("done", first)


def test_event_of_a_process_that_died_before_it_is_written_by_the_next(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.exports.claim(3, WISH, 100.0)
    monkeypatch.setattr(status, "OTHER_SECONDS", 0.0)
    finish(run_dir, completed_at(200.0))
    assert events(run_dir) == [100.0]
    finish(run_dir, completed_at(100.0))
    assert events(run_dir) == [100.0]
