"""Limits of a process that runs users' code."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from train_loop.system.confine.landlock import landlock_version

SCRIPT = """
import ctypes, json, mmap, os, resource, socket, sys, tempfile, threading
from pathlib import Path
from train_loop.preflight.process.sandbox import confine

root, home, victim = Path(sys.argv[1]), Path(os.environ["TMPDIR"]), int(os.environ["VICTIM"])
if uid := int(os.environ.get("AS_UID", 0)):
    import asyncio, encodings.idna, fcntl, torch.utils.data, yaml  # this user may not read them
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
confine([root], remote=len(sys.argv) > 2)
secret, libc = root.parent / "secret", ctypes.CDLL(None, use_errno=True)

def attempt(call):
    try:
        return call() and "done"
    except Exception as error:
        return type(error).__name__

def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return True

def thread():
    one = threading.Thread(target=print)
    one.start()
    one.join()
    return True

def pair():
    one, other = socket.socketpair()
    one.send(b"x")
    return other.recv(1)

def report(*error):
    (home / "error").write_text(repr(error))

sys.excepthook = report
calls = {
    "root": lambda: (root / "rows").read_text(),
    "import": lambda: __import__("torch.utils.data") and __import__("yaml"),
    "home": lambda: (Path.home() / "a").write_text("x"),
    "temporary file": lambda: tempfile.TemporaryFile().write(b"x"),
    "thread": thread,
    "socket pair": pair,
    "event loop": lambda: __import__("asyncio").run(__import__("asyncio").sleep(0, True)),
    "own limits": lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    "write to root": lambda: (root / "rows").write_text("x"),
    "secret": lambda: secret.read_text(),
    "passwd": lambda: open("/etc/passwd").read(),
    "environment": lambda: open(f"/proc/{victim}/environ", "rb").read(),
    "signal": lambda: os.kill(victim, 0) or True,
    "tcp": lambda: socket.create_connection(("127.0.0.1", 9)),
    "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "socket in a file": lambda: socket.socket(socket.AF_UNIX).connect(str(root.parent / "socket")) or True,
    "datagram pair": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "chmod": lambda: os.chmod(secret, 0o777) or True,
    "chmod of root": lambda: os.chmod(root / "rows", 0) or True,
    "fchmod": lambda: os.fchmod(os.open(root / "rows", os.O_RDONLY), 0) or True,
    "chown": lambda: os.chown(secret, os.getuid(), -1) or True,
    "times": lambda: os.utime(secret, (0, 0)) or True,
    "attribute": lambda: os.setxattr(secret, "user.x", b"x") or True,
    "truncate": lambda: os.truncate(secret, 0) or True,
    "open and truncate": lambda: os.open(root / "rows", os.O_RDONLY | os.O_TRUNC),
    "limits": lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (5, 5)) or True,
    "limits of its own": lambda: resource.prlimit(0, resource.RLIMIT_NOFILE, (5, 5)) or True,
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, victim, 5) or True,
    "affinity": lambda: os.sched_setaffinity(victim, {0}) or True,
    "scheduler": lambda: os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)) or True,
    "shared memory": lambda: mmap.mmap(-1, 2**20),
    "memory file": lambda: os.memfd_create("x"),
    "shared zeros": lambda: os.open("/dev/zero", os.O_RDWR),
    "process": lambda: os.fork() or os._exit(0),
    "program": lambda: os.execv(sys.executable, ["python", "-c", ""]),
    "pipe size": lambda: __import__("fcntl").fcntl(os.pipe()[1], 1031, 2**20),
    "io_uring": lambda: call(425, 8, ctypes.create_string_buffer(256)),
    "pidfd": lambda: call(434, victim, 0),
    "keyring": lambda: call(250 if os.uname().machine == "x86_64" else 219, 0, -3, 0),
    "namespace": lambda: call(272 if os.uname().machine == "x86_64" else 97, 0x10000000),
    "large file": lambda: (home / "b").open("wb").truncate(2**40),
}
(home / "found.json").write_text(json.dumps({name: attempt(call) for name, call in calls.items()}))
"""
DONE = ("root", "import", "home", "temporary file", "thread", "socket pair", "event loop", "own limits")


@pytest.fixture
def victim() -> Iterator[int]:
    """Start a process of this user, which the code tries to change."""
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process.pid
        process.kill()


def confined(tmp_path: Path, victim: int, *arguments: str, uid: int = 0) -> dict[str, str]:
    """Return the results of the calls of a confined process."""
    for name in ("root", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "root" / "rows").write_text("x")
    (tmp_path / "secret").write_text("x")
    if uid:
        for place in (tmp_path, *tmp_path.rglob("*")):
            os.chown(place, uid, uid)
        # A process of pytest-xdist has a folder of its own between them.
        base = Path(tempfile.gettempdir())
        for place in (tmp_path, *(folder for folder in tmp_path.parents if base in folder.parents)):
            place.chmod(0o755)
    environment = os.environ | {"TMPDIR": str(tmp_path / "home"), "VICTIM": str(victim), "AS_UID": str(uid)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "root"), *arguments]
    ended = subprocess.run(command, env=environment, check=False)
    assert ended.returncode == 0, (tmp_path / "home" / "error").read_text()
    found: dict[str, str] = json.loads((tmp_path / "home" / "found.json").read_text())
    return found


@pytest.mark.skipif(landlock_version() < 6, reason="the kernel has no Landlock")
@pytest.mark.parametrize("uid", [0, 65534])
def test_confined_process_does_what_code_needs_and_nothing_else(tmp_path: Path, victim: int, uid: int) -> None:
    if uid and os.getuid():
        pytest.skip("only root becomes another user")
    found = confined(tmp_path, victim, uid=uid)
    assert {name for name, result in found.items() if result == "done"} == {*DONE}
    unknown = {"io_uring", "pidfd", "keyring", "namespace"}
    assert {name for name, result in found.items() if result == "OSError"} == {*unknown, "large file"}
    assert (tmp_path / "secret").read_text() == (tmp_path / "root" / "rows").read_text() == "x"
    assert os.getpriority(os.PRIO_PROCESS, victim) == 0


@pytest.mark.skipif(landlock_version() < 6, reason="the kernel has no Landlock")
def test_confined_process_with_remote_storage_has_the_network_and_no_sockets_in_files(
    tmp_path: Path, victim: int
) -> None:
    found = confined(tmp_path, victim, "remote")
    assert {name for name, result in found.items() if result == "done"} == {*DONE, "udp"}
    assert (found["tcp"], found["socket in a file"]) == ("ConnectionRefusedError", "OSError")
