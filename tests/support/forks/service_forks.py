"""Services forked from a process that has imported all of it, which takes two CPU seconds.

`python -m tests.support.forks.service_forks` serves. The services have a preflight helper that starts at once.
"""

import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from tests.support.forks.fork_server import fork_server, request_fork, serve_forks

_MODULE = "tests.support.forks.service_forks"
_SERVICE = "tests.support.servers.quick_service"


class ForkedService:
    """A running service, with the part of Popen's interface that tests use."""

    def __init__(self, environment: dict[str, str], errors: TextIO) -> None:
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading)
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(fork_server(_MODULE))
        request = {"argv": [_SERVICE], "environment": environment, "folder": str(Path.cwd())}
        with open(os.devnull) as nothing:
            request_fork(self._connection, request, [nothing.fileno(), writing, errors.fileno()])
        os.close(writing)
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        """Return the exit code; None while the service runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code at the end of the service. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(_SERVICE, timeout)
            self.returncode = int(self._answers.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the service runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL if the service runs."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "ForkedService":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(timeout=60.0)
        self.stdout.close()
        self._answers.close()
        self._connection.close()


def main() -> None:
    """Serve, and run a service in each forked process."""
    if serve_forks(["service.serve", "tests.support.servers.quick_preflight"]) is not None:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
