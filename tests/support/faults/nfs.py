"""A process for which a folder behaves like a failing network file system.

Handles become stale temporarily. Or the answer to a finished request is lost, so that the repeated request finds it
done.
"""

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

READS, CHANGES = ("stat", "listdir", "scandir", "open"), ("mkdir", "rename", "unlink", "rmdir")
_AGAIN = {"mkdir": errno.EEXIST, "rename": errno.ENOENT, "unlink": errno.ENOENT, "rmdir": errno.ENOENT}
"""The error of a change that is already done."""


def act_like_nfs(below: Path, *, seed: int, share: float = 0.08) -> None:
    """Make this share of the requests for the folder fail from now on."""
    root, chance, lock = os.path.realpath(below), random.Random(seed), threading.Lock()

    def strikes(path: Any) -> bool:
        if not isinstance(path, str | os.PathLike) or not os.path.abspath(path).startswith(root):
            return False
        with lock:
            return chance.random() < share

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def flaky(path: Any = ".", *rest: Any, **options: Any) -> Any:
            if not strikes(path):
                return call(path, *rest, **options)
            if name in CHANGES:
                call(path, *rest, **options)
                raise OSError(_AGAIN[name], os.strerror(_AGAIN[name]), str(path))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

        return flaky

    for name in (*READS, *CHANGES):
        setattr(os, name, wrapped(name, getattr(os, name)))
