"""Crash states of a folder: the writes of a real program, cut and reordered as far as fsync allows.

A `Trace` records, in each writing process, its operations on the files below a folder. `states` replays all traces
on a model of a disk, and creates real folders of the states that a crash could leave.
"""

import os
import random
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_DRAWS = 3
"""Number of states drawn per instant, repeated until there are enough different states."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Op(NamedTuple):
    """One operation on the disk."""

    at: int
    """Nanoseconds of a clock that all processes share."""
    kind: str
    """mkdir, create, sync, rename, unlink or rmdir; or `durable`, the report that a step is durable."""
    path: str
    target: str = ""
    content: bytes = b""


class Trace:
    """A record of this process's operations below a folder, until the process ends: audit hooks cannot be removed."""

    def __init__(self, root: Path) -> None:
        self.ops: list[Op] = []
        self._root = os.path.realpath(root)
        self._sync = os.fsync
        sys.addaudithook(self._record_event)
        # The only relevant disk write that Python does not report to audit hooks.
        os.fsync = self._sync_and_record  # type: ignore[assignment]

    def report_durable(self, step: int) -> None:
        """Record that a step was reported as durable."""
        self._add("durable", str(step))

    def _record_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        match event, arguments:
            case "open", (str() | os.PathLike() as path, _, int() as flags) if flags & WRITES:
                self._add("create", self._place(path))
            case "os.mkdir", (path, _, folder):
                self._add("mkdir", self._place(path, folder))
            case "os.rename", (source, target, *_):
                self._add("rename", self._place(source), self._place(target))
            case "os.remove", (path, folder):
                self._add("unlink", self._place(path, folder))
            case "os.rmdir", (path, folder):
                self._add("rmdir", self._place(path, folder))
            case "os.truncate" | "os.link" | "os.symlink", (path, *_) if self._place(path):
                raise AssertionError(f"the model of the disk knows no {event}")

    def _sync_and_record(self, descriptor: int) -> None:
        path = self._place(os.readlink(f"/proc/self/fd/{descriptor}"))
        regular = path and stat.S_ISREG(os.fstat(descriptor).st_mode)
        content = Path(self._root, path).read_bytes() if regular else b""
        self._sync(descriptor)
        self._add("sync", path, content=content)

    def _place(self, path: Any, folder: int = -1) -> str:
        """Return the path below the root; empty for paths elsewhere."""
        whole = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path)) if folder >= 0 else path
        place = os.path.relpath(os.path.abspath(whole), self._root)
        return "" if place.startswith("..") else place

    def _add(self, kind: str, path: str, target: str = "", content: bytes = b"") -> None:
        if path:
            self.ops.append(Op(time.monotonic_ns(), kind, path, target, content))


@dataclass
class File:
    """A file of the model: its durable content, or the content still to be synced."""

    content: bytes = b""
    synced: bool = False

    def remains(self, chance: random.Random) -> bytes:
        """Return the content that a crash leaves."""
        if self.synced:
            return self.content
        whole = self.content
        cut = chance.randrange(len(whole) + 1)
        return chance.choice([b"", whole, whole[:cut], whole[:cut] + bytes(len(whole) - cut), bytes(cut) + whole[cut:]])


Change = list[tuple[str, "File | Folder | None"]]
"""Atomic changes of names."""


@dataclass
class Folder:
    """A folder of the model: durable names, and pending changes of names."""

    now: "dict[str, File | Folder]" = field(default_factory=dict)
    durable: "dict[str, File | Folder]" = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, names: Change) -> None:
        """Change names; the change is not durable yet."""
        _apply(self.now, names)
        self.pending.append(names)

    def remains(self, chance: random.Random, kept: float) -> "dict[str, File | Folder]":
        """Return the names after a crash that keeps this share of the unsynced changes."""
        names = dict(self.durable)
        for change in self.pending:
            if chance.random() < kept:
                _apply(names, change)
        return names


