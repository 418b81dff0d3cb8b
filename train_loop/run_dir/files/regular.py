"""Opening of files and folders in a run directory: those below it, and nothing that they or their folders link to.

The API shows what run directories contain, and tools of the service read checkpoints. A user who can write in one could
otherwise read files that only the service may read, or hold up a reader with a FIFO.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

# With O_PATH, a folder needs no read permission, and network file systems only look it up.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, the open of a FIFO would wait for its writer.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFDIR: "folder",
    stat.S_IFREG: "file",
}


class IrregularFileError(OSError):
    """A link, FIFO, socket, device or folder in the place of a regular file of a run directory, or of its folder."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(errno.EINVAL, kind, path)

    def __str__(self) -> str:
        return (
            f"{self.filename} is a {self.strerror}; only regular files and folders of a run directory are used, "
            "remove it and copy the file itself there"
        )

    def __reduce__(self) -> tuple[type["IrregularFileError"], tuple[str, str]]:
        return type(self), (str(self.filename), str(self.strerror))


def run_dir_of(path: Path) -> Path:
    """Return the run directory of a file in its `attempts/<n>/`; the folder of another file."""
    found = (folder for folder in path.parents if folder.parent.name == "attempts" and folder.name.isdigit())
    return next((folder.parent.parent for folder in found), path.parent)


def open_regular(path: Path, *, below: Path) -> BufferedReader:
    """Open a local file for reading. Links that lead to the folder `below` are followed, later ones are not.

    Raises IrregularFileError, FileNotFoundError, OSError.
    """
    return os.fdopen(_open(path, below, os.O_RDONLY), "rb")


def append_regular(path: Path, *, below: Path) -> int:
    """Return the descriptor of a local file that is open for reading and appending; create it if it is missing.

    Raises IrregularFileError, OSError.
    """
    return _open(path, below, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def size_of_regular(path: Path, *, below: Path) -> int:
    """Return a local file's size in bytes. Raises IrregularFileError, FileNotFoundError, OSError."""
    folder = _open_folder(path.parent, below)
    try:
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        raise _named(error, path) from error
    finally:
        os.close(folder)
    _check_regular(path, found)
    return found.st_size


def list_regular(folder: Path, *, below: Path) -> list[str]:
    """Return the names in a local folder. Raises IrregularFileError, FileNotFoundError, OSError."""
    with folder_below(folder, below) as readable:
        return os.listdir(readable)


@contextmanager
def folder_below(folder: Path, below: Path) -> Iterator[int]:
    """Open a local folder for the body, without links below `below`. Raises IrregularFileError, OSError."""
    place = _open_folder(folder, below)
    try:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
    except OSError as error:
        raise _named(error, folder) from error
    finally:
        os.close(place)
    try:
        yield readable
    finally:
        os.close(readable)


def _open(path: Path, below: Path, flags: int) -> int:
    folder = _open_folder(path.parent, below)
    try:
        descriptor = os.open(path.name, flags | _FILE, 0o666, dir_fd=folder)
    except OSError as error:
        _check_regular(path, _status(path.name, folder))
        raise _named(error, path) from error
    finally:
        os.close(folder)
    try:
        _check_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_folder(folder: Path, below: Path) -> int:
    """Return the descriptor of a folder, opened step by step without links below `below`."""
    steps = folder.relative_to(below).parts if folder.is_relative_to(below) else ("..",)
    # Manifests and metadata contain names of files.
    if ".." in steps:
        raise IrregularFileError(str(folder), "path that leads out of its run directory")
    place, descriptor = below, os.open(below, _FOLDER)
    for step in steps:
        place, outer = place / step, descriptor
        try:
            descriptor = os.open(step, _FOLDER | os.O_NOFOLLOW, dir_fd=outer)
        except OSError as error:
            found = _status(step, outer)
            if found is not None and stat.S_ISLNK(found.st_mode):
                raise _irregular(place, found) from error
            raise _named(error, place) from error
        finally:
            os.close(outer)
    return descriptor


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


def _check_regular(path: Path, found: os.stat_result | None) -> None:
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise _irregular(path, found)


def _irregular(path: Path, found: os.stat_result) -> IrregularFileError:
    return IrregularFileError(str(path), _KINDS.get(stat.S_IFMT(found.st_mode), "device"))


def _named(error: OSError, path: Path) -> OSError:
    """Return an error with the whole path, which callers show and check, in place of a name in an open folder."""
    return OSError(error.errno, error.strerror, str(path))
