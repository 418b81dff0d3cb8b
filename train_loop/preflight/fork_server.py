"""A fork server: a helper process with all imports that forks for each request, with time, CPU and memory limits."""

import json
import math
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from socketserver import ForkingMixIn, StreamRequestHandler, UnixStreamServer
from typing import Any

from train_loop.run_dir import StorageUnavailable
from train_loop.system.memory_limit import mapped_bytes

Answer = Callable[[dict[str, Any]], object]
_MIB = 1 << 20
_REMEDY = "choose a smaller config or smaller files, or have the operator raise"
_NO_MEMORY = b'{"limit": "memory"}'
_MOST_OUTPUT = 16 * _MIB
"""Maximum bytes of an answer by default: users' code can write to its pipe, too."""
_CODE = "/code"
"""Beginning of the pointers of checks that run users' code."""
_answer_pipe = -1
"""Descriptor to which a fork writes its answer."""
_subject: Callable[[str], None] = lambda pointer: None  # noqa: E731 - each fork replaces it

# pathlib raises RuntimeError for symlink loops; parsers of nested text raise its subclass RecursionError.
MISTAKES = (ValueError, OSError, RuntimeError)
"""Errors that users may cause; `message_of` raises those that they do not."""


def set_pointer(pointer: str) -> None:
    """Set the JSON pointer of the current check, at which the helper reports an exceeded limit."""
    _subject(pointer)


def answer_pipe() -> int:
    """Return the descriptor to which this fork writes its answer."""
    return _answer_pipe


def serve(path: str, answer: Answer) -> None:
    """Answer each request in a forked process until standard input closes: then the parent process has exited.

    An answer is JSON, or its bytes. A request's `seconds` limit its time. Optional `cpu_seconds` and `memory_bytes`
    limit its CPU time and its memory beyond the helper's; `output_bytes` limits its answer [16 MiB]. A request that
    exceeds a limit is answered with a problem at the pointer of its current check. A request ends when its requester
    disconnects. Its temporary files are removed however it ends.
    """

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            if (question := _read_question(self.rfile)) is not None:
                # A killed process does not remove its temporary files, so this one does.
                with tempfile.TemporaryDirectory(prefix="trainshed-", ignore_cleanup_errors=True) as folder:
                    found = _watched(question, answer, self.connection, folder)
                # The requester may have stopped waiting.
                with suppress(ConnectionError):
                    self.wfile.write(found)

    with Server(path, Handler) as server:
        threading.Thread(target=_leave_with_stdin, args=(Path(path),), daemon=True).start()
        server.serve_forever()


class Server(ForkingMixIn, UnixStreamServer):
    """A server that forks for each request."""


def _read_question(connection: BufferedIOBase) -> dict[str, Any] | None:
    """Return the question of a requester; None if it was killed before it had sent all of it."""
    try:
        question = json.load(connection)
    except (ConnectionError, ValueError, RecursionError):
        return None
    return question if isinstance(question, dict) else None


