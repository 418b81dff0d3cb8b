"""Limits of a fork that runs users' code: no output, no further processes, and few files.

The last is Landlock: limits of the Linux kernel that a process without privileges sets for itself and cannot lift.
"""

import ctypes
import os
import resource
import stat
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import train_loop
from train_loop.preflight.fork_server import answer_pipe

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


_LARGEST_FILE = 256 * 2**20
"""Maximum bytes of a file that users' code may write."""
_ALWAYS = (
    *("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types"),
    *("/dev/urandom", "/dev/random", "/dev/zero", "/sys/devices/system", "/sys/fs/cgroup"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/filesystems"),
)
_FOR_REMOTE_STORAGE = (
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf"),
    *("/etc/host.conf", "/etc/gai.conf", "/etc/services", "~/.aws", "~/.azure", "~/.config/gcloud"),
)
_OF_PROVIDERS = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_", "REQUESTS_CA_")
"""Prefixes of variables that may name a file which clients of remote storage read."""


def confine(readable: Iterable[Path] = (), *, remote: bool = False) -> None:
    """Limit this fork before it runs users' code, which may then read Python's own files, and these and those below.

    With `remote`, it may use the network and credentials of storage. Without Landlock, it keeps its user's rights.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Users' output would fill the service's log, and a descriptor may be the connection to the service.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != answer_pipe():
            with suppress(OSError):
                os.close(descriptor)
    # A process that the code started would outlive the check. The limit does not hold for root.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
    files = [*python_files(), *readable, *(_files_of_clients() if remote else [])]
    restrict(readable=files, writable=[Path(tempfile.gettempdir()), Path(os.devnull)], network=remote)
    os.environ["HOME"] = tempfile.gettempdir()


def python_files() -> Iterator[Path]:
    """Yield the folders of Python, its libraries and this package; the working directory is not one of them."""
    yield from map(Path, _ALWAYS)
    yield from map(Path, {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()})
    here = Path(os.path.realpath("."))
    yield from (Path(place) for place in sys.path if place and not here.is_relative_to(place))
    yield Path(train_loop.__file__).parent


def _files_of_clients() -> Iterator[Path]:
    yield from (Path(place).expanduser() for place in _FOR_REMOTE_STORAGE)
    yield from (
        Path(value) for name, value in os.environ.items() if name.startswith(_OF_PROVIDERS) and value[:1] == "/"
    )


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
