"""Events and metrics of a run in its run directory, written by the ranks and the driver."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from train_loop.errors import FencedError
from train_loop.liveness.fencing import check_fence
from train_loop.run_dir import (
    ENDED,
    AttemptDir,
    Fence,
    JsonLines,
    RunDir,
    is_remote,
    is_transient,
    read_lines,
    storage_failed,
    storage_may_fail,
)
from train_loop.system.limited_log import LimitedLog

log = logging.getLogger(__name__)
_limited = LimitedLog(log)
_RETRY_SECONDS = 1.0
_MOST_LATE = 100_000
"""Maximum number of lines that wait for storage; beyond it, the oldest are dropped."""


class EventLog:
    """Writer of an attempt's events.jsonl and metrics.jsonl. Every rank has a log, and most lines come from rank 0.

    Failed storage does not end a run: lines are queued, and a thread writes them once storage is back. `epoch` returns
    the fencing epoch of the lines; `check` raises FencedError before a line is written if a newer group has taken over.
    """

    def __init__(
        self,
        attempt: AttemptDir,
        *,
        rank: int = 0,
        epoch: Callable[[], int | None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        may_write = partial(_passes, check)
        self._events, self._metrics = (
            JsonLines(path, attempt=attempt.number, epoch=epoch, may_write=may_write)
            for path in (attempt.events, attempt.metrics)
        )
        self._check = check
        # On object storage an append only buffers; a flush writes the lines.
        self._checks_appends = not is_remote(attempt.events)
        self._speaks = rank == 0
        self._root = str(attempt.run_dir)
        # The training loop and the save thread both write.
        self._lock = threading.RLock()
        self._late: deque[tuple[JsonLines, dict[str, Any]]] = deque(maxlen=_MOST_LATE)
        self._away = False
        self._retrier: threading.Thread | None = None

    def event(self, name: str, **fields: Any) -> None:
        """Write an event on rank 0, and nothing on other ranks. It does not raise if storage fails."""
        if self._speaks:
            self.event_of_any_rank(name, **fields)

    def event_of_any_rank(self, name: str, **fields: Any) -> None:
        """Write an event of this rank, which need not be rank 0. It does not raise if storage fails."""
        # Flush events at once; metrics are batched.
        self._write_or_queue(self._events, flush=True, event=name, **fields)

    def warn(self, message: str) -> None:
        """Write a warning event for the user on rank 0, and log it."""
        if self._speaks:
            log.warning(message)
            self.event("warning", message=message)

    def metrics(self, **fields: Any) -> None:
        """Write the metrics of an optimizer step on rank 0. It does not raise if storage fails."""
        if self._speaks:
            self._write_or_queue(self._metrics, flush=False, **fields)

    @property
    def waits(self) -> bool:
        """Return whether lines wait for storage."""
        return bool(self._late)

    def flush(self) -> None:
        """Write and flush all queued lines. Raises storage errors."""
        with self._lock:
            self._write(flush=True)

    def _write_or_queue(self, lines: JsonLines, *, flush: bool, **fields: Any) -> None:
        if self._retrier is not None:
            # The retry thread may hold the lock until storage answers. Training must not wait for it.
            self._queue(lines, **fields)
            return
        with self._lock:
            self._queue(lines, **fields)
            self._write_if_possible(flush=flush)

    def _queue(self, lines: JsonLines, **fields: Any) -> None:
        self._late.append((lines, {"time": time.time()} | fields))

    def _write(self, *, flush: bool) -> None:
        self._append_all()
        if flush or self._away:
            if not self._checks_appends:
                self._check()
            for lines in (self._events, self._metrics):
                lines.flush()
        if self._away:
            self._away = False
            log.warning("storage is available again: %s", self._root)
            self._queue(self._events, event="storage_available", root=self._root)
            self._append_all()

    def _append_all(self) -> None:
        if self._checks_appends:
            self._check()
        while self._late:
            lines, fields = self._late[0]
            try:
                lines.append(**fields)
            except Exception as error:
                if not storage_failed(error):
                    # Drop an invalid line, so that it does not block the others.
                    self._late.popleft()
                raise
            self._late.popleft()

    def _write_if_possible(self, *, flush: bool = False) -> bool:
        """Return whether all lines are written."""
        failed = list[Exception]()
        with self._lock, storage_may_fail(failed.append):
            self._write(flush=flush)
        for error in failed:
            self._failed(error)
        return not failed

    def _failed(self, error: Exception) -> None:
        """Report unavailable storage once, and start the retry thread."""
        if not self._away and is_transient(error):
            self._away = True
            log.warning("storage is unavailable; events and metrics are queued: %s", error)
            self._queue(self._events, event="storage_unavailable", root=self._root, since=time.time(), error=str(error))
        else:
            _limited.warning("events and metrics are queued until storage works: %s", error)
        if self._retrier is None:
            self._retrier = threading.Thread(target=self._retry, name="journal", daemon=True)
            self._retrier.start()

    def _retry(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_RETRY_SECONDS)
            with self._lock:
                try:
                    done = self._is_superseded() or self._write_if_possible()
                except Exception as error:
                    # The invalid line is dropped; the next retry writes the others.
                    log.warning("a line of the run could not be written: %s", error)
                    done = False
                if done:
                    self._retrier = None
                    return

    def _is_superseded(self) -> bool:
        """Return whether a newer group has taken over; if so, drop the queued lines."""
        superseded = False
        with storage_may_fail(lambda _: None):
            superseded = not _passes(self._check)
        if superseded:
            self._late.clear()
        return superseded


def group_journal(run_dir: RunDir, token: Fence, *, rank: int = 0) -> EventLog:
    """Return the journal of a rank, which writes nothing after a newer worker group has taken over."""
    check = partial(check_fence, run_dir, token)
    return EventLog(run_dir.attempt(token.attempt), rank=rank, epoch=lambda: token.epoch, check=check)


def _passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except FencedError:
        return False
    return True


def last_word(attempt: AttemptDir) -> dict[str, Any] | None:
    """Return the first event that ended training; None without one. A move does not end training."""
    return next((end for end in _ends(attempt) if end.get("result") != "moved"), None)


def moves(attempt: AttemptDir) -> int:
    """Return the number of groups of the attempt that stopped to move to other hosts."""
    return sum(end.get("result") == "moved" for end in _ends(attempt))


def last_loss(attempt: AttemptDir) -> dict[str, Any] | None:
    """Return the newest event that reports lost ranks; None if there is none."""
    return _newest(attempt, "workers_lost")


def newest_hosts(attempt: AttemptDir) -> dict[str, str]:
    """Return the host of each rank of the newest group, by rank as text."""
    return dict((_newest(attempt, "group_started") or {}).get("hosts", {}))


def _newest(attempt: AttemptDir, name: str) -> dict[str, Any] | None:
    found = [line for line in read_lines(attempt.events) if line.get("event") == name]
    return found[-1] if found else None


def preempted_ranks(attempt: AttemptDir) -> list[int]:
    """Return the ranks that the newest preemption notice names; an empty list without a notice."""
    return list((_newest(attempt, "preemption_notice") or {}).get("ranks", []))


def read_attempts(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    """Return the events of all attempts of a run, the oldest first."""
    return (line for attempt in run_dir.attempts() for line in read_lines(attempt.events))


def _ends(attempt: AttemptDir) -> list[dict[str, Any]]:
    return [line for line in read_lines(attempt.events) if line.get("event") in ENDED]
