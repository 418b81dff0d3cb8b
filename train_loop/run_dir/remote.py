"""Run directories on object storage: paths of fsspec's file systems, used like those of pathlib.

An object appears whole, durably and under its name by one request, or not at all; there are no folders and no renames.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import cast

import fsspec
from upath import UPath

from train_loop.run_dir.root import check_storage

# A silent server fails a call in 30 s, and one that cannot be reached in 10 s: our callers retry for as long as they
# may. The attempts of botocore, times those of s3fs, times the timeouts would take minutes.
fsspec.config.conf.setdefault("s3", {}).setdefault(
    "config_kwargs", {"retries": {"total_max_attempts": 1}, "connect_timeout": 5, "read_timeout": 15}
)
_S3_TRIES = 2


def remote_path(uri: str) -> Path:
    """A path on object storage. Raises ValueError where no installed package knows the scheme.

    UPath has pathlib's interface without being a Path; what is called here, both have.
    """
    scheme = uri.partition("://")[0]
    try:
        # Others write too: what was listed a moment ago may have changed.
        path = UPath(uri, use_listings_cache=False)
        if scheme == "s3":
            path.fs.retries = _S3_TRIES
        return cast(Path, path)
    except (ImportError, ValueError) as error:
        remedy = "install trainshed[s3]" if scheme == "s3" else "install the package that fsspec names for it"
        raise ValueError(f"{uri}: {scheme}:// storage cannot be used: {error}; {remedy}, or use file://") from error


def is_remote(path: Path) -> bool:
    """Whether a path lies on object storage."""
    return not isinstance(path, Path)


def storage_failed(error: BaseException) -> bool:
    """Whether it was storage that failed, local or remote; not every package of fsspec's raises OSError for that."""
    packages = ("aiobotocore.", "aiohttp.", "botocore.", "gcsfs.", "google.", "azure.")
    return isinstance(error, OSError) or f"{type(error).__module__}.".startswith(packages)


@contextmanager
def storage_may_fail(tell: Callable[[Exception], object]) -> Iterator[None]:
    """Go on where storage fails, which is told; what else goes wrong is raised."""
    try:
        yield
    except Exception as error:
        if not storage_failed(error):
            raise
        tell(error)


def list_folder(folder: Path) -> list[str]:
    """Names of what lies in a folder, in order; none where there is no folder.

    What pathlib's questions and globs take for nothing, storage that fails, is raised, and so is StorageUnavailable.
    """
    try:
        if not is_remote(folder):
            return sorted(os.listdir(folder))
        remote = cast(UPath, folder)
        found = (path.rstrip("/") for path in remote.fs.ls(remote.path, detail=False, refresh=True))
        # An object may stand for the folder itself.
        return sorted({PurePosixPath(path).name for path in found if path != remote.path.rstrip("/")})
    except FileNotFoundError:
        check_storage(folder)
        return []


def size_of(path: Path) -> int | None:
    """Bytes of a file, None where there is none; storage that fails is raised, which pathlib takes for a no."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        check_storage(path)
        return None


def read_whole(path: Path) -> bytes:
    """All of a file, or of an object as it is at one instant.

    Raises StorageUnavailable, and not FileNotFoundError, if the storage itself is gone.
    """
    try:
        if not is_remote(path):
            return path.read_bytes()
        remote = cast(UPath, path)
        content: bytes = remote.fs.cat_file(remote.path)
    except (FileNotFoundError, NotADirectoryError):
        check_storage(path)
        raise
    return content


def create_object(path: Path, content: bytes) -> None:
    """Write an object that must not be there yet. Raises FileExistsError."""
    remote = cast(UPath, path)
    remote.fs.pipe_file(remote.path, content, mode="create")


def remove_all(folder: Path) -> None:
    """Remove all objects below a prefix; none is fine."""
    remote = cast(UPath, folder)
    for name in remote.fs.find(remote.path):
        remote.fs.rm_file(name)
