"""Status of an export, written to the run directory while the export runs, and the event of its end."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

from train_loop.checkpoint.export.tensors import Piece
from train_loop.run_dir import (
    ExportState,
    ExportStatus,
    ExportWish,
    JsonLines,
    RunDir,
    is_remote,
    read_all_lines,
    size_appended,
    storage_may_fail,
)

log = logging.getLogger(__name__)
_WRITE_SECONDS, _POLL_SECONDS = 5.0, 0.2
OTHER_SECONDS = 10.0
"""Time for another process to write the event of the same export on object storage."""


class Progress:
    """The progress of an export, in weights written, and its status file.

    `before` is the status that an unfinished export has left.
    """

    def __init__(self, run_dir: RunDir, step: int, wish: ExportWish, before: ExportStatus | None) -> None:
        self.total = 0
        self.difference: float | None = None
        """Largest difference of a merged model's outputs from those with adapters."""
        self._run_dir, self._step, self._wish = run_dir, step, wish
        self._completed = None if before is None else before.completed
        self._done = 0
        self._lock = threading.Lock()

    def counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield the pieces, and count their values."""
        for piece in pieces:
            yield piece
            self._done += piece.values.numel()

    def complete(self) -> None:
        """Record that all files are written. Call it before the folder gets its name."""
        self._completed = self._completed or time.time()
        self.write("running")

    def write(self, state: ExportState, reason: str | None = None) -> None:
        """Write the status."""
        with self._lock:
            self._run_dir.exports.write(self.status(state, reason))

    def status(self, state: ExportState, reason: str | None = None) -> ExportStatus:
        """Return the status at this moment."""
        return ExportStatus(
            step=self._step,
            wish=self._wish,
            state=state,
            progress=round(self._done / self.total, 4) if self.total else 0.0,
            time=time.time(),
            reason=reason,
            difference=self.difference,
            completed=self._completed,
        )


@contextmanager
def report_status(run_dir: RunDir, step: int, wish: ExportWish, before: ExportStatus | None) -> Iterator[Progress]:
    """Write the status every few seconds while the export runs, and its result and event at the end.

    `before` is the status that an unfinished export has left.
    """
    progress, ended = Progress(run_dir, step, wish, before), threading.Event()

    def keep_writing() -> None:
        while not ended.wait(_WRITE_SECONDS):
            with storage_may_fail(partial(log.warning, "the progress of the export could not be written: %s")):
                progress.write("running")

    progress.write("running")
    writer = threading.Thread(target=keep_writing, daemon=True)
    writer.start()
    try:
        yield progress
    except BaseException as error:
        _end(writer, ended)
        progress.write("failed", str(error).partition("\n")[0] or type(error).__name__)
        raise
    _end(writer, ended)
    finish(run_dir, progress.status("running"))


def finish(run_dir: RunDir, status: ExportStatus) -> None:
    """Write the event of a complete export, if it is missing, and then the last status.

    After a kill in between, another call writes the rest. Raises OSError.
    """
    own = status.completed or time.time()
    completed = own
    if is_remote(run_dir.exports.folder(status.step, status.wish)):
        # Two processes may have written the same objects: one of them writes the event.
        completed = run_dir.exports.claim(status.step, status.wish, own)
        status = status.model_copy(update={"completed": completed})
    if not (_has_event(run_dir, status) or (completed != own and _gets_event(run_dir, status))):
        _write_event(run_dir, status, completed)
    done = {"state": "done", "progress": 1.0, "time": time.time(), "reason": None, "completed": completed}
    run_dir.exports.write(status.model_copy(update=done))


def _gets_event(run_dir: RunDir, status: ExportStatus) -> bool:
    """Wait for the event of an export that another process has completed; return False if that has died before."""
    deadline = time.monotonic() + OTHER_SECONDS
    while time.monotonic() < deadline:
        if _has_event(run_dir, status):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _has_event(run_dir: RunDir, status: ExportStatus) -> bool:
    """Return whether an attempt has the event of this export; of any to this folder if its end is unknown."""
    written = chain.from_iterable(read_all_lines(attempt.events) for attempt in run_dir.attempts())
    return any(
        line.get("event") == "exported"
        and line.get("folder") == str(run_dir.exports.folder(status.step, status.wish))
        and status.completed in (None, line.get("completed"))
        for line in written
    )


def _write_event(run_dir: RunDir, status: ExportStatus, completed: float) -> None:
    """Write the event `exported` to the newest attempt that has events: one without has not begun."""
    fields = {"step": status.step} | status.wish.model_dump(exclude_none=True)
    fields |= {"difference": status.difference} if status.wish.form in ("merged", "dequantized") else {}
    fields |= {"folder": str(run_dir.exports.folder(status.step, status.wish)), "completed": completed}
    begun = [attempt for attempt in run_dir.attempts() if size_appended(attempt.events)]
    newest = [run_dir.attempt(1), *begun][-1]
    lines = JsonLines(newest.events, attempt=newest.number)
    lines.append(event="exported", **fields)
    lines.flush()


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    thread.join()
