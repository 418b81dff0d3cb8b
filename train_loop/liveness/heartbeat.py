"""Heartbeats: UDP datagrams that report once a second that a rank is alive, and which step it is in.

A separate process sends them, because Python code in a rank can hold the interpreter for many seconds. It needs only
the standard library, starts in milliseconds, and reports the exit status of its rank.
`python heartbeat.py` is that process; a `Heartbeat` in the rank starts it.
"""

import ctypes
import fcntl
import hmac
import json
import logging
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger("train_loop.liveness.heartbeat")
INTERVAL_SECONDS = 1.0
_PLACE = struct.Struct("<qqd")
_STORAGE = struct.Struct("<dq")
MAX_BYTES = 1024
"""Maximum size of a datagram."""
_MAC_BYTES = 32
_RESPAWN_SECONDS = 1.0
_EXIT_INFO_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 2 * INTERVAL_SECONDS
"""A longer pause between two heartbeats means that this host was frozen."""
_RECENT_BEATS = 4
"""An OOM kill within this number of heartbeats explains a rank's end: a large process exits slowly."""
_GET_INFO, _INFO_EXIT, _INFO_BYTES, _EXIT_CODE_AT = 0xC040FF0B, 1 << 3, 64, 60
"""PIDFD_GET_INFO of Linux 6.15: the exit status of a process, also for others than its parent."""


class Phase(IntEnum):
    """Phases of a rank, in the order of a step."""

    START = 0
    DATA = 1
    AGREE = 2
    TRAIN = 3
    AFTER = 4
    SAVE = 5
    END = 6


class Beat(NamedTuple):
    """One heartbeat of one rank."""

    rank: int
    epoch: int
    step: int
    phase: Phase
    seconds: float
    """Seconds since the phase began."""
    stopped: bool = False
    """True if the rank's process is stopped, for example by SIGSTOP."""
    ended: bool = False
    """True if the rank's process has ended."""
    status: int | None = None
    """Wait status, if the process ended and the kernel reports it."""
    out_of_memory: bool = False
    """True if it ended when the kernel killed a process of its container or host for lack of memory."""
    storage_seconds: float = 0.0
    """Seconds for which the run's storage has failed on this rank's host."""
    storage_errno: int = 0
    """Error number of the storage failure; 0 if storage does not answer."""
    sent: float = 0.0
    """Monotonic time of the rank's host, by which a repeated or late datagram is recognised; 0 if it is not known."""


class Target(NamedTuple):
    """The receiver of heartbeats."""

    host: str
    port: int
    token: str


