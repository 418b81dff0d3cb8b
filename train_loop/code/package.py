"""Packages of users' own code: read within limits, identified by their SHA-256, unpacked without right to write.

The SHA-256 is that of the lines which `sha256sum` prints for all files in the order of their names. It does not depend
on the form of the package: folder, wheel or zip file.
"""

import hashlib
import io
import os
import stat
import tempfile
import unicodedata
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from train_loop.code.cleanup import hold, is_private, remove, remove_unused
from train_loop.errors import ModelError
from train_loop.run_dir import local_path
from train_loop.spec.text.printable import hidden_character
from train_loop.system.input_files import read_input

MOST_FILES = 2000
MOST_BYTES = 64 * 2**20
"""Maximum bytes of all files of a package, and of the file of a wheel."""
_DEEPEST = 16
_LONGEST = 240
"""Maximum bytes of a file's path in a package."""
_ENDINGS = (".whl", ".zip")
_LIMITS = f"a package has at most {MOST_FILES} files and {MOST_BYTES >> 20} MiB; leave out data and weights"
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError)
"""Errors of zipfile and its decompressors, which have no common class."""


@dataclass(frozen=True)
class Package:
    """The files of a package."""

    uri: str
    """Place of the package, for messages."""
    files: dict[str, bytes]
    """Content by path, with /, sorted."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the paths and contents of all files."""
        lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in self.files.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def zipped(self) -> bytes:
        """Return the package as a zip file, whose bytes depend on the files alone."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self.files.items():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        return packed.getvalue()


def read_package(uri: str) -> Package:
    """Return the package at a URI. Raises ModelError if it breaks a limit, DataError for a forbidden place."""
    try:
        path = local_path(uri)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if path.is_dir():
        return _package(uri, _from_folder(uri, path))
    if not path.exists():
        raise ModelError(f"{uri} not found; give a folder, a wheel or a zip file, visible from service and workers")
    if path.suffix not in _ENDINGS:
        raise ModelError(f"{uri} is neither a folder nor one of {', '.join(_ENDINGS)}; choose one of them")
    return read_zipped(read_input(path, most=MOST_BYTES), uri)


def read_zipped(data: bytes, uri: str) -> Package:
    """Return the package in the bytes of a wheel or zip file. Raises ModelError."""
    return _package(uri, _from_zip(uri, data))


def code_home() -> Path:
    """Return the folder of this user's unpacked packages on this host."""
    return Path(tempfile.gettempdir()) / f"trainshed-code-{os.getuid()}"


def unpacked(sha256: str) -> Path:
    """Return the folder into which `unpack` puts the package with a SHA-256."""
    return code_home() / sha256


def unpack(package: Package) -> Path:
    """Return a folder with the files of a package that only this user can open.

    All processes of the user share it. Its content is compared with the package before each use, and it stays until
    this process ends. Packages that no process uses are removed if there are newer ones.
    """
    folder = unpacked(package.sha256)
    home = folder.parent
    home.mkdir(mode=0o700, exist_ok=True)
    if not is_private(home):
        raise PermissionError(f"{home} is not a folder of this user alone; remove it")
    hold(folder)
    remove_unused(home)
    if _holds(folder, package):
        return folder
    work = Path(tempfile.mkdtemp(dir=home))
    try:
        _write(package, work)
        if folder.exists():
            # Another process may still read it.
            folder.rename(home / f"old-{uuid.uuid4().hex}")
        work.rename(folder)
    except OSError:
        remove(work)
        # Another process of this user may have been faster.
        if not _holds(folder, package):
            raise
    return folder


def _write(package: Package, folder: Path) -> None:
    for name, content in package.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o444)
    # Code that wrote into its folder would change the modules of other attempts.
    for place in _folders(folder):
        place.chmod(0o555)


def _folders(folder: Path) -> list[Path]:
    return [folder, *(place for place in folder.rglob("*") if place.is_dir())]


def _holds(folder: Path, package: Package) -> bool:
    """Return whether a folder has exactly the files of a package."""
    try:
        found = {name: folder / name for name in _walk("", folder, folder)}
        # Python would run bytecode that somebody has put here.
        if found.keys() != package.files.keys() or list(folder.rglob("*.pyc")):
            return False
        return all(path.read_bytes() == package.files[name] for name, path in found.items())
    except (OSError, ModelError):
        return False


