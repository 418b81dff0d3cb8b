"""Run directories on object storage: fsspec paths, used like pathlib paths.

One request creates an object durably, whole and under its name, or not at all. Folders and renames do not exist.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import cast

import fsspec
from upath import UPath

from train_loop.extras import install_storage
from train_loop.run_dir.files.regular import list_regular, open_regular, size_of_regular
from train_loop.run_dir.root import check_storage

# A call fails after 30 s if the server is silent, and after 10 s if it is unreachable; callers retry within their own
# timeout. With the default attempts of botocore, times those of s3fs, times the timeouts, a call would take minutes.
fsspec.config.conf.setdefault("s3", {}).setdefault(
    "config_kwargs", {"retries": {"total_max_attempts": 1}, "connect_timeout": 5, "read_timeout": 15}
)
_S3_TRIES = 2


def remote_path(uri: str) -> Path:
    """Return a path on object storage. Raises ValueError if no installed package supports the scheme.

    UPath has pathlib's interface but is not a Path; this package calls only methods that both have.
    """
    scheme = uri.partition("://")[0]
    try:
        # Other processes write too: a cached listing may be out of date.
        path = UPath(uri, use_listings_cache=False)
        if scheme == "s3":
            path.fs.retries = _S3_TRIES
        return cast(Path, path)
    except (ImportError, ValueError) as error:
        remedy = f"{install_storage(scheme)}, or use file://"
        raise ValueError(f"{uri}: {scheme}:// storage cannot be used: {error}; {remedy}") from error


def is_remote(path: Path) -> bool:
    """Return whether a path is on object storage."""
    return not isinstance(path, Path)


def storage_failed(error: BaseException) -> bool:
    """Return whether local or remote storage raised the error: not every fsspec package raises OSError."""
    packages = ("aiobotocore.", "aiohttp.", "botocore.", "gcsfs.", "google.", "azure.")
    return isinstance(error, OSError) or f"{type(error).__module__}.".startswith(packages)


@contextmanager
def storage_may_fail(on_error: Callable[[Exception], object]) -> Iterator[None]:
    """Suppress storage errors and pass them to `on_error`. Raises all other errors."""
    try:
        yield
    except Exception as error:
        if not storage_failed(error):
            raise
        on_error(error)


def list_folder(folder: Path, *, below: Path | None = None) -> list[str]:
    """Return the sorted names in a folder; an empty list if the folder is missing.

    Raises storage errors, which pathlib's queries and globs hide, StorageUnavailable, and IrregularFileError for a link
    below the run directory `below`. None: the folder is not of a run directory.
    """
    try:
        if not is_remote(folder):
            return sorted(os.listdir(folder) if below is None else list_regular(folder, below=below))
        remote = cast(UPath, folder)
        found = (path.rstrip("/") for path in remote.fs.ls(remote.path, detail=False, refresh=True))
        # An object may represent the folder itself.
        return sorted({PurePosixPath(path).name for path in found if path != remote.path.rstrip("/")})
    except FileNotFoundError:
        check_storage(folder)
        return []


def size_of(path: Path, *, below: Path | None = None) -> int | None:
    """Return a file's size in bytes; None if it is missing. Raises storage errors, which pathlib's queries hide.

    Raises IrregularFileError unless it is a regular file of the run directory `below`.
    """
    try:
        return path.stat().st_size if below is None or is_remote(path) else size_of_regular(path, below=below)
    except FileNotFoundError:
        check_storage(path)
        return None


def read_whole(path: Path, *, below: Path | None = None) -> bytes:
    """Return the content of a whole file, or of an object at one instant.

    Raises StorageUnavailable, and not FileNotFoundError, if the storage itself is gone, and IrregularFileError unless
    it is a regular file of the run directory `below`.
    """
    try:
        if not is_remote(path):
            with path.open("rb") if below is None else open_regular(path, below=below) as file:
                return file.read()
        remote = cast(UPath, path)
        content: bytes = remote.fs.cat_file(remote.path)
    except (FileNotFoundError, NotADirectoryError):
        check_storage(path)
        raise
    return content


def open_file(path: Path, *, below: Path) -> BufferedReader:
    """Open a file of the run directory `below` for reading, or an object. Raises IrregularFileError, storage errors."""
    return path.open("rb") if is_remote(path) else open_regular(path, below=below)


def create_object(path: Path, content: bytes) -> None:
    """Write a new object. Raises FileExistsError if it exists."""
    remote = cast(UPath, path)
    remote.fs.pipe_file(remote.path, content, mode="create")


def remove_all(folder: Path) -> None:
    """Remove all objects below a prefix, if any."""
    remote = cast(UPath, folder)
    for name in remote.fs.find(remote.path):
        remote.fs.rm_file(name)
