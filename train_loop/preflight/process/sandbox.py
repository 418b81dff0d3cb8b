"""Limits of a fork that runs users' code: no output, no further processes, few files and few system calls.

The last two are Landlock and seccomp: limits of the Linux kernel that a process without privileges sets for itself and
cannot lift. Its parent limits its time, its disk space and its threads.
"""

import os
import resource
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from train_loop.preflight.process.fork_server import answer_pipe
from train_loop.preflight.process.usage import LARGEST_FILE
from train_loop.system.confine.landlock import python_files, restrict
from train_loop.system.confine.seccomp import refuse_calls

_MOST_FILES = 1024
"""Maximum open files; each pipe among them takes 64 KiB of the kernel's memory."""
_FOR_REMOTE_STORAGE = (
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf"),
    *("/etc/host.conf", "/etc/gai.conf", "/etc/services", "~/.aws", "~/.azure", "~/.config/gcloud"),
)
_OF_PROVIDERS = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_", "REQUESTS_CA_")
"""Prefixes of variables that may name a file which clients of remote storage read."""


def confine(readable: Iterable[Path] = (), *, remote: bool = False) -> None:
    """Limit this fork before it runs users' code, which may then read Python's own files, and these and those below.

    With `remote`, it may use the network and credentials of storage. Without Landlock and seccomp, it keeps its
    user's rights.
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
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    most = min(_MOST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files = [*python_files(), *readable, *(_files_of_clients() if remote else [])]
    restrict(readable=files, writable=[Path(tempfile.gettempdir()), Path(os.devnull)], network=remote)
    os.environ["HOME"] = tempfile.gettempdir()
    if not refuse_calls(network=remote):
        # A process that the code started would outlive the check. The limit does not hold for root.
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _files_of_clients() -> Iterator[Path]:
    yield from (Path(place).expanduser() for place in _FOR_REMOTE_STORAGE)
    yield from (
        Path(value) for name, value in os.environ.items() if name.startswith(_OF_PROVIDERS) and value[:1] == "/"
    )
