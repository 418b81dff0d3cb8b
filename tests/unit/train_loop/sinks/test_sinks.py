"""Metric sinks: their failures never end a run, and they receive missed metrics later."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.sinks import a_run, log_steps, shown
from tests.support.waiting import wait_for
from train_loop.errors import FencedError, UserError
from train_loop.run_dir import Outcome, RunDir, format_sinks, parse_sinks, read_lines_after, read_place
from train_loop.sinks import forward as forwarding
from train_loop.sinks.cursor import SinkCursor
from train_loop.sinks.forward import Forwarder, Forwarders, forward
from train_loop.sinks.sink import Point, Sink, points

DONE = Outcome(result="succeeded")


class Memory:
    """A sink in memory that fails or hangs on request."""

    def __init__(self) -> None:
        self.settle_seconds = 0.0
        self.steps: list[int] = []
        self.opened = 0
        self.failing = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.outcomes: list[Outcome | None] = []

    def open(self) -> Sink:
        self.opened += 1
        return self

    def write(self, points: Sequence[Point]) -> None:
        self.may_go_on.wait()
        if self.failing:
            raise ConnectionError("no route to hunter2-secret")
        self.steps += [point.step for point in points]

    def close(self, outcome: Outcome | None) -> None:
        self.outcomes.append(outcome)


class EventRecorder(list[tuple[str, str, str]]):
    """Recorded events: name, sink and error."""

    def __call__(self, name: str, **fields: str) -> None:
        self.append((name, fields["sink"], fields["error"]))


def handover(run_dir: RunDir, open_sink: Callable[[], Sink], *, attempt: int | None = 1) -> SinkCursor:
    return SinkCursor(run_dir, "tensorboard", open_sink, attempt=attempt)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_EVERY_SECONDS", "_MOST_SECONDS", "_MOST_SECONDS_AT_THE_END"):
        monkeypatch.setattr(forwarding, name, 0.01)


def test_failed_sink_is_reported_once_and_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2-secret")
    run_dir, sink, events = a_run(tmp_path, range(1, 4)), Memory(), EventRecorder()
    sink.failing = True
    forwarders = Forwarders([Forwarder(handover(run_dir, sink.open), events)])
    wait_for(lambda: sink.opened > 3, "some tries")
    log_steps(run_dir, [4, 5])
    sink.failing = False
    forwarders.catch_up(seconds=30)
    forwarders.close(DONE, seconds=30)
    assert sink.steps == [1, 2, 3, 4, 5]
    assert events == [("sink_failed", "tensorboard", "ConnectionError: no route to ***")]
    assert sink.outcomes[-1] == DONE


@pytest.mark.parametrize("hangs", [True, False])
def test_failing_sink_times_out_without_delaying_others(tmp_path: Path, hangs: bool) -> None:
    run_dir, bad, good, events = a_run(tmp_path, range(1, 4)), Memory(), Memory(), EventRecorder()
    bad.failing = True
    if hangs:
        bad.may_go_on.clear()
    other = SinkCursor(run_dir, "wandb", good.open, attempt=1)
    forwarders = Forwarders([Forwarder(handover(run_dir, bad.open), events), Forwarder(other, events)])
    forwarders.catch_up(seconds=0.2)
    assert good.steps == [1, 2, 3]
    forwarders.close(DONE, seconds=0.2)
    bad.may_go_on.set()
    assert good.outcomes == [DONE]
    name, sink, error = events[-1]
    assert (name, sink) == ("sink_failed", "tensorboard")
    assert error.endswith(f"(python -m train_loop.sinks {tmp_path} --sink tensorboard)")
    assert len(events) == (1 if hangs else 2)


def test_close_skips_the_timeout_of_a_failed_sink(tmp_path: Path) -> None:
    sink, events = Memory(), EventRecorder()
    sink.failing = True
    forwarders = Forwarders([Forwarder(handover(a_run(tmp_path, [1]), sink.open), events)])
    wait_for(lambda: events, "the news")
    forwarders.catch_up(seconds=3600)
    sink.failing = False
    forwarders.close(DONE, seconds=30)
    assert sink.steps == [1], "expected one more try"


def test_sink_without_its_package_is_reported_and_not_retried(tmp_path: Path) -> None:
    opened, events = list[int](), EventRecorder()

    def missing() -> Sink:
        opened.append(1)
        raise UserError("run pip install 'trainshed[mlflow]'")

    forwarders = Forwarders([Forwarder(handover(a_run(tmp_path, [1]), missing), events)])
    forwarders.catch_up(seconds=30)
    forwarders.close(DONE, seconds=30)
    assert events == [("sink_failed", "tensorboard", "run pip install 'trainshed[mlflow]'")]
    assert opened == [1]


def test_attempt_forwards_older_lines_and_stops_once_superseded(tmp_path: Path) -> None:
    run_dir, sink = a_run(tmp_path, range(1, 4)), Memory()
    log_steps(run_dir, [3, 4], attempt=2)
    log_steps(run_dir, [4, 5], attempt=3)
    second = handover(run_dir, sink.open, attempt=2)
    second.hand_over()
    assert sink.steps == [1, 2, 3, 3, 4]
    run_dir.write_fence(3)
    second.hand_over()
    log_steps(run_dir, [6], attempt=2)
    with pytest.raises(FencedError):
        second.hand_over()
    handover(run_dir, sink.open, attempt=3).hand_over()
    assert sink.steps == [1, 2, 3, 3, 4, 6, 4, 5], "expected the late line, forwarded before attempt 3"


def test_offset_is_written_once_earlier_lines_are_safe(tmp_path: Path) -> None:
    run_dir, sink = a_run(tmp_path, range(1, 4)), Memory()
    sink.settle_seconds = 3600.0
    ours = handover(run_dir, sink.open)
    ours.hand_over()
    log_steps(run_dir, [4])
    ours.hand_over()
    assert sink.steps == [1, 2, 3, 4]
    assert not run_dir.sink_file("tensorboard").exists()
    sink.failing = True
    log_steps(run_dir, [5])
    with pytest.raises(ConnectionError):
        ours.hand_over()
    ours.drop()
    sink.failing, sink.steps = False, []
    ours.hand_over()
    assert sink.steps == [1, 2, 3, 4, 5], "expected a repeat: a failed sink may have lost lines"
    sink.settle_seconds = 0.0
    ours.hand_over()
    assert read_place(run_dir.sink_file("tensorboard")).offset == run_dir.attempt(1).metrics.stat().st_size


def test_closed_sink_has_saved_all_lines(tmp_path: Path) -> None:
    run_dir, sink = a_run(tmp_path, range(1, 4)), Memory()
    sink.settle_seconds = 3600.0
    for _ in range(2):
        ours = handover(run_dir, sink.open)
        ours.hand_over()
        ours.close(DONE)
    assert (sink.steps, sink.opened) == ([1, 2, 3], 1)


def test_sinks_come_from_the_environment_and_unknown_names_only_warn(tmp_path: Path) -> None:
    run_dir, events = a_run(tmp_path, [1, 2]), EventRecorder()
    for named in ({"TRAINSHED_SINKS": "none"}, {"TRAINSHED_SINKS": "tensorbored"}, {}):
        assert not run_dir.tensorboard.exists()
        forwarders = forward(run_dir, 1, events, named)
        forwarders.catch_up(seconds=30)
        forwarders.close(DONE, seconds=30)
    assert [step for step, _ in shown(run_dir.tensorboard)] == [1, 2]
    assert [(name, sink) for name, sink, _ in events] == [("sink_failed", "tensorbored")]


@pytest.mark.parametrize(
    ("text", "sinks"),
    [("none", ()), ("wandb, tensorboard,wandb", ("tensorboard", "wandb")), ("mlflow", ("mlflow",))],
)
def test_sinks_are_a_comma_list(text: str, sinks: tuple[str, ...]) -> None:
    assert parse_sinks(text) == sinks
    assert parse_sinks(format_sinks(parse_sinks(text))) == sinks


@pytest.mark.parametrize("text", ["", "none,mlflow", "mlflow,tensorbored"])
def test_unknown_sink_names_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"sinks='.*expected any of tensorboard, mlflow, wandb, or none"):
        parse_sinks(text)


def test_only_numbers_become_scalars() -> None:
    line: dict[str, Any] = {"seq": 7, "time": 5.5, "attempt": 2, "step": 3, "loss": 1, "lr": 1e-4, "mfu": None}
    line |= {"eval_loss": 2.5, "samples": [1, 2], "flag": True, "word": "x", "lr_groups": [1e-4, 2e-3]}
    scalars = {"train/loss": 1.0, "train/lr": 1e-4, "eval/loss": 2.5, "train/lr_0": 1e-4, "train/lr_1": 2e-3}
    assert points([line, {"event": "no step"}]) == [Point(attempt=2, step=3, time=5.5, scalars=scalars)]


def test_only_whole_lines_are_read_at_any_length(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_lines_after(file, 0) == ([], 0)
    long = b'{"x": "%s"}\n' % (b"y" * 1_000_000)
    file.write_bytes(b'{"a": 1}\nno json\n' + long + b'{"torn": ')
    lines, place = list[dict[str, Any]](), 0
    while (found := read_lines_after(file, place))[0]:
        lines, place = lines + found[0], found[1]
    assert [next(iter(line)) for line in lines] == ["a", "x"]
    assert place == file.stat().st_size - len(b'{"torn": ')
