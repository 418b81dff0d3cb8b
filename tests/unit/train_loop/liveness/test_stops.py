"""Stops of an attempt by its driver: each request in each phase, in which it ends at once or leaves it to the ranks."""

import time
from collections.abc import Sequence
from pathlib import Path
from signal import Signals
from typing import Any

import pytest

from tests.support.builders.checkpoints import checkpoint
from tests.support.waiting import wait_for
from train_loop.errors import FencedError
from train_loop.liveness import stops
from train_loop.liveness.fencing import begin_group, check_fence
from train_loop.liveness.stops import NOTICE, StopWatch
from train_loop.run_dir import Outcome, RunDir, Stop, read_lines
from train_loop.telemetry.event_log import EventLog

LOSS = "rank 1 on a was killed by signal 9 (SIGKILL)"
LOST = {"event": "workers_lost", "error": LOSS}
HANG = "rank 1 on a is stopped (SIGSTOP)"
HANGING = {"event": "stalled", "reason": HANG, "phase": "train"}
PROGRESSING = {"event": "progressing"}
UP = [{"event": "prepared"}, {"event": "group_started"}, {"event": "workers_ready"}, {"event": "training_started"}]
PHASES: dict[str, tuple[Sequence[dict[str, Any]], str | None]] = {
    "starting": ([{"event": "attempt_started"}], "stopped while its driver was starting"),
    "preparing": ([{"event": "preparing"}, {"event": "prepare_progress"}], "stopped while its data was prepared"),
    "waiting for preparation": ([{"event": "waiting_for_preparation"}], "stopped while another job prepared its data"),
    "training a tokenizer": ([{"event": "training_tokenizer"}], "stopped while its tokenizer was trained"),
    "prepared": (UP[:1], "stopped while its workers were starting"),
    "waiting for capacity": (
        [*UP[:1], {"event": "waiting_for_capacity", "missing": "4 CPU"}],
        "stopped while it waited for 4 CPU",
    ),
    "starting workers": (UP[:2], "stopped while its workers were starting"),
    "loading": (UP[:3], "stopped while its workers loaded the model"),
    # Training, evaluating and saving: the ranks end the attempt.
    "training": (UP, None),
    "saving": ([*UP, {"event": "checkpoint_delayed"}], None),
    "leaving hosts": ([*UP, {"event": "training_ended", "result": "moved"}], None),
    "recovering": ([*UP, LOST], f"stopped while its workers were restarted: {LOSS}"),
    "recovering without capacity": (
        [*UP, LOST, {"event": "waiting_for_capacity", "missing": "4 CPU"}],
        f"stopped while it waited for 4 CPU: {LOSS}",
    ),
    "loading again": ([*UP, LOST, *UP[1:3]], f"stopped while its workers loaded the model: {LOSS}"),
    "recovered": ([*UP, LOST, *UP[1:]], None),
    "moving": ([*UP, {"event": "training_ended", "result": "moved"}, {"event": "moving"}], "stopped while it moved"),
}


