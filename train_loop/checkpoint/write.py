"""Writing one file of a checkpoint, durably, and hashed on the way. Torch-free.

`python -m train_loop.checkpoint.write DESCRIPTOR` does it beside the training, in a process of its own that shares the
memory behind the descriptor: it reads requests from stdin and answers on stdout, and ends when stdin does.
"""

import hashlib
import json
import mmap
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import IO, Protocol

from train_loop.run_dir import CheckpointFile, is_remote, storage_path

_PART = 16 * 2**20
"""Bytes handed to object storage at once."""
_BUFFERS = 512
"""How many pieces are written by one call; the system's limit is 1024."""


class FileWriter(Protocol):
    """Writes files of checkpoints."""

    def write(self, path: Path, pieces: Sequence[memoryview]) -> CheckpointFile:
        """Write a file; its size and hash once it is durable. Raises OSError."""

    def close(self) -> None:
        """Nothing more is to be written."""


class OwnWriter:
    """Writes in the thread that calls it."""

    def write(self, path: Path, pieces: Sequence[memoryview]) -> CheckpointFile:
        """Write a file."""
        return write_file(path, pieces)

    def close(self) -> None:
        """Nothing to end."""


class ProcessWriter:
    """Hands files to a process of its own; their first piece is memory that both share."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, path: Path, pieces: Sequence[memoryview]) -> CheckpointFile:
        """Have a file written; a process that has died is replaced."""
        shared, *rest = pieces
        request = {"path": str(path), "shared": shared.nbytes, "rest": sum(piece.nbytes for piece in rest)}
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.writelines(rest)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            raise OSError(f"the process that writes checkpoints has ended with {process.wait()}")
        told = json.loads(answer)
        if "fault" in told:
            raise OSError(*told["fault"])
        return CheckpointFile.model_validate(told)

    def close(self) -> None:
        """End the process once it is done."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "train_loop.checkpoint.write", str(self._descriptor)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self._descriptor,),
                # Ctrl-C ends the training, which waits for the file that is being written.
                start_new_session=True,
            )
        return self._process


def write_file(path: Path, pieces: Sequence[memoryview]) -> CheckpointFile:
    """Write a file, hashing it meanwhile; its size and hash once its content is durable. Raises OSError.

    Its name is durable once its folder is.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="sha256") as beside:
        digest = beside.submit(_sha256, pieces)
        if is_remote(path):
            _upload(path, pieces)
            return CheckpointFile(size=sum(piece.nbytes for piece in pieces), sha256=digest.result())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write_all(descriptor, pieces)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return CheckpointFile(size=sum(piece.nbytes for piece in pieces), sha256=digest.result())


def _upload(path: Path, pieces: Sequence[memoryview]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            for start in range(0, piece.nbytes, _PART):
                file.write(piece[start : start + _PART])


def _sha256(pieces: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _write_all(descriptor: int, pieces: Sequence[memoryview]) -> None:
    left = deque(pieces)
    while left:
        written = os.writev(descriptor, list(islice(left, _BUFFERS)))
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if written:
            left[0] = left[0][written:]


def serve(requests: IO[bytes], answers: IO[bytes], descriptor: int) -> None:
    """Write what is asked for, one file after another."""
    while line := requests.readline():
        request = json.loads(line)
        rest = memoryview(requests.read(request["rest"]))
        try:
            with _mapped(descriptor, request["shared"]) as shared:
                told = write_file(storage_path(request["path"]), [shared, rest]).model_dump()
        except OSError as error:
            told = {"fault": [error.errno, error.strerror or str(error), request["path"]]}
        answers.write(json.dumps(told).encode() + b"\n")
        answers.flush()


def _mapped(descriptor: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ)) if size else memoryview(b"")


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
