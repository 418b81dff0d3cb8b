"""A process for which a folder lies on a network file system on a bad day.

Handles go stale for a moment; or a request is done and its answer is lost, so that the one that is sent again finds it
done.
"""

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ASKED, CHANGED = ("stat", "listdir", "scandir", "open"), ("mkdir", "rename", "unlink", "rmdir")
_AGAIN = {"mkdir": errno.EEXIST, "rename": errno.ENOENT, "unlink": errno.ENOENT, "rmdir": errno.ENOENT}
"""What a change comes to that is done already."""


def act_like_nfs(below: Path, *, seed: int, share: float = 0.08) -> None:
    """From now on, this share of what is asked of the folder goes wrong."""
    root, chance, lock = os.path.realpath(below), random.Random(seed), threading.Lock()

    def strikes(path: Any) -> bool:
        if not isinstance(path, str | os.PathLike) or not os.path.abspath(path).startswith(root):
            return False
        with lock:
            return chance.random() < share

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(path: Any = ".", *rest: Any, **options: Any) -> Any:
            if not strikes(path):
                return call(path, *rest, **options)
            if name in CHANGED:
                call(path, *rest, **options)
                raise OSError(_AGAIN[name], os.strerror(_AGAIN[name]), str(path))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

        return ask

    for name in (*ASKED, *CHANGED):
        setattr(os, name, wrapped(name, getattr(os, name)))
