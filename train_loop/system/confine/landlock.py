"""Landlock: limits on files of the Linux kernel, which a process without privileges sets for itself and cannot lift."""

import ctypes
import os
import resource
import stat
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import train_loop

T = TypeVar("T")

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls, with the same numbers on all 64-bit architectures."""
_VERSION, _BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38
_EXECUTE, _WRITE, _READ, _READ_FOLDER = 1, 2, 4, 8
_OF_FILES = 0b1100000000000111
"""Rights that a rule may name for a single file."""
_FILES = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights on files that each version of Landlock adds up to."""
_TCP, _SCOPES = 0b11, 0b11
"""Rights to bind and connect TCP (version 4); limits of signals and abstract sockets (version 6)."""
_ALWAYS = (
    *("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types"),
    *("/dev/urandom", "/dev/random", "/sys/devices/system", "/sys/fs/cgroup"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/filesystems"),
)


def run_restricted(work: Callable[[], T], *, readable: Iterable[Path]) -> T:
    """Return the result of `work`, which a new thread calls that can read only Python's own files and those below.

    The thread writes no files and has no TCP. Without Landlock, it has the rights of its process.
    """
    if resource.getrlimit(resource.RLIMIT_NPROC)[0] == 0:
        # A process that may start no thread is itself confined.
        return work()

    def restricted() -> T:
        restrict(readable=[*python_files(), *readable], writable=[Path(os.devnull)], network=False)
        return work()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(restricted).result()


def python_files() -> Iterator[Path]:
    """Yield the folders of Python, its libraries and this package; the working directory is not one of them."""
    yield from map(Path, _ALWAYS)
    yield from map(Path, {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()})
    here = Path(os.path.realpath("."))
    yield from (Path(place) for place in sys.path if place and not here.is_relative_to(place))
    yield Path(train_loop.__file__).parent


def restrict(*, readable: Iterable[Path], writable: Iterable[Path], network: bool) -> bool:
    """Take all files from this thread and its children but these and those below them; also TCP without `network`.

    They also cannot trace, signal, or read the environment of other processes. Returns False, without limits, if the
    kernel has no Landlock.
    """
    version = landlock_version()
    if version < 1:
        return False
    kernel = ctypes.CDLL(None)
    rights = (1 << max(count for least, count in _FILES.items() if least <= version)) - 1
    limits = [rights, _TCP if version >= 4 and not network else 0, _SCOPES if version >= 6 else 0]
    attributes = struct.pack("QQQ", *limits)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = kernel.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    try:
        for path in readable:
            _allow(kernel, rules, path, _EXECUTE | _READ | _READ_FOLDER)
        for path in writable:
            _allow(kernel, rules, path, rights)
        no_new_privileges = kernel.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(no_new_privileges == 0 and kernel.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def landlock_version() -> int:
    """Return the version of Landlock in the kernel; 0 or less without it."""
    return int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION))


def _allow(kernel: ctypes.CDLL, rules: int, path: Path, rights: int) -> None:
    """Add a rule; paths that do not exist need none."""
    with suppress(OSError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            allowed = rights if stat.S_ISDIR(os.fstat(place).st_mode) else rights & _OF_FILES
            kernel.syscall(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", allowed, place), 0)
        finally:
            os.close(place)
