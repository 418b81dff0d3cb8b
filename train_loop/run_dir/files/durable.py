"""Crash-safe file writes: a crash at any instant leaves the old or the new content."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from train_loop.run_dir.files.regular import folder_below
from train_loop.run_dir.remote import create_object, is_remote, remote_path
from train_loop.run_dir.root import StorageUnavailable, check_storage

_COPIED_AT_ONCE = 16 * 2**20


def local_path(uri: str) -> Path:
    """Return a file:// URI or plain path as an absolute path. Raises ValueError for another scheme or host."""
    if uri.startswith("file:"):
        # These URIs have no query and no fragment: ? is a wildcard and # an ordinary character.
        path = unquote(uri.removeprefix("file:").removeprefix("//").removeprefix("localhost"))
        if not path.startswith("/"):
            raise ValueError(f"{uri} names a host or a relative path; write file:/// and an absolute path")
        return Path(path)
    if "://" in uri:
        raise ValueError(f"{uri}: this must lie on a file system; choose a file:// URI or a path")
    return Path(os.path.abspath(uri))


def storage_path(uri: str) -> Path:
    """Return the path of a plain path or of a URI that fsspec supports. Raises ValueError for an unusable one."""
    return remote_path(uri) if "://" in uri and not uri.startswith("file://") else local_path(uri)


def write_durably(path: Path, content: str | bytes, *, below: Path | None = None) -> None:
    """Write a file and create its folders; a crash at any instant leaves the old or the new content.

    Links between the folder `below` and the file are not followed. Raises IrregularFileError for one.
    """
    if is_remote(path):
        path.write_bytes(_encoded(content))
        return
    _make_folder_below(path.parent, below)
    replace_durably(path, content, below=below)


def _encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def replace_durably(path: Path, content: str | bytes, *, below: Path | None = None) -> None:
    """Write a file in an existing folder durably: write, fsync, rename, fsync. `below` as in `write_durably`."""
    check_storage(path)
    temporary = f".{path.name}.{os.getpid()}-{time.monotonic_ns()}"
    with folder_below(path.parent, below or path.parent) as folder:
        with whole_or_none(temporary, as_of=path, folder=folder):
            write_synced(_new_file(temporary, folder), _encoded(content))
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)


def _new_file(name: str, folder: int) -> BinaryIO:
    return os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder), "wb")


@contextmanager
def whole_or_none(file: str | Path, *, as_of: Path, folder: int | None = None) -> Iterator[None]:
    """Remove a new file if it cannot be written, and name the file `as_of` in the error: that of a full disk has none.

    Otherwise each retry on a full disk would leave a file. `folder` is the open folder of a relative name.
    """
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            os.unlink(file, dir_fd=folder)
        error.filename = str(as_of)
        raise


def write_synced(file: BinaryIO, content: bytes) -> None:
    """Write and fsync an open file, and close it."""
    with file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def create_new(path: Path, content: bytes, *, below: Path | None = None) -> None:
    """Create a new file durably; only one of several writers succeeds. `below` as in `write_durably`.

    Raises FileExistsError if it exists, IrregularFileError.
    """
    if is_remote(path):
        create_object(path, content)
        return
    _make_folder_below(path.parent, below)
    with folder_below(path.parent, below or path.parent) as folder:
        file = _new_file(path.name, folder)
        with whole_or_none(path.name, as_of=path, folder=folder):
            write_synced(file, content)
        os.fsync(folder)


def remove_below(path: Path, *, below: Path) -> None:
    """Remove a file if it exists. Raises IrregularFileError for a link between the folder `below` and the file."""
    if is_remote(path):
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError), folder_below(path.parent, below) as folder:
        os.unlink(path.name, dir_fd=folder)


def _make_folder_below(path: Path, below: Path | None) -> None:
    """Create a folder and its parents durably. Raises IrregularFileError if one below `below` is a link."""
    if below is not None:
        make_folder(below)
        existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
        with folder_below(existing, below):
            pass
    make_folder(path)


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably; the folder may exist.

    Raises StorageUnavailable if a registered storage root or run directory above it is gone: it must not be recreated.
    """
    check_storage(path)
    _make_folder(path)


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    _make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise StorageUnavailable(str(path), "a file is in the place of this folder") from error
    try:
        # The storage may have been unmounted since the check.
        check_storage(path)
    except StorageUnavailable:
        path.rmdir()
        raise
    sync(path.parent)


def copy_files(folder: Path, to: Path) -> None:
    """Copy the files of a local folder to another local folder or to object storage."""
    if is_remote(to):
        to.mkdir(parents=True, exist_ok=True)
    else:
        make_folder(to)
    for file in sorted(folder.iterdir()):
        with file.open("rb") as source, (to / file.name).open("wb") as target:
            shutil.copyfileobj(source, target, _COPIED_AT_ONCE)


def sync(path: Path) -> None:
    """Fsync a file, or a folder, which makes the names in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
