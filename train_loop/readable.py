"""Opening data, models and tokenizers: only what the project of the job may read.

The service checks a spec when it is submitted. Drivers, tasks and ranks check again where they open a file, because a
link may have taken its place since.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from train_loop.errors import DataError
from train_loop.run_dir import READABLE_VARIABLE, Readable, is_below

_own: list[Readable] = []
"""What this process was told to obey, if it was."""


@contextmanager
def only(readable: Readable) -> Iterator[None]:
    """Let this process open no other input while the body runs."""
    before, _own[:] = _own.copy(), [readable]
    try:
        yield
    finally:
        _own[:] = before


def own_readable() -> Readable | None:
    """Return what this process may read; None without a service, where the user's own rights decide."""
    if _own:
        return _own[0]
    told = os.environ.get(READABLE_VARIABLE)
    return _parse(told) if told else None


@lru_cache(maxsize=4)
def _parse(told: str) -> Readable:
    return Readable.model_validate_json(told)


def open_input(path: str | Path) -> BinaryIO:
    """Open a local file of data, model or tokenizer. Raises DataError for one that this process may not read."""
    opened = open(path, "rb")  # noqa: SIM115 - the caller closes it
    readable = own_readable()
    if readable is not None:
        try:
            _check_opened(readable, opened.fileno(), Path(path))
        except BaseException:
            opened.close()
            raise
    return opened


def read_input(path: str | Path) -> bytes:
    """Return all of a local file of data, model or tokenizer. Raises DataError as `open_input`."""
    with open_input(path) as opened:
        return opened.read()


def descriptor_path(opened: BinaryIO, path: str | Path) -> str:
    """Return a path to an opened file for libraries that only take paths: on Linux another link cannot change it."""
    return f"/proc/self/fd/{opened.fileno()}" if sys.platform == "linux" else str(path)


def stdlib_root() -> Path:
    """Return the folder of Python's standard library, whose sources any spec may read."""
    return Path(sysconfig.get_path("stdlib")).resolve()


def _check_opened(readable: Readable, descriptor: int, path: Path) -> None:
    """Check the file that was opened, whatever its path leads to by now. Raises DataError."""
    place = _place_of(descriptor, path)
    # Our own tokenizers lie in the cache. A link of somebody else's that leads there does not.
    ours = any(is_below(os.path.abspath(path), cache) and is_below(place, cache) for cache in readable.caches)
    if ours or is_below(place, str(stdlib_root())):
        return
    if refusal := readable.refusal(place, named=str(path)):
        raise DataError(refusal)


def _place_of(descriptor: int, path: Path) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}") if sys.platform == "linux" else os.path.realpath(path)
