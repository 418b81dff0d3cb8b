"""Durable writes of checkpoint files, which are hashed at the same time. Torch-free.

`python -m train_loop.checkpoint.files.writer DESCRIPTOR` writes files in a separate process, during training.
It shares the memory behind the descriptor, reads requests from stdin, answers on stdout, and exits when stdin closes.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import IO, Any, Protocol

from train_loop.run_dir import CheckpointFile, is_remote, storage_path
from train_loop.system.cpu import cores_of_rank

_PART = 16 * 2**20
"""Bytes per write call to object storage."""
_BUFFERS = 512
"""Maximum number of pieces per `writev` call; the system's limit is 1024."""
_BLOCK = 4096
"""Alignment of direct writes in bytes, in memory and in the file."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_AT_ONCE = 4
"""Maximum number of files that a rank writes concurrently, if it has the cores: one core hashes 1 to 2 GB/s."""
Files = Mapping[str, Sequence[memoryview]]
"""Contents of files in pieces, by file name."""


class FileWriter(Protocol):
    """A writer of checkpoint files."""

    def write(self, folder: Path, files: Files) -> dict[str, CheckpointFile]:
        """Write files. Return their sizes and hashes once they are durable. Raises OSError."""

    def close(self) -> None:
        """Release all resources: no more files follow."""


class OwnWriter:
    """A writer in this process."""

    def write(self, folder: Path, files: Files) -> dict[str, CheckpointFile]:
        """Write files."""
        return write_files(folder, files)

    def close(self) -> None:
        """Do nothing."""


class ProcessWriter:
    """A writer in a separate process. The first pieces of all files, in order, are the shared memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, folder: Path, files: Files) -> dict[str, CheckpointFile]:
        """Write files in the process. Starts the process if it is not running."""
        lengths = {
            name: (shared.nbytes, sum(piece.nbytes for piece in rest)) for name, (shared, *rest) in files.items()
        }
        request = {"folder": str(folder), "lengths": lengths}
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            for _, *rest in files.values():
                process.stdin.writelines(rest)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            raise OSError(f"the process that writes checkpoints exited with code {process.wait()}")
        reply = json.loads(answer)
        if "fault" in reply:
            raise OSError(*reply["fault"])
        return {name: CheckpointFile.model_validate(file) for name, file in reply.items()}

    def close(self) -> None:
        """Wait for the process to finish."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "train_loop.checkpoint.files.writer", str(self._descriptor)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self._descriptor,),
                # Ctrl-C must not reach this process: training waits for the file that is being written.
                start_new_session=True,
            )
        return self._process


def write_files(folder: Path, files: Files) -> dict[str, CheckpointFile]:
    """Write files concurrently. Return their sizes and hashes once all are durable. Raises OSError."""
    with ThreadPoolExecutor(min(_AT_ONCE, cores_of_rank()), thread_name_prefix="file") as pool:
        written = pool.map(partial(_write_into, folder), files.items())
        return dict(zip(files, written, strict=True))


def _write_into(folder: Path, file: tuple[str, Sequence[memoryview]]) -> CheckpointFile:
    name, pieces = file
    return write_file(folder / name, pieces)


def write_file(path: Path, pieces: Sequence[memoryview]) -> CheckpointFile:
    """Write and hash a file. Return its size and hash once its content is durable. Raises OSError.

    Its name is durable only once its folder is.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="sha256") as beside:
        digest = beside.submit(_sha256, pieces)
        if is_remote(path):
            _upload(path, pieces)
            return CheckpointFile(size=sum(piece.nbytes for piece in pieces), sha256=digest.result())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            left = deque(pieces)
            _write_directly(descriptor, left)
            _write_all(descriptor, left)
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


def _write_directly(descriptor: int, left: "deque[memoryview]") -> None:
    """Write the whole blocks of the first piece with direct I/O, without the page cache.

    The page cache would take memory and time for a copy that is never read. If the file system does not support direct
    I/O, or the memory is not page-aligned, everything is left to `_write_all`.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        while _DIRECT and left and (size := left[0].nbytes // _BLOCK * _BLOCK):
            left[0] = left[0][os.writev(descriptor, [left[0][:size]]) :]
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _write_all(descriptor: int, left: "deque[memoryview]") -> None:
    while left:
        written = os.writev(descriptor, list(islice(left, _BUFFERS)))
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if written:
            left[0] = left[0][written:]


def serve(requests: IO[bytes], answers: IO[bytes], descriptor: int) -> None:
    """Write the requested files, checkpoint by checkpoint, until `requests` ends."""
    whole = memoryview(b"")
    while line := requests.readline():
        request = json.loads(line)
        lengths = request["lengths"]
        rests = [memoryview(requests.read(rest)) for _, rest in lengths.values()]
        ends = list(accumulate((shared for shared, _ in lengths.values()), initial=0))
        try:
            if whole.nbytes != ends[-1]:
                # Otherwise keep the mapping, so that its pages are not mapped again at every save.
                whole = _mapped(descriptor, ends[-1])
            shares = [[whole[start:end], rest] for (start, end), rest in zip(pairwise(ends), rests, strict=True)]
            written = write_files(storage_path(request["folder"]), dict(zip(lengths, shares, strict=True)))
            reply: dict[str, Any] = {name: file.model_dump() for name, file in written.items()}
        except OSError as error:
            reply = {"fault": [error.errno, error.strerror or str(error), error.filename or request["folder"]]}
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()


def _mapped(descriptor: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ)) if size else memoryview(b"")


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
