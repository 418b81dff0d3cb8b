"""A fork server: a helper process with all imports that forks for each request, with time, CPU and memory limits."""

import json
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from train_loop.preflight.code_answer import answer_with_code
from train_loop.preflight.process.child import NO_MEMORY, Ended, run_child
from train_loop.preflight.process.usage import remove_tree
from train_loop.run_dir import StorageUnavailable

Answer = Callable[[dict[str, Any]], object]
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


def serve(answer: Answer) -> None:
    """Answer each request in a forked process until the parent process has exited.

    Standard input is a socket of the parent alone, which has no name: it receives a byte when this process is ready,
    and sends a connection for each request. An answer is JSON, or its bytes. A request's `seconds` limit its time.
    Optional `cpu_seconds` and `memory_bytes` limit its CPU time and its memory beyond the helper's; `output_bytes`
    limits its answer [16 MiB]. A request that exceeds a limit is answered with a problem at the pointer of its current
    check. A request ends when its requester disconnects. Its temporary files are removed however it ends.

    An answer `{"then": …}` asks for another call of `answer`, in another process and with this value as `before`. It
    runs users' code, so that its answer is not believed without a check.
    """
    requests = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, _reap)
    requests.sendall(b"\0")
    while (connection := _next(requests)) is not None:
        with connection:
            _fork(requests, connection, answer)


def _next(requests: socket.socket) -> socket.socket | None:
    """Return the connection of the next request; None if the parent process has exited."""
    while True:
        received, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if descriptors:
            return socket.socket(fileno=descriptors[0])
        if not received:
            return None


def _fork(requests: socket.socket, connection: socket.socket, answer: Answer) -> None:
    try:
        child = os.fork()
    except OSError:
        # The requester finds its connection closed.
        traceback.print_exc()
        return
    if child:
        return
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _handle(connection, answer)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _reap(number: int, frame: FrameType | None) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _handle(connection: socket.socket, answer: Answer) -> None:
    question = _read_question(connection)
    if question is None:
        return
    # A killed process does not remove its temporary files, so this one does.
    folder = Path(tempfile.mkdtemp(prefix="trainshed-"))
    try:
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        found = _found(question, answer, connection, folder)
    finally:
        remove_tree(folder)
    # The requester may have stopped waiting.
    with suppress(ConnectionError):
        connection.sendall(found)


def _read_question(connection: socket.socket) -> dict[str, Any] | None:
    """Return the question of a requester; None if it was killed before it had sent all of it."""
    try:
        with connection.makefile("rb") as reader:
            question = json.load(reader)
    except (ConnectionError, ValueError, RecursionError):
        return None
    return question if isinstance(question, dict) else None


def _found(question: dict[str, Any], answer: Answer, requester: socket.socket, folder: Path) -> bytes:
    """Return the answer of one child process, or of two if the second one runs users' code."""
    end = time.monotonic() + question["seconds"]
    first = run_child(lambda pipe: _answer(question, answer, pipe), question, requester, end=end)
    if first.limit is not None or first.is_late or not first.found.startswith(b'{"then": '):
        return _plain(first, question)
    # No thread of the first process is left: it would not have the limits of the second one.
    before = json.loads(first.found)["then"]
    rest = question | {"before": before}
    second = run_child(lambda pipe: _answer(rest, answer, pipe), rest, requester, end=end, folder=folder)
    return json.dumps(answer_with_code(before, second)).encode()


def _plain(ended: Ended, question: dict[str, Any]) -> bytes:
    """Return the answer of a process that runs no code, or the error of its end."""
    if ended.limit is not None:
        problem = {"pointer": ended.subject, "message": f"its check {ended.limit}"}
        return json.dumps({"problems": [problem], "shape": None}).encode()
    if not ended.is_late:
        return ended.found
    # Unlike high CPU time, this is not the spec's fault.
    reason = (
        f"the check of {ended.subject} took over {question['seconds']:g} s; check that its storage answers, or have "
        "the operator raise TRAINSHED_PREFLIGHT_SECONDS"
    )
    return json.dumps({"failed": reason}).encode()


def _answer(question: dict[str, Any], answer: Answer, writing: int) -> None:
    global _subject, _answer_pipe
    _answer_pipe = writing
    _subject = lambda pointer: _write(writing, f"{pointer}\n".encode())  # noqa: E731
    try:
        value = answer(question)
        found = value if isinstance(value, bytes) else json.dumps(value).encode()
    except BaseException as error:  # also a panic of Rust code, which Exception does not include
        if lacks_memory(error):
            found = NO_MEMORY
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


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
