"""Files at local paths and on any fsspec file system, read in ranges that are retried after faults."""

import hashlib
import io
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import fsspec
import pyarrow as pa

from train_loop.data.patterns import ALL_BELOW, Pattern, search
from train_loop.errors import DataError
from train_loop.extras import install_storage
from train_loop.run_dir import StorageUnavailable
from train_loop.system.input_files import check_regular, open_input
from train_loop.system.retry import patiently

_PATIENCE = 300.0
"""Timeout of a read from remote storage, in seconds, with all its retries."""
_LISTING_PATIENCE = 30.0
"""Timeout of a listing of remote storage, in seconds: shorter, as a user may wait for the answer."""
_BUFFER = 4 * 2**20
_longest: ContextVar[float] = ContextVar("longest", default=math.inf)
"""Upper bound of both timeouts in this context, in seconds."""
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError)
_LASTING_NAMES = {
    "FileExpired",
    "NoCredentialsError",
    "ParamValidationError",
    "PartialCredentialsError",
    "ProfileNotFound",
}
"""Names of further errors that a retry cannot fix; their packages may not be installed."""


@contextmanager
def storage_patience(seconds: float) -> Iterator[None]:
    """Limit the timeouts of remote storage to `seconds` in the body, for a caller that needs a quick answer."""
    token = _longest.set(seconds)
    try:
        yield
    finally:
        _longest.reset(token)


@dataclass(frozen=True)
class File:
    """A listed file, with its size and version at that time."""

    uri: str
    """A local path, or the URI of remote storage."""
    size: int
    """Size in bytes."""
    version: str
    """Value that changes with every change of the file: the modification time or the entity tag."""

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.uri.rsplit("/", 1)[-1]


class FileSystem(Protocol):
    """A file system that lists files, in any order."""

    def glob(self, pattern: str) -> list[File]:
        """Return the files that match a pattern."""

    def find(self, path: str) -> list[File]:
        """Return all files below a folder, or the file itself; an empty list if the path does not exist."""


def is_gone(place: Path) -> bool:
    """Return whether a local path does not exist or is an empty folder, such as an unmounted mount point."""
    try:
        return not place.exists() or (place.is_dir() and not any(place.iterdir()))
    except OSError:
        return True


def is_local(uri: str) -> bool:
    """Return whether a URI or path lies on this machine's own file system."""
    return "://" not in uri or uri.startswith(("file://", "stdlib://"))


def file_system(uri: str) -> FileSystem:
    """Return the file system of a URI or an absolute path. Raises DataError if no package supports the scheme."""
    if is_local(uri):
        return _Local()
    try:
        return _Remote(uri)
    except (ImportError, ValueError) as error:
        scheme = uri.split("://")[0]
        remedy = f"{install_storage(scheme)}, or use file://"
        raise DataError(f"{uri}: {scheme}:// storage cannot be read: {error}; {remedy}") from error


