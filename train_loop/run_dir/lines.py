"""JSON lines files that several processes append to and that survive torn writes."""

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from train_loop.run_dir.files.durable import make_folder
from train_loop.run_dir.files.regular import append_regular, open_regular, run_dir_of
from train_loop.run_dir.remote import is_remote, read_whole, size_of
from train_loop.run_dir.root import check_storage
from train_loop.run_dir.segments import SegmentWriter, segments

_WINDOW = 1 << 18
"""Number of bytes that are read at once."""
_LOCK_SECONDS = 3.0
"""Timeout in seconds of an append that waits for another writer."""
_LOCK_POLL_SECONDS = 0.01


class JsonLines:
    """An append-only file of JSON objects, each with seq, time and attempt; several processes may append.

    If a dying writer leaves a torn line, the next writer closes it with a newline, and readers skip it. `epoch` returns
    the writer's fencing epoch, or None for lines without one. On object storage, nothing is written while `may_write`
    returns False.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int,
        epoch: Callable[[], int | None] = lambda: None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.path = path
        self.attempt = attempt
        self._epoch = epoch
        self._may_write = may_write
        self._segments: SegmentWriter | None = None

    def append(self, **fields: Any) -> None:
        """Append one line. Numbers that are not finite become null, because JSON has no notation for them."""
        if is_remote(self.path):
            self._segments = self._segments or SegmentWriter(self.path, may_write=self._may_write)
            epoch = self._epoch()
            self._segments.append(lambda seq: self._line(seq, epoch, fields))
            return
        check_storage(self.path)
        if not self.path.parent.is_dir():
            make_folder(self.path.parent)
        descriptor = append_regular(self.path, below=run_dir_of(self.path))
        try:
            _lock(descriptor, seconds=_LOCK_SECONDS)
            torn, seq = _tail(descriptor)
            whole = (b"\n" if torn else b"") + self._line(seq + 1, self._epoch(), fields)
            if os.write(descriptor, whole) < len(whole):
                # The storage is full. The next append closes the torn line.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(descriptor)

    def flush(self) -> None:
        """Write all lines to object storage; on a file system they are already written. Raises OSError."""
        if self._segments is not None:
            self._segments.flush()

    def _line(self, seq: int, epoch: int | None, fields: dict[str, Any]) -> bytes:
        head = {"seq": seq, "time": time.time(), "attempt": self.attempt}
        head |= {} if epoch is None else {"epoch": epoch}
        line = json.dumps(head | {name: _finite(value) for name, value in fields.items()}, allow_nan=False)
        return line.encode() + b"\n"


class CurrentGroup:
    """A filter that drops lines of superseded worker groups from one file that is read in order.

    A line is dropped if its epoch is lower than an earlier one. Lines without an epoch are kept.
    """

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest

    def keeps(self, line: Mapping[str, Any]) -> bool:
        """Return whether to keep the next line of the file."""
        epoch = line.get("epoch")
        if not isinstance(epoch, int):
            return True
        if epoch < self.newest:
            return False
        self.newest = epoch
        return True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSON lines file in order; nothing if the file is missing.

    Drops lines of superseded worker groups.
    """
    return filter(CurrentGroup().keeps, read_all_lines(path))


def read_all_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSON lines file in order, including those of superseded worker groups."""
    if is_remote(path):
        for part in segments(path):
            yield from filter(None, map(_parse_line, read_whole(part).splitlines(keepends=True)))
    elif size_of(path, below=run_dir_of(path)) is not None:
        with open_regular(path, below=run_dir_of(path)) as file:
            yield from filter(None, map(_parse_line, file))


def read_lines_after(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return some complete lines from a byte offset on, and the offset after them.

    Returns an empty list and the same offset if no complete line follows.
    """
    length = _WINDOW
    while size_appended(path) > offset:
        window = read_appended(path, offset, length)
        whole = window[: window.rfind(b"\n") + 1]
        if whole or len(window) < length:
            return list(filter(None, map(_parse_line, whole.splitlines(keepends=True)))), offset + len(whole)
        length *= 4
    return [], offset


def size_appended(path: Path) -> int:
    """Return the size of an append-only file in bytes; 0 if it is missing."""
    if is_remote(path):
        return sum(part.stat().st_size for part in segments(path))
    return size_of(path, below=run_dir_of(path)) or 0


def read_appended(path: Path, start: int, length: int) -> bytes:
    """Return up to `length` bytes of an append-only file from `start` on."""
    if not is_remote(path):
        with open_regular(path, below=run_dir_of(path)) as file:
            file.seek(start)
            return file.read(length)
    found = bytearray()
    for part in segments(path):
        size = part.stat().st_size
        if start < size and len(found) < length:
            found += read_whole(part)[start : start + length - len(found)]
        start = max(start - size, 0)
    return bytes(found)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _lock(descriptor: int, *, seconds: float) -> None:
    """Lock a file, or continue without the lock if its holder does not release it in time.

    The holder may be a frozen process, and its successor must not wait for it. Appending without the lock is safe: the
    file is open with O_APPEND, so each line is still appended whole. A line that the holder appends later may repeat a
    seq, but has a lower epoch, so readers drop it.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return
            time.sleep(_LOCK_POLL_SECONDS)
        else:
            return


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tail(descriptor: int) -> tuple[bool, int]:
    """Return whether the file ends inside a line, and the seq of its last complete line."""
    size = os.fstat(descriptor).st_size
    window = 4096
    while True:
        start = max(size - window, 0)
        lines = os.pread(descriptor, size - start, start).splitlines(keepends=True)
        torn = bool(lines) and not lines[-1].endswith(b"\n")
        # A line that lacks only its newline becomes complete when the next append closes it, so its seq is taken.
        closed = [*lines[:-1], lines[-1] + b"\n"] if torn else lines
        whole = [value for value in map(_parse_line, closed[1 if start else 0 :]) if value]
        if whole or start == 0:
            return torn, whole[-1]["seq"] if whole else 0
        window *= 4
