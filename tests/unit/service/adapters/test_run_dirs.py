"""Run directories as the service reads them."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from service.adapters.storage import run_dirs as module
from service.adapters.storage.run_dirs import LocalRunDirs
from service.adapters.storage.run_summary import RunSummaryReader
from service.domain.jobs.observation import WorkerStatus
from service.ports import Cursor, LogChunk, LogOffset, LogSource, Loss
from service.use_cases.runs.filters import Filter, contains
from service.use_cases.runs.streams import Reader, read_page
from train_loop.run_dir import JsonLines, Outcome, RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def event(run_dir: RunDir, name: str, *, attempt: int = 1, replayed: int = 0, **fields: object) -> None:
    lines = JsonLines(run_dir.attempt(attempt).events, attempt=attempt)
    lines.append(event=name, replayed=replayed, steps=10, **fields)


def uri(run_dir: RunDir) -> str:
    return run_dir.root.as_uri()


def test_empty_run_directory_has_no_progress(run_dir: RunDir) -> None:
    observed, summary = LocalRunDirs().observe(uri(run_dir), 1), LocalRunDirs().summary(uri(run_dir))
    assert (observed.training, observed.outcome, observed.stop) == (WorkerStatus.NOT_YET, None, None)
    assert (summary.restarts, summary.lost_steps, summary.progress) == (0, 0, None)


def test_newest_event_determines_training_status(run_dir: RunDir) -> None:
    seen = []
    for name in ("attempt_started", "training_started", "workers_lost", "checkpoint_committed", "training_started"):
        event(run_dir, name)
        seen.append(LocalRunDirs().observe(uri(run_dir), 1).training)
    assert seen == [WorkerStatus.NOT_YET, WorkerStatus.YES, WorkerStatus.LOST, WorkerStatus.LOST, WorkerStatus.YES]


def test_restarts_and_lost_work_are_counted_over_attempts(run_dir: RunDir) -> None:
    event(run_dir, "training_started")
    event(run_dir, "training_started", replayed=3)
    event(run_dir, "training_started", attempt=2, replayed=4)
    summary = LocalRunDirs().summary(uri(run_dir))
    assert (summary.restarts, summary.lost_steps) == (2, 7)


@pytest.mark.parametrize("outcome", ["paused", "resized", "moved", "failed", None])
@pytest.mark.parametrize(
    ("between", "same_attempt", "restarts"),
    [
        ((), True, 1),
        (("workers_lost",), True, 1),
        (("moving",), True, 0),
        # A pause, a resize, or a stop of the service, which may have killed the driver before it wrote an outcome.
        (("stopping",), False, 0),
        # A rank was lost before or during the stop.
        (("workers_lost", "stopping"), False, 1),
        (("stopping", "workers_lost"), False, 1),
    ],
)
def test_restarts_count_faults_only(
    run_dir: RunDir, outcome: Any, between: tuple[str, ...], same_attempt: bool, restarts: int
) -> None:
    for name in ("training_started", *between):
        event(run_dir, name)
    if outcome is not None:
        run_dir.attempt(1).write_outcome(Outcome(result=outcome))
    event(run_dir, "training_started", attempt=1 if same_attempt else 2)
    assert LocalRunDirs().summary(uri(run_dir)).restarts == restarts


def test_loss_during_a_planned_end_of_the_cluster_is_no_fault(run_dir: RunDir) -> None:
    event(run_dir, "training_started")
    event(run_dir, "stopping", mode="pause", reason="the head of Ray ends as planned")
    event(run_dir, "workers_lost", ranks=[1], hosts=["b"], error="rank 1 on b was killed by signal 9 (SIGKILL)")
    event(run_dir, "training_started", attempt=2)
    summary = LocalRunDirs().summary(uri(run_dir))
    assert (summary.restarts, summary.losses) == (0, {})
    # A later loss is a fault.
    event(run_dir, "workers_lost", attempt=2, ranks=[1], hosts=["b"], error="rank 1 on b was killed")
    event(run_dir, "training_started", attempt=2)
    assert LocalRunDirs().summary(uri(run_dir)).restarts == 1


@pytest.mark.parametrize(
    ("outcome", "restarts"), [("paused", 0), ("resized", 0), ("moved", 0), ("failed", 1), (None, 1)]
)
def test_restarts_of_older_drivers_are_known_from_their_outcome(run_dir: RunDir, outcome: Any, restarts: int) -> None:
    event(run_dir, "training_started")
    if outcome is not None:
        run_dir.attempt(1).write_outcome(Outcome(result=outcome))
    event(run_dir, "training_started", attempt=2)
    assert LocalRunDirs().summary(uri(run_dir)).restarts == restarts


def test_progress_comes_from_the_newest_line(run_dir: RunDir) -> None:
    event(run_dir, "training_started")
    for attempt, step in ((1, 5), (2, 3)):
        lines = JsonLines(run_dir.attempt(attempt).metrics, attempt=attempt)
        lines.append(step=step, loss=1.5, tokens_per_second=100.0, step_seconds=2.0)
    progress = LocalRunDirs().summary(uri(run_dir)).progress
    assert progress is not None
    assert (progress.step, progress.of, progress.loss, progress.eta_seconds) == (3, 10, 1.5, 14.0)


@pytest.mark.parametrize("per_read", [1, 2, 3])
@pytest.mark.parametrize("quiet_reads", range(8))
def test_lines_written_during_a_read_are_applied_in_order(run_dir: RunDir, quiet_reads: int, per_read: int) -> None:
    """Write some lines before each read of a file, from a certain read on."""

    def lines() -> Iterator[Callable[[], None]]:
        metrics = JsonLines(run_dir.attempt(1).metrics, attempt=1)
        for replayed in range(5):
            yield partial(event, run_dir, "training_started", replayed=replayed)
            for step in range(replayed, replayed + 3):
                yield partial(metrics.append, step=step, step_seconds=2.0)
            yield partial(event, run_dir, "workers_lost")

    def read(what: LogSource, place: LogOffset) -> LogChunk:
        for write in islice(script, per_read if next(reads) >= quiet_reads else 0):
            write()
        return dirs.tail(uri(run_dir), what, place)

    script, reads, dirs, reader = lines(), count(), LocalRunDirs(), RunSummaryReader(run_dir)
    for _ in range(40):
        progress = reader.update(read, now=0.0).progress
        assert progress is None or progress.of == 10
    assert next(script, None) is None, "some lines are not written"
    assert reader.update(read, now=0.0) == LocalRunDirs().summary(uri(run_dir))


def test_lines_are_kept_if_a_later_read_fails(run_dir: RunDir) -> None:
    event(run_dir, "training_started")
    JsonLines(run_dir.attempt(1).metrics, attempt=1).append(step=1, step_seconds=2.0)
    reader = RunSummaryReader(run_dir)
    for failing in range(1, 8):
        reads = count(1)

        def read(what: LogSource, place: LogOffset, failing: int = failing, reads: Iterator[int] = reads) -> LogChunk:
            if next(reads) == failing:
                raise OSError("no answer")
            return LocalRunDirs().tail(uri(run_dir), what, place)

        with suppress(OSError):
            reader.update(read, now=0.0)
    assert reader.last.summary == LocalRunDirs().summary(uri(run_dir))


def test_lines_of_a_superseded_group_are_ignored(run_dir: RunDir) -> None:
    """Let group 1 write alongside its successor, as after a freeze."""
    attempt, reader = run_dir.attempt(1), LocalRunDirs()
    for epoch, step in ((1, 5), (2, 4), (1, 6), (2, 5)):
        events = JsonLines(attempt.events, attempt=1, epoch=partial(int, epoch))
        events.append(event="training_started", steps=10, replayed=step)
        JsonLines(attempt.metrics, attempt=1, epoch=partial(int, epoch)).append(step=step, step_seconds=2.0)
        reader.summary(uri(run_dir))
    JsonLines(attempt.events, attempt=1, epoch=partial(int, 1)).append(event="workers_lost", error="frozen")
    summary, observed = reader.summary(uri(run_dir)), reader.observe(uri(run_dir), 1)
    assert (summary.restarts, summary.lost_steps) == (2, 14)
    assert summary.progress is not None
    assert summary.progress.step == 5
    assert (observed.training, observed.lost) == (WorkerStatus.YES, None)


def test_progress_beyond_planned_steps_uses_its_step_as_total(run_dir: RunDir) -> None:
    event(run_dir, "training_started")
    JsonLines(run_dir.attempt(1).metrics, attempt=1).append(step=12, step_seconds=2.0)
    progress = LocalRunDirs().summary(uri(run_dir)).progress
    assert progress is not None
    assert (progress.step, progress.of, progress.eta_seconds) == (12, 12, 0.0)


def test_newest_whole_line_longer_than_the_window_is_found(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WINDOW", 16)
    JsonLines(run_dir.attempt(1).metrics, attempt=1).append(step=4, samples=list(range(100)))
    with run_dir.attempt(1).metrics.open("a") as file:
        file.write('{"torn')
    progress = LocalRunDirs().summary(uri(run_dir)).progress
    assert progress is not None
    assert progress.step == 4


def test_lines_of_all_attempts_form_one_list_with_a_cursor(run_dir: RunDir) -> None:
    for attempt in (1, 2, 10):
        event(run_dir, "a", attempt=attempt)
        event(run_dir, "b", attempt=attempt)

    with run_dir.attempt(2).events.open("a") as file:
        file.write('no JSON\n{"event": "not counted"}\n[1]\n')

    def page(after: Cursor, limit: int, *filters: Filter) -> tuple[list[str], bool]:
        reader = Reader(LocalRunDirs(), uri(run_dir), LogSource("events"), filters=filters)
        found, more = read_page(reader, after, limit)
        return [str(one.cursor) for one in found], more

    assert page(Cursor(), 3) == (["1.1", "1.2", "2.1"], True)
    assert page(Cursor(2, 1), 3) == (["2.2", "10.1", "10.2"], False)
    assert page(Cursor(10, 2), 9) == ([], False)
    assert page(Cursor(1, 2), 9, contains('"event": "b"')) == (["2.2", "10.2"], False)


def test_lost_seconds_last_until_new_progress(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = LocalRunDirs()

    def at(seconds: float, *steps: int, starts: bool = False, attempt: int = 1) -> None:
        monkeypatch.setattr(time, "time", lambda: seconds)
        if starts:
            event(run_dir, "training_started", attempt=attempt)
        for step in steps:
            JsonLines(run_dir.attempt(attempt).metrics, attempt=attempt).append(step=step, step_seconds=2.0)
        reader.summary(uri(run_dir))

    at(100.0, starts=True)
    at(102.0, 1)
    at(104.0, 2)
    # Killed and restarted 30 seconds later; one step is repeated.
    at(134.0, starts=True)
    at(136.0, 2)
    at(138.0, 3)
    summary = reader.summary(uri(run_dir))
    assert (summary.lost_seconds, summary.productive_seconds) == (32.0, 6.0)
    # A pause of 1000 seconds is not lost time.
    run_dir.attempt(1).write_outcome(Outcome(result="paused", step=3))
    at(1138.0, starts=True, attempt=2)
    at(1140.0, 4, attempt=2)
    assert reader.summary(uri(run_dir)) == LocalRunDirs().summary(uri(run_dir))
    assert reader.summary(uri(run_dir)).lost_seconds == 32.0


@pytest.mark.parametrize(("lost", "seconds"), [(True, 37.0), (False, 0.0)])
def test_resize_loses_time_only_after_a_worker_loss(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, lost: bool, seconds: float
) -> None:
    def step(number: int, at: float, attempt: int) -> None:
        monkeypatch.setattr(time, "time", lambda: at)
        JsonLines(run_dir.attempt(attempt).metrics, attempt=attempt).append(step=number, step_seconds=1.0)

    monkeypatch.setattr(time, "time", lambda: 100.0)
    event(run_dir, "training_started")
    step(1, 101.0, 1)
    if lost:
        JsonLines(run_dir.attempt(1).events, attempt=1).append(event="workers_lost", hosts=["node3"], error="gone")
        assert LocalRunDirs().summary(uri(run_dir)).losses == {"node3": Loss(101.0, "gone")}
    run_dir.attempt(1).write_outcome(Outcome(result="resized", step=1))
    monkeypatch.setattr(time, "time", lambda: 130.0)
    event(run_dir, "training_started", attempt=2)
    step(2, 139.0, 2)
    assert LocalRunDirs().summary(uri(run_dir)).lost_seconds == seconds


def write_log(run_dir: RunDir, text: str) -> None:
    path = run_dir.attempt(1).driver_log
    path.parent.mkdir(parents=True)
    path.write_text(text)


LOG = LogSource("log")


def texts(tail: LogChunk) -> list[str]:
    return [entry.text for entry in tail.entries]


def test_tail_returns_whole_lines_and_resumes_from_its_place(run_dir: RunDir) -> None:
    write_log(run_dir, "one\ntwo\nthree\nhalf a li")
    first = LocalRunDirs().tail(uri(run_dir), LOG, LogOffset(1))
    assert texts(first) == ["one", "two", "three"]
    assert [entry.after.offset for entry in first.entries] == [4, 8, 14]
    assert texts(LocalRunDirs().tail(uri(run_dir), LOG, first.entries[1].after)) == ["three"]


def test_line_longer_than_the_window_is_split(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WINDOW", 4)
    write_log(run_dir, "abcdefg\n")
    tail = LocalRunDirs().tail(uri(run_dir), LOG, LogOffset(1))
    assert (texts(tail), tail.entries[0].after, tail.more) == (["abcd"], LogOffset(1, 4), True)
    assert texts(LocalRunDirs().tail(uri(run_dir), LOG, LogOffset(1, 4))) == ["efg"]


def test_missing_file_has_no_lines(run_dir: RunDir) -> None:
    assert LocalRunDirs().tail(uri(run_dir), LogSource("log", rank=1), LogOffset(3, 5)) == LogChunk((), False, None)
