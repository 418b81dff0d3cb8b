"""Servers of forks: a process that has done its imports forks others on request, and ends with its standard input.

A request is a connection to the server's socket: the standard streams, the size of a JSON object in four bytes, and
the object with `argv`, `environment` and `folder`. Each byte that follows is a signal for the forked process; the end
of the connection is SIGKILL. The server answers with the id of the process, and at its end with its exit code.
"""

import atexit
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from tests.support.hosts.namespaces import enter_namespaces_of
from train_loop.system.gc import keep_what_is_there


@cache
def fork_server(module: str) -> str:
    """Start a module that calls `serve_forks`, once in this process. Return the path of its socket."""
    foreign = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINSHED_", "RAY_"))}
    server = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**foreign, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    # Close its standard input, and wait for its end.
    atexit.register(server.__exit__, None, None, None)
    assert server.stdout is not None
    return server.stdout.readline().decode().rstrip()


def serve_forks(modules: Iterable[str]) -> dict[str, Any] | None:
    """Import modules, and fork until standard input ends.

    Return the request in each process that was forked, with the requested arguments, variables and folder.
    """
    folder = tempfile.mkdtemp(prefix="forks-")
    forks = _Forks(f"{folder}/socket")
    # Requests that come before the imports are done wait here.
    print(f"{folder}/socket", flush=True)  # noqa: T201
    for module in modules:
        import_module(module)
    keep_what_is_there()
    request = forks.serve()
    if request is None:
        shutil.rmtree(folder)
        return None
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    return request


def request_fork(connection: socket.socket, request: dict[str, Any], files: list[int]) -> None:
    """Send a request, and the process's standard streams."""
    content = json.dumps(request).encode()
    socket.send_fds(connection, [len(content).to_bytes(4, "big")], files)
    connection.sendall(content)


class _Forks:
    """A server of one thread: it forks a process for each connection, and writes its id and its exit code to it."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._ready = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        """Connections by the ids of their processes."""
        self._wakes = os.pipe2(os.O_NONBLOCK)

    def serve(self) -> dict[str, Any] | None:
        """Fork until standard input ends. Return a request in the process that was forked for it."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes[1])
        for source in (self._listener, sys.stdin, self._wakes[0]):
            self._ready.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif key.fileobj == self._wakes[0]:
                    os.read(self._wakes[0], 512)
                    self._reap()
                elif key.data in self._connections:
                    self._pass_on(self._connections[key.data], key.data)

    def _pass_on(self, connection: socket.socket, process: int) -> None:
        """Send a forked process the signal of the one that handed itself over, or SIGKILL if that one was killed."""
        received = connection.recv(1)
        with suppress(ProcessLookupError):
            os.kill(process, received[0] if received else signal.SIGKILL)
        if not received:
            self._ready.unregister(connection)

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        connection.settimeout(10)
        try:
            size, files, _, _ = socket.recv_fds(connection, 4, 3)
            with connection.makefile("rb") as reader:
                request: dict[str, Any] = json.loads(reader.read(int.from_bytes(size, "big")))
        except (TimeoutError, json.JSONDecodeError):
            # The requester was frozen or killed while it sent this.
            connection.close()
            return None
        assert threading.active_count() == 1
        requester, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        process = os.fork()
        if process:
            for file in files:
                os.close(file)
            self._connections[process] = connection
            self._ready.register(connection, selectors.EVENT_READ, process)
            with suppress(OSError):
                connection.sendall(f"{process}\n".encode())
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._ready.close()
        self._listener.close()
        for other in self._connections.values():
            other.close()
        connection.close()
        enter_namespaces_of(requester)
        # Ray kills the whole group of a lost worker.
        os.setpgid(0, 0)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return request

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                process, status = found
                connection = self._connections.pop(process)
                with suppress(KeyError):
                    self._ready.unregister(connection)
                with suppress(OSError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                connection.close()