class Heartbeat:
    """The sender of heartbeats for this process, until `stop` or the end of the process."""

    def __init__(self, target: Target, *, rank: int, epoch: int) -> None:
        self._target, self._rank, self._epoch = target, rank, epoch
        self._memory = os.memfd_create("heartbeat")
        os.ftruncate(self._memory, _PLACE.size + _STORAGE.size)
        self._place = mmap.mmap(self._memory, _PLACE.size + _STORAGE.size)
        self._stopped = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self.mark(0, Phase.START)
        self._spawn_if_possible()
        threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True).start()

    def mark(self, step: int, phase: Phase) -> None:
        """Set the step and phase that the heartbeats report."""
        _PLACE.pack_into(self._place, 0, step, phase, time.monotonic())

    def mark_storage(self, since: float | None, errno: int = 0) -> None:
        """Set the monotonic time since which storage has failed, and its error number; `since` is None if it works."""
        _STORAGE.pack_into(self._place, _PLACE.size, since or 0.0, errno)

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._stopped.set()
        if self._child is not None and self._child.stdin is not None:
            with suppress(OSError):
                self._child.stdin.write(b"stop\n")
                self._child.stdin.close()
            self._child.wait(timeout=10)

    def _spawn(self) -> None:
        settings = {"target": self._target, "rank": self._rank, "epoch": self._epoch, "memory": self._memory}
        self._child = subprocess.Popen(
            # Without site packages, which would take most of the start time.
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            pass_fds=(self._memory,),
            start_new_session=True,
            env={},
        )
        assert self._child.stdin is not None
        # Not as an argument, which every user of the host could read.
        self._child.stdin.write(json.dumps(settings).encode() + b"\n")
        self._child.stdin.flush()

    def _keep_alive(self) -> None:
        while not self._stopped.wait(_RESPAWN_SECONDS):
            if self._child is None or self._child.poll() is not None:
                # A crash of the sender, for example an OOM kill, must not look like the loss of this rank.
                self._spawn_if_possible()

    def _spawn_if_possible(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            log.warning("heartbeats cannot be sent now: %s", error)


_started: list[Heartbeat] = []
"""Heartbeat of this process, if any."""


def start(target: Target, *, rank: int, epoch: int) -> None:
    """Start heartbeats for this process."""
    _started.append(Heartbeat(target, rank=rank, epoch=epoch))


def mark(step: int, phase: Phase) -> None:
    """Set step and phase in this rank's heartbeats, if any."""
    for heartbeat in _started:
        heartbeat.mark(step, phase)


def mark_storage(since: float | None, errno: int = 0) -> None:
    """Set the storage state in this rank's heartbeats, if any; `since` is None if storage works.

    An `errno` of 0 means that storage has not answered yet.
    """
    for heartbeat in _started:
        heartbeat.mark_storage(since, errno)


def encode(beat: Beat, token: str) -> bytes:
    """Return the datagram of a heartbeat: its MAC, then its fields as JSON."""
    fields = json.dumps(beat._asdict()).encode()
    return _mac(fields, token) + fields


def decode(data: bytes, token: str) -> Beat | None:
    """Return the heartbeat in a datagram; None if its MAC or format is invalid."""
    mac, fields = data[:_MAC_BYTES], data[_MAC_BYTES:]
    # Checked before parsing: every host of the network can send to this port.
    if len(data) > MAX_BYTES or not hmac.compare_digest(mac, _mac(fields, token)):
        return None
    try:
        beat = Beat(**json.loads(fields))
        return beat._replace(phase=Phase(beat.phase))
    except (ValueError, TypeError, RecursionError):
        return None


def _mac(fields: bytes, token: str) -> bytes:
    return hmac.digest(token.encode(), fields, "sha256")


class _Sender:
    """The process that sends heartbeats."""

    def __init__(self, settings: dict[str, Any], parent: int) -> None:
        self._target = Target(*settings["target"])
        self._rank, self._epoch = settings["rank"], settings["epoch"]
        self._place = mmap.mmap(settings["memory"], _PLACE.size + _STORAGE.size, prot=mmap.PROT_READ)
        self._parent = parent
        family = socket.getaddrinfo(self._target.host, self._target.port, type=socket.SOCK_DGRAM)[0][0]
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._failed_since = self._counted_at = self._failed_seconds = 0.0
        self._kills = deque[tuple[Path, int]](maxlen=_RECENT_BEATS)
        """Files with OOM kill counters, and the counts at the latest heartbeats."""

    def run(self) -> None:
        """Send heartbeats until the rank ends or stops them."""
        try:
            process = os.pidfd_open(self._parent)
        except (OSError, AttributeError):
            process = None
        ends = [sys.stdin.fileno(), *([process] if process is not None else [])]
        while True:
            ready, _, _ = select.select(ends, [], [], 0)
            if sys.stdin.fileno() in ready and os.read(sys.stdin.fileno(), 16):
                return
            if ready:
                self._report_end(process)
                return
            # The path is read each time: a process may move to another cgroup.
            counter = _kill_counter(self._parent)
            self._kills.append((counter, _oom_kills(counter)))
            self._send(stopped=_is_stopped(self._parent))
            select.select(ends, [], [], INTERVAL_SECONDS)

    def _send(self, **fields: Any) -> None:
        step, phase, since = _PLACE.unpack_from(self._place, 0)
        failed_since, errno = _STORAGE.unpack_from(self._place, _PLACE.size)
        now = time.monotonic()
        self._count(failed_since, now, stopped=bool(fields.get("stopped")))
        beat = Beat(
            self._rank,
            self._epoch,
            step,
            Phase(phase),
            max(now - since, 0.0),
            storage_seconds=self._failed_seconds,
            storage_errno=errno,
            sent=now,
            **fields,
        )
        # A failed network may work again at the next heartbeat.
        with suppress(OSError):
            self._socket.sendto(encode(beat, self._target.token), (self._target.host, self._target.port))

    def _count(self, failed_since: float, now: float, *, stopped: bool) -> None:
        """Count how long storage has failed, without the time in which the rank or its host was stopped.

        A process that is stopped during a storage check gets no answer although storage works.
        """
        passed = min(now - self._counted_at, _LONGEST_PAUSE_SECONDS)
        if failed_since != self._failed_since:
            passed = min(now - failed_since, _LONGEST_PAUSE_SECONDS)
            self._failed_seconds = 0.0
        if failed_since and not stopped:
            self._failed_seconds += max(passed, 0.0)
        self._failed_since, self._counted_at = failed_since, now

    def _report_end(self, process: int | None) -> None:
        status = _exit_status(process) if process is not None else None
        killed = status is None or status & 0x7F == signal.SIGKILL
        out_of_memory = killed and any(_oom_kills(counter) > count for counter, count in self._kills)
        for _ in range(3):
            self._send(ended=True, status=status, out_of_memory=out_of_memory)
            time.sleep(0.1)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _kill_counter(pid: int) -> Path:
    """Return the file with the OOM kill count of a process's memory cgroup (version 2 or 1), or else of the host."""
    found = [Path("/proc/vmstat")]
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                found.insert(0, Path(f"/sys/fs/cgroup/{group}/memory.events"))
            elif "memory" in controllers.split(","):
                found.insert(0, Path(f"/sys/fs/cgroup/memory/{group}/memory.oom_control"))
    return next((file for file in found if file.exists()), found[-1])


def _oom_kills(counter: Path) -> int:
    """Return the number of processes that the kernel has killed for lack of memory."""
    with suppress(OSError, ValueError):
        for line in counter.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _exit_status(process: int) -> int | None:
    """Return the wait status of an ended process; None if this kernel does not report it."""
    deadline = time.monotonic() + _EXIT_INFO_SECONDS
    while time.monotonic() < deadline:
        info = bytearray(_INFO_BYTES)
        struct.pack_into("<Q", info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(process, _GET_INFO, info)
        except OSError:
            return None
        if struct.unpack_from("<Q", info)[0] & _INFO_EXIT:
            return int(struct.unpack_from("<i", info, _EXIT_CODE_AT)[0])
        # The kernel reports it after the parent has reaped the process.
        time.sleep(0.02)
    return None


def main() -> None:
    """Send heartbeats for the parent process."""
    line = bytearray()
    while not line.endswith(b"\n"):
        # Byte by byte: what follows is read by select.
        if not (byte := os.read(sys.stdin.fileno(), 1)):
            return
        line += byte
    settings = json.loads(line)
    ctypes.CDLL(None).prctl(15, b"heartbeat", 0, 0, 0)
    _Sender(settings, os.getppid()).run()


if __name__ == "__main__":
    main()