def _apply(names: "dict[str, File | Folder]", change: Change) -> None:
    for name, node in change:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """The model: operations happen in order, and unsynced ones may or may not survive."""

    def __init__(self) -> None:
        self.root = Folder()
        self.promised: set[str] = set()

    def do(self, op: Op, final: bytes | None) -> None:
        """Apply an operation; `final` is the content of a created file once it is synced."""
        if op.kind == "durable":
            self.promised.add(op.path)
            return
        folder, name = self._find(os.path.dirname(op.path)), os.path.basename(op.path)
        if not isinstance(folder, Folder):
            return
        match op.kind:
            case "mkdir" if name not in folder.now:
                folder.change([(name, Folder())])
            case "create":
                assert name not in folder.now or final is None, f"{op.path} is written to in place"
                folder.change([(name, File(final or b""))])
            case "unlink" | "rmdir" if name in folder.now:
                folder.change([(name, None)])
            case "rename" if name in folder.now:
                self._rename(folder, name, op.target)
            case "sync":
                self._sync(op.path)

    def _rename(self, folder: Folder, name: str, target: str) -> None:
        assert self._find(os.path.dirname(target)) is folder, "the model renames within a folder"
        folder.change([(name, None), (os.path.basename(target), folder.now[name])])

    def _sync(self, path: str) -> None:
        match self._find(path):
            case File() as file:
                file.synced = True
            case Folder() as folder:
                folder.durable, folder.pending = dict(folder.now), []

    def _find(self, path: str) -> File | Folder | None:
        node: File | Folder | None = self.root
        for part in Path(path).parts:
            node = node.now.get(part) if isinstance(node, Folder) else None
        return node


def states(traces: Iterable[Iterable[Op]], seed: int, *, at_least: int = 0) -> "Iterator[State]":
    """Yield the states after a crash: at every instant, nothing, everything or a part of the unsynced data survives.

    The number of different states depends on the interleaving of the processes: more are drawn until there are enough.
    """
    ops = sorted(op for trace in traces for op in trace)
    seen = set[tuple[object, ...]]()
    for first in range(0, 40 * _DRAWS if at_least else _DRAWS, _DRAWS):
        for state in _draw(ops, seed, range(first, first + _DRAWS), seen):
            yield state
            if first and len(seen) >= at_least:
                return


def _draw(ops: list[Op], seed: int, variants: range, seen: set[tuple[object, ...]]) -> "Iterator[State]":
    """Draw a number of states at every instant, without those seen before."""
    finals = _finals(ops)
    disk = Disk()
    for count, op in enumerate(ops, start=1):
        disk.do(op, finals.get(count - 1))
        for variant in variants:
            chance = random.Random(f"{seed}/{count}/{variant}")
            kept = (0.0, 1.0)[variant] if variant < 2 else chance.random()
            content = dict(_remains(disk.root, chance, kept))
            promised = frozenset(map(int, disk.promised))
            # Yield each state once, regardless of the number of instants and draws that lead to it.
            mark = (promised, *sorted((path, hash(blob)) for path, blob in content.items()))
            if mark not in seen:
                seen.add(mark)
                yield State(
                    content, promised, f"crash {variant} after {count} of {len(ops)} ({' '.join(op[1:4])})", kept
                )


def _remains(folder: Folder, chance: random.Random, kept: float, below: str = "") -> Iterator[tuple[str, bytes | None]]:
    """Return the content of a folder after a crash, by path; None for a folder."""
    for name, node in folder.remains(chance, kept).items():
        if isinstance(node, Folder):
            yield below + name, None
            yield from _remains(node, chance, kept, f"{below}{name}/")
        else:
            yield below + name, node.remains(chance)


def _finals(ops: list[Op]) -> dict[int, bytes]:
    """Return the synced content of each created file, by number of operation."""
    found: dict[int, bytes] = {}
    created: dict[str, int] = {}
    for number, op in enumerate(ops):
        if op.kind == "create":
            created[op.path] = number
        elif op.kind == "sync" and op.path in created:
            found[created[op.path]] = op.content
    return found


@dataclass
class State:
    """One state after a crash."""

    content: dict[str, bytes | None]
    """The content of every file by its path; None for a folder."""
    promised: frozenset[int]
    """Steps that had been reported as durable."""
    name: str
    kept: float
    """The share of the unsynced name changes that survived the crash."""

    def make(self, root: Path) -> None:
        """Create the state as a real folder."""
        root.mkdir()
        for path, content in self.content.items():
            if content is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(content)
