"""Runs several programs in one thread and pauses each of them between any two storage operations.

Programs are greenlets. Before every storage operation a program gives way to the scheduler, which resumes a random one,
for a random time. A program that is never resumed has died.
"""

import io
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from greenlet import greenlet

_FILES = ("open", "stat", "rename", "mkdir", "listdir", "unlink", "rmdir", "scandir", "write")
_OBJECTS = ("cat_file", "pipe_file", "ls", "rm_file", "rm", "info", "open", "find")
_WRITES = ("rename", "open", "pipe_file")
_SWITCH = (0.02, 0.1, 0.4)
"""The frequency of a schedule's pauses: seldom and long, or all the time."""
Program = Callable[[], None]


class Schedule:
    """One order of the operations of several programs, drawn from a seed."""

    def __init__(self, seed: int, *, dies: float = 0.4) -> None:
        self._chance = random.Random(seed)
        self._switch = self._chance.choice(_SWITCH)
        self._dies = dies
        self._busy: set[greenlet] = set()
        self._changed: str | None = None
        self._main = greenlet.getcurrent()
        self._thread = threading.get_ident()
        self.running = False

    def run(self, programs: Sequence[Program], *, watch: Callable[[str], None]) -> None:
        """Run programs until each has ended or died; call `watch` when the fence or the checkpoints have changed."""
        alive = [greenlet(program) for program in programs]
        doomed = [one for one in alive if self._chance.random() < self._dies]
        left = {one: self._chance.randrange(120) for one in doomed}
        dead, current = list[greenlet](), alive[0]
        self.running = True
        while alive:
            if current not in alive or self._chance.random() < self._switch:
                current = self._chance.choice(alive)
            current.switch()
            if current.dead:
                alive.remove(current)
            elif left.get(current, 1) <= 0:
                alive.remove(current)
                dead.append(current)
            elif current in left:
                left[current] -= 1
            if self._changed:
                changed, self._changed = self._changed, None
                watch(changed)
        self.running = False
        for one in dead:
            # Close its files, without a call of `watch`.
            one.throw()

    @contextmanager
    def unpaused(self) -> Iterator[None]:
        """Disable pauses, so that an observer takes no time."""
        program = greenlet.getcurrent()
        self._busy.add(program)
        try:
            yield
        finally:
            self._busy.discard(program)

    def before(self, name: str, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Pause, then carry out an operation as one."""
        program = greenlet.getcurrent()
        elsewhere = threading.get_ident() != self._thread
        if elsewhere or not self.running or program is self._main or program in self._busy:
            return operation(*arguments, **options)
        self._main.switch()
        try:
            with self.unpaused():
                return operation(*arguments, **options)
        finally:
            self._changed = _change(name, arguments) or self._changed


def _change(name: str, arguments: tuple[Any, ...]) -> str | None:
    """Return what an operation may have changed: the fence, or the checkpoints."""
    if name not in _WRITES or (name == "open" and not {"w", "wb", "xb"} & {*arguments[1:3]}):
        return None
    for argument in arguments:
        if isinstance(argument, (str, os.PathLike)):
            path = os.fspath(argument)
            if "/fence" in path:
                return "fence"
            if path.endswith("manifest.json") or path[-8:].isdigit():
                return "checkpoints"
    return None


@contextmanager
def paused_storage(schedule: Callable[[], Schedule | None]) -> Iterator[None]:
    """Pause every operation on files and on memory:// by the active schedule."""

    def pausing(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*arguments: Any, **options: Any) -> Any:
            current = schedule()
            if current is None:
                return operation(*arguments, **options)
            return current.before(name, operation, *arguments, **options)

        return paused

    with pytest.MonkeyPatch.context() as patch:
        for name in _FILES:
            patch.setattr(os, name, pausing(name, getattr(os, name)))
        # No simulated power failure here.
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(io, "open", pausing("open", io.open))
        for name in _OBJECTS:
            patch.setattr(MemoryFileSystem, name, pausing(name, getattr(MemoryFileSystem, name)))
        yield


class ObjectPath:
    """A path on memory:// with the part of UPath's interface that run directories use, at a tenth of its cost."""

    fs = MemoryFileSystem()

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = path.rpartition("/")[2]

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(f"{self.path}/{name}")

    def __fspath__(self) -> str:
        return self.path

    __str__ = __fspath__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def parent(self) -> "ObjectPath":
        return ObjectPath(self.path.rpartition("/")[0])

    @property
    def parents(self) -> list["ObjectPath"]:
        names = self.path.strip("/").split("/")
        return [ObjectPath("/" + "/".join(names[:count])) for count in range(len(names) - 1, 0, -1)]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def suffix(self) -> str:
        return f".{self.name.rpartition('.')[2]}"

    def with_name(self, name: str) -> "ObjectPath":
        return self.parent / name

    def open(self, mode: str = "rb") -> Any:
        return self.fs.open(self.path, mode)

    def write_bytes(self, content: bytes) -> None:
        with self.fs.open(self.path, "wb") as file:
            file.write(content)

    def stat(self) -> os.stat_result:
        size = self.fs.info(self.path)["size"]
        return os.stat_result((0, 0, 0, 0, 0, 0, size, 0, 0, 0))

    def exists(self) -> bool:
        return bool(self.fs.exists(self.path))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.fs.rm_file(self.path)
        except (FileNotFoundError, KeyError):
            if not missing_ok:
                raise

    def glob(self, pattern: str) -> list["ObjectPath"]:
        try:
            names = self.fs.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        return [ObjectPath(name) for name in names if fnmatch(name.rpartition("/")[2], pattern)]
