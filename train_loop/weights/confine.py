"""A forked process that reads files of unknown origin: without network, with limits of memory and of files.

The limits are those of the Linux kernel. Without root, without user namespaces or Landlock, some of them do not hold;
the unpickler, which runs no code of a file, needs none of them.
"""

import ctypes
import json
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from train_loop.errors import CheckpointError, UserError
from train_loop.preflight.process.fork_server import lacks_memory
from train_loop.system.confine.landlock import python_files, restrict
from train_loop.system.memory_limit import mapped_bytes

_NEW_USERS, _NEW_NETWORK = 0x10000000, 0x40000000
_END_WITH_PARENT = 1
"""Option of prctl."""


def run_confined(
    work: Callable[[], dict[str, Any]], *, readable: Iterable[Path], writable: Path, largest: int, memory_bytes: int
) -> dict[str, Any]:
    """Return the result of `work` in a forked process.

    It may map two files of `largest` bytes, and use `memory_bytes` more.

    Raises UserError with the message of its UserError, CheckpointError or OSError, and for an exceeded limit.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _answer(work, writing, [*readable], writable, 2 * largest + memory_bytes)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            found = pipe.read()
    finally:
        # Ctrl-C reaches this process before the answer.
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    try:
        answer: dict[str, Any] = json.loads(found)
    except (ValueError, RecursionError) as error:
        reason = f"the process that reads the files ended with status {status}; the files may be damaged"
        raise UserError(reason) from error
    if answer.get("limit"):
        raise UserError(
            f"reading takes over {memory_bytes >> 20} MiB of memory besides the largest files; raise --memory-mib if "
            "you trust the files"
        )
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def _answer(
    work: Callable[[], dict[str, Any]], writing: int, readable: list[Path], writable: Path, memory_bytes: int
) -> None:
    try:
        confine_reader(readable, writable, memory_bytes)
        found = work()
    except (UserError, CheckpointError, OSError) as error:
        found = {"error": str(error)}
    except BaseException as error:
        if not lacks_memory(error):
            traceback.print_exc()
        found = {"limit": True} if lacks_memory(error) else {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(json.dumps(found).encode())


def confine_reader(readable: Iterable[Path], writable: Path, memory_bytes: int) -> None:
    """Limit this process: no network, no processes, no other files, and `memory_bytes` more memory."""
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    # Threads of torch count as processes, and pages of a pickle are only copied.
    torch.set_num_threads(1)
    leave_network()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    most = mapped_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    restrict(readable=[*python_files(), *readable], writable=[writable, Path(os.devnull)], network=False)


def leave_network() -> bool:
    """Move this process to a network namespace without interfaces. Return False if the kernel does not allow it."""
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(_NEW_NETWORK) == 0:
        return True
    if libc.unshare(_NEW_USERS | _NEW_NETWORK) != 0:
        return False
    # Files that a user without a number creates would be refused.
    with suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True
