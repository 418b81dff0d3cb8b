"""Access to files of data, models and tokenizers under the read policy of the job's project.

The service checks a spec's paths at submission. Drivers, tasks and ranks check each file again when they open it: a
symbolic link may have replaced it meanwhile.
"""

import errno
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from train_loop.errors import DataError
from train_loop.run_dir import READ_POLICY_VARIABLE, ReadPolicy, is_below

_LARGEST = 64 * 2**20
"""Maximum bytes of a config, an index or a template, which are read as a whole."""
_LET_READ = "let the users of service and workers read the file and its folders"
_own: list[ReadPolicy] = []
"""The policy that `limit_inputs` has set; empty if none is set."""


@contextmanager
def limit_inputs(policy: ReadPolicy) -> Iterator[None]:
    """Apply a policy to all inputs that this process opens in the body."""
    before, _own[:] = _own.copy(), [policy]
    try:
        yield
    finally:
        _own[:] = before


def current_policy() -> ReadPolicy | None:
    """Return the policy of this process; None without a service: then the user's file permissions apply."""
    if _own:
        return _own[0]
    text = os.environ.get(READ_POLICY_VARIABLE)
    return _parse(text) if text else None


@lru_cache(maxsize=4)
def _parse(text: str) -> ReadPolicy:
    return ReadPolicy.model_validate_json(text)


def open_input(path: str | Path) -> BinaryIO:
    """Open a local input file.

    Raises DataError if the policy or its permissions refuse it, or if it is not a regular file.
    """
    policy = current_policy()
    if policy is not None:
        # Check before opening, too: the error must not depend on whether a file outside the roots exists.
        _check_place(policy, os.path.realpath(path), Path(path))
    try:
        check_regular(path, os.stat(path))
        # A FIFO may have replaced the file since: without O_NONBLOCK, the open would wait for a writer.
        opened = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {_LET_READ}") from error
    try:
        check_regular(path, os.fstat(opened.fileno()))
        if policy is not None:
            _check_place(policy, _place_of(opened.fileno(), Path(path)), Path(path))
    except BaseException:
        opened.close()
        raise
    return opened


def check_regular(path: str | Path, found: os.stat_result) -> None:
    """Raise DataError for a FIFO, socket or device, IsADirectoryError for a folder; `found` is the path's status."""
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = "FIFO" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise DataError(f"{path} is a {kind}, and only regular files are read; remove it, or name other files")


def read_input(path: str | Path, *, most: int = _LARGEST) -> bytes:
    """Return the content of a local input file. Raises DataError as `open_input`, and for more than `most` bytes."""
    with open_input(path) as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise DataError(f"{path} is larger than {most >> 20} MiB, the maximum for such a file; name another file")
    return content


def descriptor_path(opened: BinaryIO, path: str | Path) -> str:
    """Return a path to an open file, for libraries that take only paths; on Linux a new link cannot redirect it."""
    return f"/proc/self/fd/{opened.fileno()}" if sys.platform == "linux" else str(path)


def stdlib_root() -> Path:
    """Return the folder of Python's standard library, which every spec may read."""
    return Path(sysconfig.get_path("stdlib")).resolve()


def _check_place(policy: ReadPolicy, place: str, path: Path) -> None:
    """Check the real path of a file. Raises DataError if the policy refuses it."""
    # Tokenizers that Trainshed trained are in the cache; links from elsewhere into the cache are refused.
    ours = any(is_below(os.path.abspath(path), cache) and is_below(place, cache) for cache in policy.caches)
    if ours or is_below(place, str(stdlib_root())):
        return
    if refusal := policy.refusal(place, named=str(path)):
        raise DataError(refusal)


def _place_of(descriptor: int, path: Path) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}") if sys.platform == "linux" else os.path.realpath(path)
