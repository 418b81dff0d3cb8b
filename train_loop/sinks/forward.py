"""Threads of the driver that send the metrics of a run to its sinks."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from train_loop.errors import FencedError, UserError
from train_loop.run_dir import DEFAULT_SINKS, SINKS_VARIABLE, Outcome, RunDir, SinkName, format_sinks, parse_sinks
from train_loop.sinks.cursor import SinkCursor
from train_loop.sinks.registry import open_sink
from train_loop.system.redact import redactor

log = logging.getLogger(__name__)
_EVERY_SECONDS = 1.0
_MOST_SECONDS = 60.0
_MOST_SECONDS_AT_THE_END = 2.0
_LATE = "its timeout passed before it had all metrics; the next attempt sends the rest, or send it by hand"


class Reporter(Protocol):
    """Function that records an event, such as `EventLog.event`."""

    def __call__(self, name: str, **fields: str) -> None:
        """Record an event."""


class Forwarder:
    """A thread that sends metrics to one sink about once a second. A sink that fails is reported once and retried.

    The time between retries grows. Each sink has its own thread, so that one sink cannot block another.
    """

    def __init__(self, handover: SinkCursor, report: Reporter) -> None:
        self.name = handover.name
        self._handover = handover
        self._report = report
        self._fails = False
        self._reported = False
        self._outcome: Outcome | None = None
        self._ended, self._has_all, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {handover.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Declare the metrics complete: no more will follow."""
        self._ended.set()

    def wait(self, *, seconds: float) -> None:
        """Wait until the sink has all metrics, at most `seconds`. Returns at once if the sink is failing."""
        if not self._fails:
            self._has_all.wait(max(seconds, 0.0))

    def close(self, outcome: Outcome) -> None:
        """Close the sink with the attempt's outcome, once it has all metrics."""
        self._outcome = outcome
        self._closing.set()

    def join(self, *, seconds: float) -> None:
        """Wait until the sink is closed; report a failure after `seconds`."""
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive():
            self._fail(f"{_LATE} (python -m train_loop.sinks {self._handover.run_dir.root} --sink {self.name})")

    def _run(self) -> None:
        try:
            self._hand_over_all()
        except FencedError as error:
            log.info("%s", error)
        except UserError as error:
            # A retry cannot fix this.
            self._fail(str(error))
        self._has_all.set()
        self._closing.wait()
        try:
            self._handover.close(self._outcome)
        except Exception as error:
            self._fail(_describe(error))

    def _hand_over_all(self) -> None:
        pause = _EVERY_SECONDS
        while True:
            is_last = self._ended.is_set()
            try:
                self._handover.hand_over()
                if is_last:
                    return
                pause, self._fails = _EVERY_SECONDS, False
            except (FencedError, UserError):
                raise
            except Exception as error:
                self._fails = True
                self._handover.drop()
                if not self._reported:
                    self._reported = True
                    self._fail(_describe(error))
                pause = min(2 * pause, _MOST_SECONDS)
            if is_last:
                time.sleep(min(pause, _MOST_SECONDS_AT_THE_END))
            else:
                self._ended.wait(pause)

    def _fail(self, error: str) -> None:
        log.warning("the sink %s: %s", self.name, error)
        self._report("sink_failed", sink=self.name, error=error)


class Forwarders:
    """The forwarders of all sinks of a run, for one attempt."""

    def __init__(self, forwarders: Sequence[Forwarder]) -> None:
        self._forwarders = forwarders
        for forwarder in forwarders:
            forwarder.start()

    def catch_up(self, *, seconds: float) -> None:
        """Declare the metrics complete, and wait until the sinks have them, at most `seconds` in total."""
        until = time.monotonic() + seconds
        for forwarder in self._forwarders:
            forwarder.end()
        for forwarder in self._forwarders:
            forwarder.wait(seconds=until - time.monotonic())

    def close(self, outcome: Outcome, *, seconds: float) -> None:
        """Send the remaining metrics and close the sinks, within `seconds` in total."""
        until = time.monotonic() + seconds
        for forwarder in self._forwarders:
            forwarder.close(outcome)
        for forwarder in self._forwarders:
            forwarder.join(seconds=until - time.monotonic())


def forward(run_dir: RunDir, attempt: int, report: Reporter, environment: Mapping[str, str]) -> Forwarders:
    """Start to send the metrics of a run, up to this attempt, to the sinks that the environment names."""
    named = environment.get(SINKS_VARIABLE, format_sinks(DEFAULT_SINKS))
    sinks: tuple[SinkName, ...] = ()
    try:
        sinks = parse_sinks(named)
    except ValueError as error:
        report("sink_failed", sink=named, error=str(error))
    handovers = [SinkCursor(run_dir, name, partial(open_sink, name, run_dir), attempt=attempt) for name in sinks]
    return Forwarders([Forwarder(handover, report) for handover in handovers])


def _describe(error: Exception) -> str:
    """Return an error's type and message, with secrets masked."""
    return redactor()(f"{type(error).__name__}: {error}"[:1000])
