"""Tests of the storage operations of run directories: renames on file systems, atomic puts on object storage."""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from service.errors import StorageFault
from train_loop.run_dir import (
    TOKEN_FILE,
    answer_file,
    create_object,
    is_remote,
    list_folder,
    make_folder,
    read_whole,
    remove_all,
    storage_path,
    why_unreadable,
    write_durably,
)

_REPLACEMENTS = 20
_OLD, _NEW = "old" * 2_000, "new!" * 4_000
"""Contents of different lengths, so that a mixture of both is detected."""
_ARRIVAL_SECONDS = 5.0
"""Maximum seconds until a network file system shows a file that another host wrote."""


class RunsProbe:
    """A StorageProbe of the folder that holds the run directories, and of the other roots that specs may read."""

    def __init__(
        self, runs: str, roots: Sequence[str] = (), *, open_root: Callable[[str], object] | None = None
    ) -> None:
        """Create the probe. `open_root` creates the root and its marker once, or raises OSError if they are gone."""
        self._open_root = open_root
        self._runs = runs
        self._roots = tuple(roots)

    @property
    def runs(self) -> str:
        """Return the URI of the folder that holds the run directories."""
        return self._runs

    def read(self) -> str:
        """List all roots. Return a description of the result. Raises StorageFault."""
        if self._open_root is not None:
            self._open_root(self._runs)
        elif not is_remote(place := storage_path(self._runs)):
            # The first job would create the folder.
            make_folder(place)
        faults = {root: why for root in (self._runs, *self._roots) if (why := why_unreadable(root)) is not None}
        if faults:
            raise StorageFault("; ".join(f"{root}: {why}" for root, why in faults.items()))
        return ", ".join((self._runs, *self._roots))

    def write(self) -> str:
        """Write, read and list a file. Return a description of the result. Raises StorageFault, OSError."""
        with self._scratch() as folder:
            file = folder / TOKEN_FILE
            write_durably(file, _OLD)
            if read_whole(file) != _OLD.encode():
                raise StorageFault(f"{file} has other content than was written")
            if list_folder(folder) != [TOKEN_FILE]:
                raise StorageFault(f"{file} is missing in a listing after it was written")
        return f"{self._runs}: file written, synced, read, listed and removed"

    def replace(self) -> str:
        """Replace a file while it is read. Return a description of the result. Raises StorageFault, OSError."""
        with self._scratch() as folder:
            return _create_twice(folder) if is_remote(folder) else _replace_and_watch(folder)

    def leave_token(self, folder: str) -> str:
        """Write a random token into a folder. Return the token."""
        token = secrets.token_hex(16)
        write_durably(storage_path(folder) / TOKEN_FILE, token)
        return token

    def answers(self, folder: str, token: str, nodes: Sequence[str]) -> frozenset[str]:
        """Return the nodes whose answer in the folder has the same token. Wait a few seconds for missing answers."""
        deadline, found = time.monotonic() + _ARRIVAL_SECONDS, frozenset[str]()
        while len(found) < len(nodes) and time.monotonic() < deadline:
            names = list_folder(storage_path(folder))
            there = [node for node in nodes if answer_file(node) in names]
            answers = {node: read_whole(storage_path(folder) / answer_file(node)).decode() for node in there}
            found = frozenset(node for node, answer in answers.items() if answer == token)
            if len(found) < len(nodes):
                time.sleep(0.2)
        return found

    def remove(self, folder: str) -> None:
        """Remove a folder and its contents. Do nothing if it does not exist."""
        _remove(storage_path(folder))

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        folder = storage_path(self._runs) / f"_doctor-{secrets.token_hex(8)}"
        try:
            yield folder
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    if is_remote(folder):
        remove_all(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _create_twice(folder: Path) -> str:
    """Check that creating an object twice is rejected: the checkpoint store relies on it. Puts are always atomic."""
    create_object(folder / TOKEN_FILE, _OLD.encode())
    try:
        create_object(folder / TOKEN_FILE, _NEW.encode())
    except FileExistsError:
        return "creating an existing object is rejected"
    raise StorageFault("an existing object was created again: the storage ignores If-None-Match")


def _replace_and_watch(folder: Path) -> str:
    file, done = folder / TOKEN_FILE, threading.Event()
    write_durably(file, _OLD)
    with ThreadPoolExecutor(1) as pool:
        reads = pool.submit(_read_until, file, done)
        try:
            for number in range(_REPLACEMENTS):
                write_durably(file, _OLD if number % 2 else _NEW)
        finally:
            done.set()
        return f"{_REPLACEMENTS} replacements, {reads.result()} concurrent reads, each of complete old or new content"


def _read_until(file: Path, done: threading.Event) -> int:
    reads = 0
    while not done.is_set():
        try:
            content = file.read_text()
        except FileNotFoundError as error:
            raise StorageFault(f"{file} was missing for a moment while it was replaced") from error
        if content not in (_OLD, _NEW):
            raise StorageFault(f"{file} had partial content while it was replaced")
        reads += 1
    return reads
