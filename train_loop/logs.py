"""One log file for a process, beside what it prints anyway."""

import faulthandler
import logging
import sys
from pathlib import Path
from typing import TextIO


class _Tee:
    """A text stream written to two places; in all else it is the first one."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._copy.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def log_to(path: Path, *, level: int = logging.INFO) -> None:
    """Append what this process logs and prints to a file, and the stacks of all threads where it crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", buffering=1)
    faulthandler.enable(file)
    sys.stdout = _Tee(sys.stdout, file)
    sys.stderr = _Tee(sys.stderr, file)
    ours = logging.getLogger("train_loop")
    ours.setLevel(level)
    # Once, on the stream that goes to both places: Ray's own handlers would write every line a second time.
    ours.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours.addHandler(handler)
