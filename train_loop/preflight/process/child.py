"""A child process that answers a request, and its limits: time, CPU, memory, answer, and files of users' code."""

import math
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_loop.preflight.process.usage import excess
from train_loop.system.memory_limit import mapped_bytes

_MIB = 1 << 20
_REMEDY = "choose a smaller config or smaller files, or have the operator raise"
NO_MEMORY = b'{"limit": "memory"}'
_MOST_OUTPUT = 16 * _MIB
"""Maximum bytes of an answer by default: users' code can write to its pipe, too."""
_LOOK_SECONDS = 0.2
"""Seconds between two looks at what users' code uses."""


@dataclass(frozen=True)
class Ended:
    """A child process that has ended: what it wrote, and how it ended."""

    found: bytes
    """Its answer; empty if it has none."""
    subject: str
    """JSON pointer of its last check."""
    limit: str | None
    """The limit that it exceeded, such as `took over 9 s`, with the remedy for checks that run no code."""
    is_late: bool
    ending: str
    """Signal or exit code."""


def run_child(
    work: Callable[[int], None],
    question: dict[str, Any],
    requester: socket.socket,
    *,
    end: float,
    folder: Path | None = None,
) -> Ended:
    """Call `work` with the pipe for its answer in a forked process, and wait for its end, at most until `end`.

    The process is killed at a limit, and if the requester disconnects. With a `folder`, it runs users' code, which may
    write files there.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _limit(question)
            work(writing)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        output, cause = _watch(_Child(child, reading, folder), question, requester, end)
    finally:
        os.close(reading)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    queued = _queued_seconds(child)
    _, status, used = os.wait4(child, 0)
    *subjects, found = output.split(b"\n")
    busy = used.ru_utime + used.ru_stime + queued
    limit = _limit_exceeded(question, status, used, found) if cause is None else cause
    is_late = limit == _LATE
    if is_late:
        limit = f"took over {question['seconds']:g} s"
        # Otherwise it has waited for storage.
        if folder is None:
            limit = f"{limit}; {_REMEDY} TRAINSHED_PREFLIGHT_SECONDS" if busy > question["seconds"] / 2 else None
    subject = subjects[-1].decode(errors="replace") if subjects else ""
    return Ended(found, subject, limit, is_late, _ending(status))


_LATE = "late"


@dataclass(frozen=True)
class _Child:
    process: int
    pipe: int
    folder: Path | None

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)


def _watch(child: _Child, question: dict[str, Any], requester: socket.socket, end: float) -> tuple[bytes, str | None]:
    """Read a child's pipe to its end. Kill the child at a limit, and return the limit; also if the requester leaves."""
    waiting, parts, most = select.poll(), list[bytes](), question.get("output_bytes", _MOST_OUTPUT)
    waiting.register(child.pipe, select.POLLIN)
    # The requester has closed its half already: only the end of both halves is reported without being asked for.
    waiting.register(requester, 0)
    look, size = 0.0, 0
    while True:
        step = _LOOK_SECONDS if child.folder else end - time.monotonic()
        ready = {descriptor for descriptor, _ in waiting.poll(max(math.ceil(min(step, 3600.0) * 1000), 0))}
        if requester.fileno() in ready:
            child.kill()
            # A process that users' code has started may hold the pipe open.
            return b"", None
        if child.pipe in ready:
            if not (part := os.read(child.pipe, 1 << 16)):
                return b"".join(parts), None
            parts.append(part)
            size += len(part)
        now = time.monotonic()
        cause = _LATE if now >= end else None
        if size > most:
            parts, cause = [], f"answered more than {most // _MIB} MiB"
        if child.folder and now >= look and cause is None:
            cause, look = excess(child.process, child.folder, question.get("memory_bytes")), now + _LOOK_SECONDS
        if cause is not None:
            child.kill()
            return b"".join(parts), cause


def _limit(question: dict[str, Any]) -> None:
    """Set the limits of this process. Its parent limits its time."""
    # If the host runs out of memory, the kernel kills a fork before the service.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # SIGXCPU would write a core dump with all of torch.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if cpu := question.get("cpu_seconds"):
        # The fork has used no CPU time yet; threads of libraries count, too.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu), math.ceil(cpu) + 1))
    if memory := question.get("memory_bytes"):
        most = mapped_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _queued_seconds(child: int) -> float:
    """Return for how long an ended child could have computed, and other processes had the processors."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{child}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _limit_exceeded(question: dict[str, Any], status: int, used: resource.struct_rusage, found: bytes) -> str | None:
    """Return the text of the limit at which the kernel has ended a child, or None."""
    killed = _by(status)
    cpu, memory = question.get("cpu_seconds"), question.get("memory_bytes")
    # Code may ignore the first signal.
    if cpu and (killed == signal.SIGXCPU or (killed == signal.SIGKILL and used.ru_utime + used.ru_stime >= cpu)):
        return f"took over {cpu:g} s of CPU time; {_REMEDY} TRAINSHED_PREFLIGHT_CPU_SECONDS"
    # Python raises MemoryError; libraries in Rust and C++ abort the process if an allocation fails.
    refused = killed in (signal.SIGABRT, signal.SIGSEGV) and used.ru_maxrss * 1024 > (memory or math.inf) / 2
    if memory and (refused or found == NO_MEMORY):
        return f"took over {memory // _MIB} MiB of memory; {_REMEDY} TRAINSHED_PREFLIGHT_MEMORY_BYTES"
    return None


def _ending(status: int) -> str:
    return f"signal {_by(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


def _by(status: int) -> int | None:
    """Return the signal that killed a process with this wait status."""
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
