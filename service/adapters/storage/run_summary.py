"""Summary of a run's progress and faults, updated from the new lines of its run directory only."""

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from service.domain.jobs.condition import Conditions, hosts_of
from service.domain.runs.json_lines import Line, number, parse
from service.ports import EMPTY_SUMMARY, LogChunk, LogOffset, LogSource, Loss, Progress, Reading, RunSummary
from train_loop.run_dir import STARTED, CurrentGroup, RunDir

_RECENT = 50
"""Number of newest steps from whose times the remaining time is estimated."""
Read = Callable[[LogSource, LogOffset], LogChunk]
"""Function that reads the next lines of one of a run's files, from a position."""
_EVENTS, _METRICS = LogSource("events"), LogSource("metrics")


class RunSummaryReader:
    """The reader that keeps the summary of one run up to date. Threads may share it."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._places = {kind: LogOffset() for kind in (_EVENTS, _METRICS)}
        self._groups = {kind: CurrentGroup() for kind in (_EVENTS, _METRICS)}
        self._unapplied: list[Line] = []
        """Lines that were read but are not yet part of the summary."""
        self._lock = threading.Lock()
        self._summary = EMPTY_SUMMARY
        self.last = Reading(EMPTY_SUMMARY, None)
        """Newest summary that was read. It is available while another thread reads."""
        self._starts = 0
        self._attempt = 0
        self._of: int | None = None
        self._best, self._best_time = 0, 0.0
        self._fault = self._lost = self._stops = self._planned = False
        self._conditions = Conditions()
        self._recent = deque[float](maxlen=_RECENT)

    def update(self, read: Read, *, now: float) -> RunSummary:
        """Read the new lines, and return the updated summary."""
        with self._lock:
            for line in self._next(read):
                if "event" not in line:
                    self._step(line)
                    continue
                if line["event"] in STARTED:
                    self._begin(line)
                elif line["event"] == "workers_lost":
                    self._lose(line)
                elif line["event"] in ("stopping", "moving"):
                    self._stops, self._planned = True, self._planned or "reason" in line
                elif line["event"] == "checkpoint_committed":
                    self._summary = replace(self._summary, checkpoint_at=number(line, "time"))
                self._conditions.read(line)
                if (hosts := hosts_of(line)) is not None:
                    self._summary = replace(self._summary, hosts=tuple(dict.fromkeys(hosts.values())))
                if line["event"] == "preemption_notice":
                    self._summary = replace(self._summary, draining=dict(self._conditions.draining))
            self.last = Reading(self._summary, now)
            return self._summary

    def _next(self, read: Read) -> list[Line]:
        """Return the new lines of both files in the order in which they were written.

        Workers write between the reads. Events are therefore read again after the metrics: each step follows the events
        that precede it. Events after the newest step wait for the next call, because steps before them may be unread.
        """
        # If a read fails, the lines of earlier reads are kept for the next call.
        for kind in (_EVENTS, _METRICS):
            self._unapplied.extend(self._new_lines(read, kind))
        newest = max((_order(line) for line in self._unapplied if "event" not in line), default=None)
        later = list[Line]()
        if newest is not None:
            certain = len(self._unapplied)
            self._unapplied.extend(self._new_lines(read, _EVENTS))
            later = [line for line in self._unapplied[certain:] if _order(line) > newest]
            self._unapplied[certain:] = [line for line in self._unapplied[certain:] if _order(line) <= newest]
        ready, self._unapplied = sorted(self._unapplied, key=_order), later
        return ready

    def _new_lines(self, read: Read, kind: LogSource) -> Iterator[Line]:
        while True:
            tail = read(kind, self._places[kind])
            if not tail.entries:
                if tail.next_attempt is None:
                    return
                self._places[kind], self._groups[kind] = LogOffset(tail.next_attempt), CurrentGroup()
                continue
            for entry in tail.entries:
                # Lines of superseded worker groups count neither as progress nor as restarts.
                if (line := parse(entry.text)) is not None and self._groups[kind].keeps(line):
                    yield line
            self._places[kind] = tail.entries[-1].after

    def _begin(self, line: Line) -> None:
        """Record that the ranks' work starts, for the first time or again."""
        attempt, replayed = int(number(line, "attempt") or 0), int(number(line, "replayed") or 0)
        self._starts += 1
        self._of = int(number(line, "steps") or 0) or self._of
        if self._starts == 1:
            # Steps before the start of a clone are another job's work.
            self._best = int(number(line, "resumed_from") or 0)
        fault = self._starts > 1 and not self._ended_on_request(attempt)
        self._fault |= fault
        self._attempt, self._lost, self._stops, self._planned = attempt, False, False, False
        self._recent.clear()
        summary = self._summary
        restarts, lost_steps = summary.restarts + fault, summary.lost_steps + replayed
        # Rates of an earlier start end with it.
        done = summary.progress and replace(summary.progress, tokens_per_second=None, mfu=None, eta_seconds=None)
        self._summary = replace(summary, restarts=restarts, lost_steps=lost_steps, progress=done)

    def _ended_on_request(self, attempt: int) -> bool:
        """Return whether the previous training was stopped on request or moved to other hosts, not ended by a fault."""
        if self._lost:
            return False
        if self._stops:
            return True
        if attempt == self._attempt:
            return False
        # Drivers of older versions write no event when they are asked to stop.
        outcome = self._run_dir.attempt(self._attempt).outcome()
        return outcome is not None and outcome.result in ("paused", "resized", "moved")

    def _lose(self, line: Line) -> None:
        """Record a loss of workers, and of their hosts if the event names any."""
        if self._planned:
            # The cluster ends, and some hosts may end before the head: that is not a fault.
            self._summary = replace(self._summary, hosts=())
            return
        self._lost = True
        hosts = line.get("hosts")
        names = [str(host) for host in hosts] if isinstance(hosts, list) else []
        message = str(line.get("error", "workers were lost"))
        losses = dict(self._summary.losses) | dict.fromkeys(names, Loss(number(line, "time") or 0.0, message))
        self._summary = replace(self._summary, hosts=(), losses=losses)

    def _step(self, line: Line) -> None:
        step, seconds = int(number(line, "step") or 0), number(line, "step_seconds")
        time = number(line, "time") or 0.0
        if seconds is not None:
            self._recent.append(seconds)
        summary = replace(self._summary, progress=self._progress(line, step))
        if step > self._best:
            spent = (step - self._best) * (seconds or 0.0)
            lost = max(time - self._best_time - spent, 0.0) if self._fault and self._best_time else 0.0
            summary = replace(
                summary,
                productive_seconds=summary.productive_seconds + spent,
                lost_seconds=summary.lost_seconds + lost,
            )
            self._best, self._best_time, self._fault = step, time, False
        self._summary = summary

    def _progress(self, line: Line, step: int) -> Progress:
        # If tokens limit the run, its number of steps is an estimate, which the run may exceed.
        of = self._of and max(self._of, step)
        usual = statistics.median(self._recent) if self._recent else None
        eta = usual * max(of - step, 0) if of and usual is not None else None
        loss, speed, mfu = (number(line, name) for name in ("loss", "tokens_per_second", "mfu"))
        seconds, waited = number(line, "step_seconds"), number(line, "data_wait_seconds")
        data_wait = min(waited / seconds, 1.0) if seconds and waited is not None else None
        return Progress(step, of, loss, speed, mfu, eta, number(line, "time"), usual, data_wait)


def _order(line: Line) -> tuple[float, float]:
    """Return the sort key of a line: its attempt and time."""
    return number(line, "attempt") or 0, number(line, "time") or 0