def _read_range(file: File, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a remote file. Raises StorageUnavailable after five minutes of failures."""
    system, path = fsspec.core.url_to_fs(file.uri)
    data: bytes = _call_storage(file.uri, _PATIENCE, system.cat_file, path, start=start, end=stop)
    return data


def open_file(file: File, *, buffer: int = _BUFFER) -> Any:
    """Open a file to read and seek in. A remote file is read on demand, with `buffer` bytes of read-ahead."""
    if is_local(file.uri):
        return open_input(file.uri)
    return io.BufferedReader(_Ranged(file), buffer) if buffer else _Ranged(file)


@contextmanager
def report_damage(uri: str, kind: str) -> Iterator[None]:
    """Raise DataError for a library's error about a file whose content does not have the format `kind`."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        # Arrow reports damage as an OSError too; a storage error has an errno or already contains the URI.
        if isinstance(error, OSError) and (error.errno is not None or uri in str(error)):
            raise
        name = {"parquet": "Parquet", "jsonl": "JSON lines"}.get(kind, kind)
        raise DataError(f"{uri} is not a readable {name} file: {error}; write it again or leave it out") from error


class _Ranged(io.RawIOBase):
    """A remote file that is read range by range, so that a fault repeats one range only."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size}[whence] + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._place + len(buffer), self._file.size)
        if stop <= self._place:
            return 0
        data = _read_range(self._file, self._place, stop)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


class _Local:
    def glob(self, pattern: str) -> list[File]:
        fixed, below = split_glob(pattern)
        matched = Pattern.parse(below)
        return self._described(search(fixed, matched)) if os.path.isdir(fixed) else []

    def find(self, path: str) -> list[File]:
        if os.path.isdir(path):
            return self._described(search(path, ALL_BELOW))
        if os.path.islink(path) and not os.path.exists(path):
            raise DataError(f"{path} is a broken link; restore its target, or remove the link")
        return self._described([path] if os.path.exists(path) else [])

    @staticmethod
    def _described(paths: Iterable[str]) -> list[File]:
        found = []
        for path in paths:
            stat = os.stat(path)
            check_regular(path, stat)
            found.append(File(path, stat.st_size, str(stat.st_mtime_ns)))
        return found


def split_glob(path: str) -> tuple[str, str]:
    """Return the part of a path or glob before its first wildcard, and the rest; the rest of a plain path is empty."""
    steps, first = path.split("/"), 3 if "://" in path else 0  # a host may have brackets, such as [::1]
    wild = next((n for n, step in enumerate(steps) if n >= first and any(w in step for w in "*?[")), len(steps))
    return "/".join(steps[:wild]) or "/", "/".join(steps[wild:])


class _Remote:
    def __init__(self, uri: str) -> None:
        self._system, path = fsspec.core.url_to_fs(uri)
        # Some file systems list names without host and user.
        self._prefix = uri.removesuffix(path) if uri.endswith(path) else None
        # Earlier listings of this process may be outdated.
        self._system.invalidate_cache()

    def glob(self, pattern: str) -> list[File]:
        fixed, below = split_glob(pattern)
        matched = Pattern.parse(below)
        root = str(self._system._strip_protocol(fixed)).rstrip("/")
        found = self._list(fixed, matched.depth)
        return self._described(
            {name: info for name, info in found.items() if matched.matches(name.removeprefix(f"{root}/").split("/"))}
        )

    def find(self, path: str) -> list[File]:
        return self._described(self._list(path, None))

    def _list(self, path: str, depth: int | None) -> dict[str, dict[str, Any]]:
        options = {"detail": True} if depth is None else {"detail": True, "maxdepth": depth}
        try:
            found: dict[str, dict[str, Any]] = _call_storage(
                path, _LISTING_PATIENCE, self._system.find, path, **options
            )
        except FileNotFoundError:
            return {}
        return found

    def _described(self, found: dict[str, dict[str, Any]]) -> list[File]:
        # Storage consoles mark an empty folder by an object whose name ends with a slash.
        files = {name: info for name, info in found.items() if info["type"] == "file" and not name.endswith("/")}
        chained = next((name for name in files if "::" in name), None)
        if chained is not None:
            raise DataError(f"{chained} has '::' in its name, which would chain file systems; rename it")
        return [File(self._uri(name), int(info["size"]), _version(info)) for name, info in files.items()]

    def _uri(self, name: str) -> str:
        return str(self._system.unstrip_protocol(name)) if self._prefix is None else self._prefix + name


def _version(info: dict[str, Any]) -> str:
    names = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "created")
    known = next((info[name] for name in names if info.get(name)), None)
    # If the metadata has none of these names, all of it is the version.
    return hashlib.sha256(repr(sorted(info.items())).encode()).hexdigest() if known is None else str(known)


def _call_storage(uri: str, patience: float, call: Any, *arguments: Any, **options: Any) -> Any:
    """Call with retries. Raises StorageUnavailable after `patience` seconds, DataError for a permanent error."""
    patience = min(patience, _longest.get())
    try:
        return patiently(partial(call, *arguments, **options), seconds=patience, may_pass=_may_pass)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{uri} not found; it may have been deleted") from error
    except Exception as error:
        if not _may_pass(error):
            raise DataError(f"{uri} cannot be read: {error}; check the credentials of service and workers") from error
        raise StorageUnavailable(uri, f"it has failed for {patience:.0f} s: {error}") from error


def _may_pass(error: BaseException) -> bool:
    lasting = isinstance(error, _LASTING) or type(error).__name__ in _LASTING_NAMES
    return isinstance(error, Exception) and not lasting


def chunks(file: File, size: int) -> Iterator[bytes]:
    """Yield a whole file, `size` bytes at a time."""
    with open_file(file) as opened:
        while data := opened.read(size):
            yield data