def _package(uri: str, files: dict[str, bytes]) -> Package:
    if not any(name.endswith(".py") for name in files):
        raise ModelError(f"{uri} holds no Python file; give the folder with the code, or its parent")
    alike = dict[str, str]()
    for name in files:
        if (other := alike.setdefault(unicodedata.normalize("NFC", name).casefold(), name)) != name:
            raise ModelError(f"{uri} holds {other} and {name}, one file on some file systems; rename one")
        if files.keys() & {str(parent) for parent in PurePosixPath(name).parents}:
            raise ModelError(f"{uri} holds {name} below a file of the same name; pack it again")
    return Package(uri, dict(sorted(files.items())))


def _from_folder(uri: str, folder: Path) -> dict[str, bytes]:
    root = Path(os.path.realpath(folder))
    names = list(_walk(uri, root, root))
    sizes = sum((root / name).stat().st_size for name in names)
    if sizes > MOST_BYTES:
        raise ModelError(f"{uri} holds {sizes >> 20} MiB; {_LIMITS}")
    # A folder that is a package itself keeps its name.
    before = f"{_identifier(uri, folder.name)}/" if "__init__.py" in names else ""
    files, left = dict[str, bytes](), MOST_BYTES
    for name in names:
        files[before + name] = content = read_input(root / name, most=left)
        left -= len(content)
    return files


def _identifier(uri: str, name: str) -> str:
    if not name.isidentifier():
        raise ModelError(f"{uri} has __init__.py, but {name!r} cannot be the name of a package; rename the folder")
    return name


def _walk(uri: str, root: Path, folder: Path, depth: int = 0) -> Iterator[str]:
    """Yield the files below a folder, relative to the root, without hidden files and bytecode."""
    if depth > _DEEPEST:
        raise ModelError(f"{uri} has folders in more than {_DEEPEST} levels; remove some")
    count = 0
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") or entry.name == "__pycache__" or entry.name.endswith(".pyc"):
            continue
        path = Path(entry.path)
        if entry.is_symlink() and (path.is_dir() or not Path(os.path.realpath(path)).is_relative_to(root)):
            raise ModelError(f"{uri} holds the link {path.relative_to(root)}; links must lead to files of the folder")
        for name in _walk(uri, root, path, depth + 1) if entry.is_dir() else [str(path.relative_to(root))]:
            count += 1
            if count > MOST_FILES:
                raise ModelError(f"{uri} holds more than {MOST_FILES} files; {_LIMITS}")
            _check_name(uri, name)
            yield name


def _from_zip(uri: str, data: bytes) -> dict[str, bytes]:
    files, left = dict[str, bytes](), MOST_BYTES
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            _check_entries(uri, entries)
            for entry in entries:
                # The sizes that an archive states may be wrong.
                with archive.open(entry) as opened:
                    files[entry.filename] = content = opened.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise ModelError(f"{uri} holds more than {MOST_BYTES >> 20} MiB; {_LIMITS}")
    except ModelError:
        raise
    except _DAMAGED as error:
        raise ModelError(f"{uri} is not a complete wheel or zip file: {error}; pack it again") from error
    except Exception as error:  # zlib, bz2 and lzma have errors without a common class
        raise ModelError(f"{uri} cannot be unpacked: {type(error).__name__}: {error}; pack it again") from error
    return {name: content for name, content in files.items() if not _is_ignored(name)}


def _check_entries(uri: str, entries: list[zipfile.ZipInfo]) -> None:
    if len(entries) > MOST_FILES:
        raise ModelError(f"{uri} holds {len(entries)} files; {_LIMITS}")
    if len({entry.filename for entry in entries}) < len(entries):
        raise ModelError(f"{uri} holds a file twice; pack it again")
    for entry in entries:
        # zipfile cuts a name at its first NUL.
        if "\0" in entry.orig_filename:
            raise ModelError(f"{uri} holds the name {entry.orig_filename[:_LONGEST]!r}, which has a NUL; pack it again")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise ModelError(f"{uri} holds the link {entry.filename!r}; pack the file itself")
        _check_name(uri, entry.filename)


def _check_name(uri: str, name: str) -> None:
    """Raise ModelError for a path that could leave the folder into which a package is unpacked, or that is too long."""
    steps = name.split("/")
    unclear = hidden_character(name) is not None or "\\" in name or ":" in name
    if unclear or not set(steps).isdisjoint({"", ".", ".."}) or len(name.encode(errors="replace")) > _LONGEST:
        raise ModelError(
            f"{uri} holds a file with the path {name[:_LONGEST]!r}; expected a relative path of at most {_LONGEST} "
            "characters without . and .. and without control characters"
        )


def _is_ignored(name: str) -> bool:
    steps = name.split("/")
    return any(step.startswith(".") or step == "__pycache__" for step in steps) or name.endswith(".pyc")
