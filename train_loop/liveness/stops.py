"""Stops of an attempt by its driver, in each phase in which no worker can save and acknowledge the request."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from signal import Signals
from typing import Any

from pydantic import ValidationError

from train_loop.errors import FencedError
from train_loop.liveness.fencing import begin_group
from train_loop.liveness.leave import ask_to_leave
from train_loop.run_dir import (
    ENDED,
    STARTED,
    AttemptDir,
    CurrentGroup,
    Outcome,
    RunDir,
    Stop,
    read_lines_after,
    storage_may_fail,
)
from train_loop.system.exit import leave
from train_loop.system.limited_log import LimitedLog

log = logging.getLogger(__name__)
_limited = LimitedLog(log)
_POLL_SECONDS = 0.5
_ABANDON_SECONDS = 3.0
"""Seconds that workers have to end by themselves if no checkpoint is wanted, or if they hang during a cancel."""
_DOING: Mapping[str, str] = {
    "attempt_started": "its driver was starting",
    "waiting_for_preparation": "another job prepared its data",
    "training_tokenizer": "its tokenizer was trained",
    "preparing": "its data was prepared",
    "prepared": "its workers were starting",
    "waiting_for_capacity": "it waited for capacity",
    "group_started": "its workers were starting",
    "workers_ready": "its workers loaded the model",
    "workers_lost": "its workers were restarted",
    "moving": "it moved to other hosts",
}
"""What an attempt does after each event, unless it trains."""
_SAVING = ("save", "end")
"""Phases of ranks that save: they are as slow as their storage, and do not hang."""
NOTICE = "its driver was asked to end (SIGTERM), as when its host is shut down"


@dataclass
class Activity:
    """What an attempt does, from its events so far."""

    doing: str = _DOING["attempt_started"]
    """The current phase, as the end of a sentence with "while"."""
    trains: bool = False
    """True if the workers read stop requests, save and acknowledge them."""
    end: Outcome | None = None
    """The outcome that the workers have reported; None if they have not finished."""
    loss: str | None = None
    """The loss of the newest worker group; None if it is not lost."""
    hang: str | None = None
    """What keeps the workers from a step, as a sentence; None if they make progress."""

    def read(self, event: Mapping[str, Any]) -> None:
        """Apply the next event."""
        name = str(event.get("event"))
        if name in STARTED:
            self.trains, self.end, self.loss, self.hang = True, None, None, None
        elif name in ENDED:
            with suppress(ValidationError):
                self.end = Outcome.model_validate(event)
        elif name == "stalled":
            self.hang = None if event.get("phase") in _SAVING else str(event.get("reason", "its workers hang"))
        elif name == "progressing" and "host" not in event:
            self.hang = None
        elif name in _DOING:
            self.trains, self.end, self.doing = False, None, _DOING[name]
            if name == "workers_lost":
                self.loss = str(event.get("error", "workers were lost"))
            elif name == "waiting_for_capacity" and event.get("missing"):
                self.doing = f"it waited for {event['missing']}"


@dataclass(frozen=True)
class StopState:
    """A stop request as the driver sees it."""

    stop: Stop | None
    """The request; None if there is none or if it cannot be read."""
    signal: Signals | None = None
    """SIGINT, if the driver has received it: there is no more time."""
    trained: bool = False
    """True if the workers trained when the request came."""
    waited: float = 0.0
    """Seconds since the driver has seen the request."""


def end_of(activity: Activity, state: StopState) -> Outcome | None:
    """Return the outcome if the driver must end the attempt now; None if the workers will, or if nobody asked. Pure."""
    stop = state.stop
    if stop is None:
        return None if state.signal is None else _interrupted(state.signal)
    if activity.end is not None:
        # Everything is saved. Ray takes seconds to end the workers properly.
        return activity.end if activity.end.result != "moved" or state.signal is not None else None
    if not activity.trains:
        return Outcome(result=stop.result, reason=_without_workers(activity, trained=state.trained))
    hang = f" ({activity.hang})" if activity.hang else ""
    if state.signal is not None:
        return Outcome(result=stop.result, reason=f"stopped at the deadline before the workers had saved{hang}")
    if not stop.checkpoint and state.waited >= _ABANDON_SECONDS:
        reason = f"the workers did not end by themselves{hang}; no checkpoint was requested"
        return Outcome(result=stop.result, reason=reason)
    # A pause waits until its deadline: a rank that is only slow saves before that.
    if hang and stop.mode == "cancel" and state.waited >= _ABANDON_SECONDS:
        return Outcome(result=stop.result, reason=f"the workers did not save{hang}")
    return None


def waits_for(activity: Activity, stop: Stop) -> str:
    """Return what an attempt that stops waits for."""
    if not activity.trains or activity.end is not None:
        return "the end of its driver"
    return "the workers to finish their step" + (" and save a checkpoint" if stop.checkpoint else "")


def _interrupted(number: Signals) -> Outcome:
    reason = f"the driver was interrupted ({number.name}) without a request of the service"
    return Outcome(result="failed", code="interrupted", reason=reason, retryable=True)


def _without_workers(activity: Activity, *, trained: bool) -> str:
    if activity.loss is None:
        return f"stopped while {activity.doing}"
    return f"{activity.loss} before it saved" if trained else f"stopped while {activity.doing}: {activity.loss}"


class StopWatch:
    """A thread that ends the attempt if a request or a signal requires it, whatever the other threads do.

    SIGINT ends it at once. SIGTERM, however often it comes, is a notice: the attempt saves and leaves.
    `end` writes the outcome and exits the process. Before that, the fence rejects later commits of the workers.
    """

    def __init__(
        self,
        run_dir: RunDir,
        attempt: AttemptDir,
        *,
        report: Callable[..., None],
        wait: Callable[[float], Signals | None],
        end: Callable[[Outcome], object],
    ) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        self._report, self._wait, self._end = report, wait, end
        self._activity, self._group, self._offset = Activity(), CurrentGroup(), 0
        self._seen_at: float | None = None
        self._trained = False
        self._signal: Signals | None = None
        self._leaves = False
        self._decides = threading.Lock()
        """Held by the thread that ends the attempt."""
        self._thread = threading.Thread(target=self._run, name="stop", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching. If this thread is ending the attempt, wait for the end of the process."""
        self._decides.acquire()

    def _run(self) -> None:
        while not self._decides.locked():
            number = self._wait(_POLL_SECONDS)
            self._leaves |= number is Signals.SIGTERM
            self._signal = number if number is Signals.SIGINT else self._signal
            outcome = self.check()
            if outcome is not None and self._decides.acquire(blocking=False):
                try:
                    self._end(self._with_checkpoint(outcome))
                except Exception:
                    # The main thread waits for the end of the process.
                    log.exception("the attempt could not be ended properly")
                    leave(1)

    def check(self) -> Outcome | None:
        """Read the request and new events, report a new request, and return the outcome if the attempt must end."""
        stop: Stop | None = None
        with storage_may_fail(partial(_limited.warning, "stop requests cannot be read: %s")):
            if self._leaves:
                ask_to_leave(self._run_dir, self._attempt.number, reason=NOTICE)
            requested = self._run_dir.stop(attempt=self._attempt.number)
            if requested is not None:
                self._read_events()
            stop = requested
        if stop is not None and self._seen_at is None:
            self._seen_at, self._trained = time.monotonic(), self._activity.trains
            cause = {} if stop.reason is None else {"reason": stop.reason}
            self._report("stopping", mode=stop.mode, waits_for=waits_for(self._activity, stop), **cause)
        waited = 0.0 if self._seen_at is None else time.monotonic() - self._seen_at
        return end_of(self._activity, StopState(stop, self._signal, self._trained, waited))

    def _read_events(self) -> None:
        while True:
            lines, self._offset = read_lines_after(self._attempt.events, self._offset)
            if not lines:
                return
            for line in filter(self._group.keeps, lines):
                self._activity.read(line)

    def _with_checkpoint(self, outcome: Outcome) -> Outcome:
        """Fence off the workers, and return the outcome with the newest checkpoint, which is final then."""
        if outcome is self._activity.end:
            return outcome
        newest: int | None = None
        with storage_may_fail(partial(log.warning, "the newest checkpoint is unknown: %s")):
            with suppress(FencedError):
                begin_group(self._run_dir, self._attempt.number, by=uuid.uuid4().hex)
            newest = max(self._run_dir.manifests(), default=None)
        known = "there is no checkpoint" if newest is None else f"the newest checkpoint is of step {newest}"
        return outcome.model_copy(update={"reason": f"{outcome.reason}; {known}", "step": newest or 0})
