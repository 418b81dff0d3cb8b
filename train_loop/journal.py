"""What a run tells the world: events and metrics in the run directory, written by rank 0 or the driver."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from train_loop.errors import FencedError
from train_loop.fencing import check_fence
from train_loop.run_dir import AttemptDir, Fence, JsonLines, RunDir, is_remote, read_lines, storage_may_fail

log = logging.getLogger(__name__)
_MOST_LATE = 100_000
"""Lines that wait for storage to come back; a run that goes on longer without any loses the oldest."""


class Journal:
    """events.jsonl and metrics.jsonl of an attempt; silent on every rank but 0.

    Storage that fails ends no run: its lines are written, in order, with the first that can be. `epoch` returns the
    fencing epoch of the lines; `check` raises FencedError before a line is written if a newer group has taken over.
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
            _Patient(JsonLines(path, attempt=attempt.number, epoch=epoch, may_write=may_write), check)
            for path in (attempt.events, attempt.metrics)
        )
        self._speaks = rank == 0

    def event(self, name: str, **fields: Any) -> None:
        """Say that something happened."""
        if self._speaks:
            self._events.append(event=name, **fields)
            # Whoever waits for events should not wait for more; steps come by the dozen.
            self._events.flush_if_possible()

    def warn(self, message: str) -> None:
        """Say, in the log too, what the user should know although the run goes on."""
        if self._speaks:
            log.warning(message)
            self.event("warning", message=message)

    def metrics(self, **fields: Any) -> None:
        """Write one optimizer step's numbers."""
        if self._speaks:
            self._metrics.append(**fields)

    def flush(self) -> None:
        """Have all that was said on storage; on file systems it is. Raises what storage raises."""
        for lines in (self._events, self._metrics):
            lines.flush()


def group_journal(run_dir: RunDir, token: Fence, *, rank: int = 0) -> Journal:
    """Return the journal of a rank of a worker group: nothing is written once a newer group has taken over."""
    check = partial(check_fence, run_dir, token)
    return Journal(run_dir.attempt(token.attempt), rank=rank, epoch=lambda: token.epoch, check=check)


def _passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except FencedError:
        return False
    return True


def last_word(attempt: AttemptDir) -> dict[str, Any] | None:
    """Return how training ended, by the first group that ended it; None if none did. A move does not end it."""
    return next((end for end in _ends(attempt) if end.get("result") != "moved"), None)


def has_moved(attempt: AttemptDir) -> bool:
    """Return whether the newest group that stopped did so to move to other hosts."""
    ends = _ends(attempt)
    return bool(ends) and ends[-1].get("result") == "moved"


def _ends(attempt: AttemptDir) -> list[dict[str, Any]]:
    return [line for line in read_lines(attempt.events) if line.get("event") == "training_ended"]


class _Patient:
    """Lines of which those that cannot be written wait for the next."""

    def __init__(self, lines: JsonLines, check: Callable[[], None]) -> None:
        self._lines = lines
        self._check = check
        # On object storage an append waits for nothing, and lines are written when they are flushed.
        self._checks_appends = not is_remote(lines.path)
        self._late: deque[dict[str, Any]] = deque(maxlen=_MOST_LATE)
        # The loop and the thread that saves both write.
        self._lock = threading.Lock()

    def append(self, **fields: Any) -> None:
        """Add a line, after those that wait."""
        with self._lock:
            self._late.append({"time": time.time()} | fields)
            with storage_may_fail(self._warn):
                if self._checks_appends:
                    self._check()
                while self._late:
                    self._lines.append(**self._late[0])
                    self._late.popleft()

    def flush(self) -> None:
        """Write them to storage; on file systems they are there. Raises FencedError."""
        if not self._checks_appends:
            self._check()
        self._lines.flush()

    def flush_if_possible(self) -> None:
        """The same, or later where storage fails."""
        with storage_may_fail(self._warn):
            self.flush()

    def _warn(self, error: Exception) -> None:
        # Of many lines that wait, the first is the news.
        if len(self._late) <= 1:
            log.warning("%s cannot be written to, and its lines wait: %s", self._lines.path, error)
