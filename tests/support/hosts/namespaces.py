"""Linux namespaces around one idle process, and local ports that lead into them. This needs root."""

import ctypes
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import wait_for

_SET_PARENT_DEATH_SIGNAL, _CLONE_NEWNET = 1, 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Namespace:
    """An idle process and its namespaces."""

    def __init__(self, command: Sequence[str], flags: Sequence[str]) -> None:
        self.holder = subprocess.Popen(
            ["unshare", "--fork", "--kill-child=SIGKILL", *flags, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The host ends with the test, even if SIGKILL ends the test.
            preexec_fn=_die_with_parent,
        )
        self.pid = wait_for(self._child, "the first process of a namespace")

    def _child(self) -> int | None:
        file = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children")
        if not file.exists():
            raise RuntimeError(self._why_ended())
        return int(file.read_text().split()[0]) if file.read_text() else None

    def _why_ended(self) -> str:
        assert self.holder.stderr is not None
        return f"a host did not start: {self.holder.stderr.read().decode()}"

    def wait_until_ready(self) -> None:
        """Wait for the line that its first process prints. Raises RuntimeError."""
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != b"ready\n":
            raise RuntimeError(self._why_ended())

    def enter(self, *flags: str) -> list[str]:
        """Return the start of a command line that runs inside."""
        return ["nsenter", "--target", str(self.pid), *flags, "--"]

    def kill(self) -> None:
        """Kill all processes inside at once, as a power failure does; with `wait`, wait for their end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until all processes inside have ended."""
        self.holder.wait(timeout=30)
        for pipe in (self.holder.stdout, self.holder.stderr):
            if pipe is not None:
                pipe.close()


def enter_namespaces_of(pid: int) -> None:
    """Continue as a new process in the namespaces and the root of another process. Return if they are the caller's.

    The caller must have one thread. Its process stays outside, passes signals on to the new process and exits with its
    exit code.
    Raises OSError if the other process has ended.
    """
    if os.readlink("/proc/self/ns/pid") == os.readlink(f"/proc/{pid}/ns/pid"):
        return
    root = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY)
    namespaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("pid", "net", "uts", "mnt")]
    for namespace in namespaces:
        if _LIBC.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
    # A process never changes its own PID namespace, only that of its children.
    if process := os.fork():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(process, number))
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 0xFF)
    _die_with_parent()
    os.fchdir(root)
    os.chroot(".")
    for file in (root, *namespaces):
        os.close(file)


class PortForwarder:
    """Forwards a port of 127.0.0.1 in the test's own namespace to an address inside another one."""

    def __init__(self, namespace: Namespace, target: tuple[str, int]) -> None:
        self._namespace, self._target = namespace, target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        try:
            # Only this thread enters the other network; the socket stays there.
            with open(f"/proc/{self._namespace.pid}/ns/net") as namespace:
                if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            far = socket.create_connection(self._target, timeout=10)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        _relay(near, far)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _relay(near: socket.socket, far: socket.socket) -> None:
    with near, far:
        back = threading.Thread(target=_pump, args=(near, far), daemon=True)
        back.start()
        _pump(far, near)
        back.join()
