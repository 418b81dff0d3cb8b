"""Detection of storage that is not mounted: marker files, and the folders that this process must never create.

An unmounted folder leaves an empty mount point. A process registers the folders that it relies on. Each later write
below such a folder first checks a witness file, and raises StorageUnavailable if that file is gone.
"""

import errno
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train_loop.run_dir.files.regular import open_regular
from train_loop.run_dir.formats import Format

ROOT_MARKER = ".trainshed-root.json"
"""The file that makes a folder a storage root."""
RUN_MARKER = "root.json"
"""The file in a run directory with the id of the storage root that holds it."""
_SPEC = "spec.json"
_REMOTE_CHECK_SECONDS = 5.0
"""Seconds for which a check of object storage is valid."""


class StorageUnavailable(OSError):
    """A storage root or run directory that existed is missing or was replaced, for example after an unmount."""

    def __init__(self, folder: str, message: str) -> None:
        super().__init__(errno.ESTALE, message, folder)

    def __str__(self) -> str:
        return f"storage {self.filename} is unavailable: {self.strerror}"

    def __reduce__(self) -> tuple[type["StorageUnavailable"], tuple[str, str]]:
        return type(self), (str(self.filename), str(self.strerror))


class RootMarker(Format):
    """.trainshed-root.json of a storage root, and root.json of each run directory below it."""

    id: str
    created: float = 0.0
    """Creation time in Unix seconds."""

    @classmethod
    def new(cls) -> "RootMarker":
        """Return a marker with a random id."""
        return cls(id=secrets.token_hex(16), created=time.time())


@dataclass
class _Expected:
    """A folder that must exist, and the files that prove that it is the same folder as before."""

    folder: Path
    witnesses: Sequence[str]
    id: str | None = None
    found: str | None = None
    """The witness that the last check found."""
    identity: tuple[int, int] | None = None
    """Device and inode of that witness."""
    read_at: float = float("-inf")
    """Monotonic time of the last read of the witness on object storage, in seconds."""

    @property
    def remote(self) -> bool:
        """True if the folder is on object storage, whose paths are not pathlib paths."""
        folder: object = self.folder
        return not isinstance(folder, Path)

    def check(self, max_age: float) -> bool:
        """Check the folder's witness; return whether it was read again.

        On object storage, a read less than `max_age` seconds ago still counts. Raises StorageUnavailable if the folder
        is gone or was replaced.
        """
        if self.remote:
            if time.monotonic() < self.read_at + max_age:
                return False
            self._identify()
            self.read_at = time.monotonic()
            return True
        if self.found is not None:
            identity = _identity(self.folder / self.found)
            if identity is not None and identity == self.identity:
                return False
        self._identify()
        self.identity = _identity(self.folder / self.found) if self.found is not None else None
        return True

    def _identify(self) -> None:
        """Read the witnesses again, the strongest first."""
        for name in self.witnesses:
            marker = _read_marker(self.folder / name, has_id=name != _SPEC)
            if marker is None:
                continue
            if name == _SPEC and self.id is not None:
                break
            if name != _SPEC and self.id not in (None, marker.id):
                raise StorageUnavailable(str(self.folder), f"its id is {marker.id}; expected {self.id}")
            self.found, self.id = name, self.id or marker.id or None
            return
        raise StorageUnavailable(str(self.folder), f"{self.witnesses[0]} is missing; mount the storage again")


_expected: dict[str, _Expected] = {}
_lock = threading.Lock()
_MOST = 10_000


def expect_run_dir(folder: Path) -> None:
    """Register a run directory: this process never creates it. It need not be reachable yet.

    The spec file identifies a run directory from before markers existed.
    """
    _register(_Expected(folder, (RUN_MARKER, _SPEC)))


def expect_root(folder: Path, marker_id: str) -> None:
    """Register a storage root with the id of its marker: this process never creates it."""
    _register(_Expected(folder, (ROOT_MARKER,), marker_id))


def forget_expected(folder: Path) -> None:
    """Unregister a folder that had to exist."""
    with _lock:
        _expected.pop(str(folder), None)


def _register(expected: _Expected) -> None:
    with _lock:
        known = _expected.get(str(expected.folder))
        if known is None or expected.id not in (None, known.id):
            if len(_expected) >= _MOST:
                del _expected[next(iter(_expected))]
            _expected[str(expected.folder)] = expected


def check_storage(path: Path, *, max_age: float | None = None) -> None:
    """Raise StorageUnavailable if a registered folder that holds this path is gone or was replaced.

    On object storage, a check less than `max_age` seconds ago still counts (default: 5 s).
    """
    if not _expected:
        return
    max_age = _REMOTE_CHECK_SECONDS if max_age is None else max_age
    for folder in (path, *path.parents):
        expected = _expected.get(str(folder))
        if expected is not None and expected.check(max_age) and expected.witnesses[0] == RUN_MARKER:
            _expect_root_of(expected)


def check_writable(folder: Path) -> None:
    """Raise OSError if the file system of a local folder is read-only or full. Writes nothing."""
    place: object = folder
    # Paths on object storage are not pathlib paths.
    if not isinstance(place, Path):
        return
    found = os.statvfs(place)
    if found.f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
    # A file system that does not count its blocks reports zero blocks.
    if found.f_blocks and not found.f_bavail:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _expect_root_of(run_dir: _Expected) -> None:
    """Register the storage root of a run directory, if its marker has the same id: the cache is in that root."""
    root = run_dir.folder.parent.parent
    marker = None if run_dir.id is None else read_root_marker(root)
    if marker is not None and marker.id == run_dir.id:
        expect_root(root, marker.id)


def read_root_marker(root: Path) -> RootMarker | None:
    """Return the marker of a storage root; None if it has none."""
    return _read_marker(root / ROOT_MARKER, has_id=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _read_marker(path: Path, *, has_id: bool) -> RootMarker | None:
    place: object = path
    try:
        if isinstance(place, Path):
            with open_regular(path, below=path.parent) as file:
                content = file.read()
        else:
            content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not has_id:
        return RootMarker(id="")
    try:
        return RootMarker.model_validate_json(content)
    except ValueError:
        return None
