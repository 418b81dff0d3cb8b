"""Append-only files on object storage: numbered objects, of which the newest is rewritten while it grows.

Each process writes to separate objects, so that no process overwrites the lines of another.
"""

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from train_loop.run_dir.remote import create_object, storage_may_fail

log = logging.getLogger(__name__)
_ROLL_BYTES = 1 << 20
MakeLine = Callable[[int], bytes]
_LINES = 1_000_000
"""Line n of segment s has the number s * _LINES + n; a segment has fewer lines."""
_FLUSH_SECONDS = 1.0


class SegmentWriter:
    """A writer of a segmented file. Appended lines are on storage about a second later, or after `flush`."""

    def __init__(self, path: Path, *, may_write: Callable[[], bool] = lambda: True) -> None:
        self._path = path
        self._may_write = may_write
        self._number = 0
        self._content = bytearray()
        self._written = 0
        self._lines = 0
        self._pending: list[MakeLine] = []
        self._appending, self._flushing = threading.Lock(), threading.Lock()
        self._flusher: threading.Thread | None = None
        _writers.add(self)

    def append(self, make_line: MakeLine) -> None:
        """Queue a line; `make_line` gets the line's number. Never blocks: storage may log to this file itself."""
        with self._appending:
            self._pending.append(make_line)
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._keep_flushing, name="segments", daemon=True)
                self._flusher.start()

    def flush(self) -> None:
        """Write all queued lines to storage. Raises any storage error."""
        with self._flushing:
            if not self._pending and self._written == len(self._content):
                return
            # A superseded group never writes its lines: its process is about to exit.
            if not self._may_write():
                return
            if self._pending and self._written == len(self._content) and self._is_over():
                self._number = self._begin()
                self._content, self._written, self._lines = bytearray(), 0, 0
            with self._appending:
                taken, self._pending = self._pending, []
            for make_line in taken:
                self._lines += 1
                self._content += make_line(self._number * _LINES + self._lines)
            if self._written < len(self._content):
                segment(self._path, self._number).write_bytes(bytes(self._content))
                self._written = len(self._content)

    def _is_over(self) -> bool:
        """Return whether the next line needs a new segment: this one is full, or another process began a later one.

        Readers read segments by ascending number, and must find the line after the existing ones.
        """
        if not self._number or len(self._content) >= _ROLL_BYTES:
            return True
        return segments(self._path)[-1:] != [segment(self._path, self._number)]

    def _begin(self) -> int:
        """Create the next segment and return its number, which no other process can take."""
        number = len(segments(self._path)) + 1
        while True:
            try:
                create_object(segment(self._path, number), b"")
            except FileExistsError:
                number += 1
            else:
                return number

    def flush_if_possible(self) -> None:
        """Write all queued lines, or retry later if storage fails."""
        with storage_may_fail(partial(log.debug, "%s waits for its storage: %s", self._path)):
            self.flush()

    def _keep_flushing(self) -> None:
        pause = threading.Event()
        while not pause.wait(_FLUSH_SECONDS):
            self.flush_if_possible()


_writers: "weakref.WeakSet[SegmentWriter]" = weakref.WeakSet()


def flush_all() -> None:
    """Write all lines that this process has appended to storage, before it exits."""
    for writer in list(_writers):
        writer.flush_if_possible()


atexit.register(flush_all)


def segment(path: Path, number: int) -> Path:
    """Return the path of a file's segment by its number."""
    return path.with_name(f"{path.stem}-{number:08d}{path.suffix}")


def segments(path: Path) -> list[Path]:
    """Return the segments of a file, oldest first."""
    return sorted(path.parent.glob(f"{path.stem}-????????{path.suffix}"), key=str)
