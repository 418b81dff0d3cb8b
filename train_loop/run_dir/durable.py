"""Writing so that a crash at any instant leaves the old or the new."""

import os
import time
from pathlib import Path
from urllib.parse import unquote

from train_loop.run_dir.remote import is_remote, remote_path


def local_path(uri: str) -> Path:
    """A file:// URI or plain path as an absolute path. Raises ValueError for another scheme, or another host."""
    if uri.startswith("file:"):
        # No query and no fragment: ? is a wildcard, and # a letter like others.
        path = unquote(uri.removeprefix("file:").removeprefix("//").removeprefix("localhost"))
        if not path.startswith("/"):
            raise ValueError(f"{uri} names a host or a relative path; write file:/// and an absolute path")
        return Path(path)
    if "://" in uri:
        raise ValueError(f"{uri}: this must lie on a file system; choose a file:// URI or a path")
    return Path(os.path.abspath(uri))


def storage_path(uri: str) -> Path:
    """A path at a plain path, or at the URI of any storage that fsspec knows. Raises ValueError."""
    return remote_path(uri) if "://" in uri and not uri.startswith("file://") else local_path(uri)


def write_durably(path: Path, text: str) -> None:
    """Write a file, and the folders that it lies in, so that a crash at any instant leaves the old or the new."""
    if is_remote(path):
        path.write_bytes(text.encode())
        return
    make_folder(path.parent)
    replace_durably(path, text)


def replace_durably(path: Path, text: str) -> None:
    """The same in a folder that must be there: write, fsync, rename, fsync."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those that it lies in, durably; one that is there already is fine."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
