"""Log file of a process, in addition to its standard output and error."""

import faulthandler
import io
import logging
import os
import re
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TextIO, cast

from train_loop.run_dir import append_regular, is_remote, make_folder, run_dir_of
from train_loop.run_dir.segments import SegmentWriter
from train_loop.system.redact import redactor

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^\((\w[\w ]* pid=\d+(?:, ip=[\w.:]+)?)\) (.*)$", re.MULTILINE)
"""Ray's prefix of lines that it forwards from other processes."""
_RAYS_FORMAT = re.compile(r"^(\d{4}-\d\d-\d\d [\d:,]+)\t([A-Z]+) (\S+) -- ", re.MULTILINE)


def plain(text: str) -> str:
    """Convert Ray's output to Trainshed's log format: no colours, level third, source process at the end."""
    text = _PREFIX.sub(r"\2 (\1)", _ANSI.sub("", text))
    return _RAYS_FORMAT.sub(r"\1 \2 ray.\3: ", text)


class _Tee:
    """A text stream that also writes to a copy; other calls go to the original stream."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream = stream
        self._copy = copy
        self._masked = redactor()

    def write(self, text: str) -> int:
        # The copy hides secrets, because many users read it. Printing must not fail if storage is unavailable.
        with suppress(OSError):
            self._copy.write(plain(self._masked(text)))
        return self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._copy.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _numberless(line: str, number: int) -> bytes:
    return f"{line}\n".encode()


class _Segments(io.TextIOBase):
    """A log on object storage, which receives whole lines up to 1 s later."""

    def __init__(self, path: Path) -> None:
        self._segments = SegmentWriter(path)
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._segments.append(partial(_numberless, line))
        return len(text)

    def flush(self) -> None:
        """Do nothing: the writer uploads lines every second."""


def open_log(path: Path) -> TextIO:
    """Open a log for appending. On a file system, a crash also writes the stacks of all threads to it."""
    if is_remote(path):
        return cast(TextIO, _Segments(path))
    make_folder(path.parent)
    file = os.fdopen(append_regular(path, below=run_dir_of(path)), "a", buffering=1)
    faulthandler.enable(file)
    return file


def log_lines_to(path: Path, *, level: int = logging.INFO) -> None:
    """Append this package's log lines to a file, but not other output of the process."""
    _attach(open_log(path), level)


def log_to(path: Path, *, level: int = logging.INFO) -> None:
    """Append log lines and output of this process to a file, and the stacks of all threads after a crash."""
    file = open_log(path)
    sys.stdout = _Tee(sys.stdout, file)
    sys.stderr = _Tee(sys.stderr, file)
    _attach(cast(TextIO, sys.stderr), level)


def _attach(stream: TextIO, level: int) -> None:
    ours = logging.getLogger("train_loop")
    ours.setLevel(level)
    # Only this handler: Ray's own handlers would write every line a second time.
    ours.propagate = False
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours.addHandler(handler)