def _watched(question: dict[str, Any], answer: Answer, requester: socket.socket, folder: str) -> bytes:
    """Answer in a child process. Return its answer, the limit that it exceeded, or nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            tempfile.tempdir = os.environ["TMPDIR"] = folder
            _answer(question, answer, writing)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        most = question.get("output_bytes", _MOST_OUTPUT)
        *subjects, found = _read(reading, requester, lambda: os.kill(child, signal.SIGKILL), most).split(b"\n")
    finally:
        os.close(reading)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    queued = _queued_seconds(child)
    _, status, used = os.wait4(child, 0)
    subject = subjects[-1].decode() if subjects else ""
    limit = _limit_exceeded(question, status, used, queued, found)
    if limit is None and not found and subject.startswith(_CODE):
        late = _by(status) == signal.SIGALRM
        end = f"took over {question['seconds']:g} s" if late else f"was ended by the code ({_ending(status)})"
        limit = f"{end}; correct the code"
    if limit is not None:
        return json.dumps(_exceeded(subject, limit)).encode()
    return json.dumps({"failed": _timed_out(question, subject)}).encode() if _by(status) == signal.SIGALRM else found


def _read(pipe: int, requester: socket.socket, end: Callable[[], None], most: int) -> bytes:
    """Read a pipe to its end, and call `end` if the requester disconnects before, or for more than `most` bytes."""
    waiting, parts, size = select.poll(), list[bytes](), 0
    waiting.register(pipe, select.POLLIN)
    # The requester has closed its half already: only the end of both halves is reported without being asked for.
    waiting.register(requester, 0)
    while True:
        ready = {descriptor for descriptor, _ in waiting.poll()}
        if requester.fileno() in ready:
            end()
            # A process that users' code has started may hold the pipe open.
            return b""
        if pipe in ready:
            if not (part := os.read(pipe, 1 << 16)):
                return b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > most:
                end()
                return b""


def _answer(question: dict[str, Any], answer: Answer, writing: int) -> None:
    global _subject, _answer_pipe
    _answer_pipe = writing
    _subject = lambda pointer: _write(writing, f"{pointer}\n".encode())  # noqa: E731
    _limit(question)
    try:
        value = answer(question)
        found = value if isinstance(value, bytes) else json.dumps(value).encode()
    except BaseException as error:  # also a panic of Rust code, which Exception does not include
        if lacks_memory(error):
            found = _NO_MEMORY
        else:
            traceback.print_exc()
            found = json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode()
    _write(writing, found)


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is a failed memory allocation."""
    seen = set[int]()
    # Causes can form a loop: code may raise an error from itself.
    while error is not None and id(error) not in seen:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error) or "bad_alloc" in str(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def message_of(error: Exception) -> str:
    """Return the message of a user's error. Raise other errors, such as unavailable storage, unchanged."""
    if isinstance(error, StorageUnavailable):
        raise error
    if isinstance(error, RecursionError):
        return "it is nested too deeply to be read; copy it again, or write it with fewer levels"
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error):
        return f"its symbolic links form a loop ({error}); correct or remove them"
    if lacks_memory(error) or isinstance(error, RuntimeError):
        raise error
    return str(error)


def _limit(question: dict[str, Any]) -> None:
    """Set the limits of this process. The service waits at most `seconds`."""
    signal.alarm(math.ceil(question["seconds"]))
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


def _limit_exceeded(
    question: dict[str, Any], status: int, used: resource.struct_rusage, queued: float, found: bytes
) -> str | None:
    """Return the text of the limit that a child exceeded, or None."""
    killed = _by(status)
    cpu, memory = question.get("cpu_seconds"), question.get("memory_bytes")
    if cpu and killed == signal.SIGXCPU:
        return f"took over {cpu:g} s of CPU time; {_REMEDY} TRAINSHED_PREFLIGHT_CPU_SECONDS"
    # Otherwise it has waited for storage.
    if killed == signal.SIGALRM and used.ru_utime + used.ru_stime + queued > question["seconds"] / 2:
        return f"took over {question['seconds']:g} s; {_REMEDY} TRAINSHED_PREFLIGHT_SECONDS"
    # Python raises MemoryError; libraries in Rust and C++ abort the process if an allocation fails.
    refused = killed in (signal.SIGABRT, signal.SIGSEGV) and used.ru_maxrss * 1024 > (memory or math.inf) / 2
    if memory and (refused or found == _NO_MEMORY):
        return f"took over {memory // _MIB} MiB of memory; {_REMEDY} TRAINSHED_PREFLIGHT_MEMORY_BYTES"
    return None


def _ending(status: int) -> str:
    return f"signal {_by(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


def _by(status: int) -> int | None:
    """Return the signal that killed a process with this wait status."""
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def _timed_out(question: dict[str, Any], subject: str) -> str:
    """Return the error of a check that waited for I/O: unlike high CPU time, this is not the spec's fault."""
    return (
        f"the check of {subject} took over {question['seconds']:g} s; check that its storage answers, or have the "
        "operator raise TRAINSHED_PREFLIGHT_SECONDS"
    )


def _exceeded(subject: str, limit: str) -> dict[str, Any]:
    return {"problems": [{"pointer": subject, "message": f"its check {limit}"}], "shape": None}


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _leave_with_stdin(socket: Path) -> None:
    os.read(sys.stdin.fileno(), 1)
    # A killed service cannot remove the folder of the socket.
    with suppress(OSError):
        socket.unlink()
        socket.parent.rmdir()
    os._exit(0)