class Attempt:
    """An attempt on a real run directory, with a watch whose signals a test sends."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(folder / "run")
        self.attempt = self.run_dir.attempt(1)
        self.journal = EventLog(self.attempt)
        self.outcomes = list[Outcome]()
        self.signals = list[Signals]()
        self.watch = StopWatch(
            self.run_dir, self.attempt, report=self.journal.event, wait=self.next_signal, end=self.outcomes.append
        )

    def next_signal(self, seconds: float) -> Signals | None:
        time.sleep(0.005)
        return self.signals.pop() if self.signals else None

    def write(self, *events: dict[str, Any]) -> None:
        for event in events:
            self.journal.event(event["event"], **{name: value for name, value in event.items() if name != "event"})

    def stop(self, mode: Any, *, checkpoint: bool = True) -> None:
        self.run_dir.write_stop(Stop(mode=mode, checkpoint=checkpoint, attempt=1))


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["pause", "cancel", "resize"])
def test_request_ends_every_phase_in_which_no_rank_reads_it(attempt: Attempt, phase: str, mode: Any) -> None:
    events, reason = PHASES[phase]
    attempt.write(*events)
    assert attempt.watch.check() is None
    attempt.stop(mode)
    outcome = attempt.watch.check()
    if reason is None:
        assert outcome is None
    else:
        assert outcome is not None
        assert (outcome.result, outcome.code) == (Stop(mode=mode).result, None)
        assert str(outcome.reason).startswith(reason)


@pytest.mark.parametrize("mode", ["pause", "cancel", "resize"])
def test_rank_lost_after_the_request_is_named_and_the_attempt_ends(attempt: Attempt, mode: Any) -> None:
    attempt.write(*UP)
    attempt.stop(mode)
    assert attempt.watch.check() is None
    attempt.write(HANGING)
    assert attempt.watch.check() is None
    attempt.write(LOST)
    outcome = attempt.watch.check()
    assert outcome == Outcome(result=Stop(mode=mode).result, reason=f"{LOSS} before it saved")


def test_request_is_reported_once_with_what_it_waits_for(attempt: Attempt) -> None:
    attempt.write(*UP)
    attempt.stop("pause")
    for _ in range(3):
        attempt.watch.check()
    (event,) = [line for line in read_lines(attempt.attempt.events) if line["event"] == "stopping"]
    assert (event["mode"], event["waits_for"]) == ("pause", "the workers to finish their step and save a checkpoint")
    assert "reason" not in event


def test_planned_end_of_the_cluster_is_named_in_the_event(attempt: Attempt) -> None:
    attempt.run_dir.write_stop(Stop(mode="pause", attempt=1, reason="the head of Ray ends as planned"))
    attempt.watch.check()
    (event,) = [line for line in read_lines(attempt.attempt.events) if line["event"] == "stopping"]
    assert event["reason"] == "the head of Ray ends as planned"


def test_request_for_another_attempt_is_ignored(attempt: Attempt) -> None:
    attempt.run_dir.write_stop(Stop(mode="pause", attempt=2))
    assert attempt.watch.check() is None
    assert list(read_lines(attempt.attempt.events)) == []


@pytest.mark.parametrize(
    ("stop", "events", "reason"),
    [
        (
            Stop(mode="cancel", checkpoint=False),
            [],
            "the workers did not end by themselves; no checkpoint was requested",
        ),
        (
            Stop(mode="cancel", checkpoint=False),
            [HANGING],
            f"the workers did not end by themselves ({HANG}); no checkpoint was requested",
        ),
        (Stop(mode="cancel"), [], None),
        (Stop(mode="cancel"), [HANGING], f"the workers did not save ({HANG})"),
        (Stop(mode="cancel"), [HANGING, PROGRESSING], None),
        (Stop(mode="cancel"), [HANGING, PROGRESSING | {"host": "a"}], f"the workers did not save ({HANG})"),
        (Stop(mode="cancel"), [HANGING, *UP[1:]], None),
        # A save is as slow as its storage.
        (Stop(mode="cancel"), [HANGING | {"phase": "save"}], None),
        (Stop(mode="cancel"), [HANGING | {"phase": "end"}], None),
        # A rank that is only slow saves before the deadline.
        (Stop(mode="pause"), [HANGING], None),
        (Stop(mode="resize"), [HANGING], None),
    ],
)
def test_ranks_that_hang_during_a_cancel_or_need_not_save_are_ended_after_three_seconds(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, stop: Stop, events: Sequence[dict[str, Any]], reason: str | None
) -> None:
    attempt.write(*UP, *events)
    attempt.stop(stop.mode, checkpoint=stop.checkpoint)
    assert attempt.watch.check() is None
    monkeypatch.setattr(stops, "_ABANDON_SECONDS", 0.0)
    outcome = attempt.watch.check()
    assert outcome == (None if reason is None else Outcome(result=stop.result, reason=reason))


ENDED = {"event": "training_ended", "result": "paused", "step": 7}


@pytest.mark.parametrize("result", ["paused", "succeeded", "failed"])
def test_end_that_the_workers_report_is_acknowledged_at_once_during_a_stop(attempt: Attempt, result: Any) -> None:
    attempt.write(*UP, ENDED | {"result": result})
    assert attempt.watch.check() is None, "expected an orderly end without a request"
    attempt.stop("pause")
    assert attempt.watch.check() == Outcome(result=result, step=7)


@pytest.mark.parametrize(
    ("requested", "events", "expected"),
    [
        (None, UP, Outcome(result="failed", code="interrupted", retryable=True)),
        (None, UP[:1], Outcome(result="failed", code="interrupted", retryable=True)),
        ("pause", UP, Outcome(result="paused", reason="stopped at the deadline before the workers had saved")),
        (
            "pause",
            [*UP, HANGING],
            Outcome(result="paused", reason=f"stopped at the deadline before the workers had saved ({HANG})"),
        ),
        ("cancel", UP[:2], Outcome(result="cancelled", reason="stopped while its workers were starting")),
        ("pause", [*UP, ENDED], Outcome(result="paused", step=7)),
    ],
)
def test_interrupt_ends_the_attempt_at_once(
    attempt: Attempt, requested: Any, events: Sequence[dict[str, Any]], expected: Outcome
) -> None:
    attempt.write(*events)
    if requested is not None:
        attempt.stop(requested)
    attempt.signals.append(Signals.SIGINT)
    attempt.watch.start()
    (outcome,) = wait_for(lambda: attempt.outcomes, "the end")
    if expected.code == "interrupted":
        reason = "the driver was interrupted (SIGINT) without a request of the service"
        expected = expected.model_copy(update={"reason": reason})
    end = outcome.model_copy(update={"reason": (outcome.reason or "").partition("; there is no")[0] or None})
    assert end == expected


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("requested", [None, "pause", "cancel"])
@pytest.mark.parametrize("times", [1, 2])
def test_notice_by_signal_lets_ranks_save_and_ends_every_other_phase(
    attempt: Attempt, phase: str, requested: Any, times: int
) -> None:
    """SIGTERM says that more time is left; the request of the service stays, and the service learns the reason."""
    events, reason = PHASES[phase]
    attempt.write(*events)
    if requested is not None:
        attempt.stop(requested)
    attempt.signals += [Signals.SIGTERM] * times
    attempt.watch.start()
    mode = requested or "pause"
    stop = wait_for(lambda: one if (one := attempt.run_dir.stop(attempt=1)) and one.reason else None, "the notice")
    assert (stop.mode, stop.reason) == (mode, NOTICE)
    if reason is None:
        wait_for(lambda: not attempt.signals, "all signals")
        assert attempt.outcomes == []
        attempt.write(ENDED | {"result": Stop(mode=mode).result})
    (outcome,) = wait_for(lambda: attempt.outcomes, "the end")
    assert (outcome.result, outcome.code) == (Stop(mode=mode).result, None)
    assert reason is None or str(outcome.reason).startswith(reason)


@pytest.mark.parametrize("newest", [None, 10])
def test_ended_attempt_is_fenced_off_and_names_its_newest_checkpoint(attempt: Attempt, newest: int | None) -> None:
    token = begin_group(attempt.run_dir, 1, by="a group")
    if newest is not None:
        checkpoint(attempt.run_dir, newest, epoch=token.epoch)
    attempt.write(*UP, LOST)
    attempt.stop("cancel")
    attempt.watch.start()
    (outcome,) = wait_for(lambda: attempt.outcomes, "the end")
    known = "there is no checkpoint" if newest is None else "the newest checkpoint is of step 10"
    assert str(outcome.reason).endswith(f"{LOSS}; {known}")
    assert outcome.step == (newest or 0)
    with pytest.raises(FencedError):
        check_fence(attempt.run_dir, token)


def test_attempt_that_ended_by_itself_is_not_ended_again(attempt: Attempt) -> None:
    attempt.write(*UP)
    attempt.watch.start()
    attempt.watch.close()
    attempt.stop("pause")
    attempt.write(LOST)
    attempt.watch._thread.join(10)
    assert attempt.outcomes == []


def test_unreadable_request_is_read_once_storage_is_back(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt.write(*UP[:1])
    attempt.stop("pause")
    with monkeypatch.context() as patch:
        patch.setattr(stops, "read_lines_after", _no_answer)
        assert attempt.watch.check() is None
    outcome = attempt.watch.check()
    assert outcome is not None


def _no_answer(*_: object) -> None:
    raise TimeoutError("storage does not answer")
