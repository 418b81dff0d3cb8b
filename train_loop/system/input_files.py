"""Access to files of data, models and tokenizers under the read policy of the job's project.

The service checks a spec's paths at submission. Drivers, tasks and ranks check each file again when they open it: a
symbolic link may have replaced it meanwhile.
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
from train_loop.run_dir import READ_POLICY_VARIABLE, ReadPolicy, is_below

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
    """Open a local input file. Raises DataError if the policy refuses it."""
    opened = open(path, "rb")  # noqa: SIM115 - the caller closes it
    policy = current_policy()
    if policy is not None:
        try:
            _check_opened(policy, opened.fileno(), Path(path))
        except BaseException:
            opened.close()
            raise
    return opened


def read_input(path: str | Path) -> bytes:
    """Return the content of a local input file. Raises DataError as `open_input`."""
    with open_input(path) as opened:
        return opened.read()


def descriptor_path(opened: BinaryIO, path: str | Path) -> str:
    """Return a path to an open file, for libraries that take only paths; on Linux a new link cannot redirect it."""
    return f"/proc/self/fd/{opened.fileno()}" if sys.platform == "linux" else str(path)


def stdlib_root() -> Path:
    """Return the folder of Python's standard library, which every spec may read."""
    return Path(sysconfig.get_path("stdlib")).resolve()


def _check_opened(policy: ReadPolicy, descriptor: int, path: Path) -> None:
    """Check the real path of an open file. Raises DataError if the policy refuses it."""
    place = _place_of(descriptor, path)
    # Tokenizers that Trainshed trained are in the cache; links from elsewhere into the cache are refused.
    ours = any(is_below(os.path.abspath(path), cache) and is_below(place, cache) for cache in policy.caches)
    if ours or is_below(place, str(stdlib_root())):
        return
    if refusal := policy.refusal(place, named=str(path)):
        raise DataError(refusal)


def _place_of(descriptor: int, path: Path) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}") if sys.platform == "linux" else os.path.realpath(path)
