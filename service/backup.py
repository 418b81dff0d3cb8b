"""Backup and restore of the embedded database and the operator's key: one .tar file, written atomically.

Run directories are not part of it: they are on separate storage, and are the source of truth for runs.
"""

import hashlib
import os
import shutil
import tarfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Literal

from pydantic import BaseModel, ValidationError, computed_field

from service.adapters.sql.backup import check_database, copy_database, dump_command, restore_command, settle
from service.adapters.sql.database import secret_key_beside, sqlite_file
from service.config.settings import Settings
from service.errors import BackupFailed
from service.lifecycle.locks import locked
from train_loop.run_dir import make_folder, sync

_MANIFEST, _DATABASE, _KEY = "manifest.json", "trainshed.db", "admin.key"
_SECRET_KEY = "trainshed.db.key"
_BESIDE = ("-wal", "-shm", "-journal")
"""Suffixes of SQLite's auxiliary files; the old ones would corrupt the restored database."""


class Backup(BaseModel):
    """The manifest.json of a backup."""

    format: Literal[1] = 1
    trainshed: str
    created_at: float
    revision: str
    sha256: dict[str, str]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def holds_secret_key(self) -> bool:
        """Return whether the backup contains the key that decrypts its webhook secrets."""
        return _SECRET_KEY in self.sha256


class Restored(BaseModel):
    """The restored backup, and the paths of the replaced files that were kept."""

    backup: Backup
    kept: list[str]


def back_up(settings: Settings, target: Path) -> Backup:
    """Write a backup; a service may be running. Raises BackupFailed."""
    instead = f"run {dump_command(settings.database, target)}, and keep a copy of {settings.admin_key}"
    database = _embedded(settings, instead)
    if target.exists():
        raise BackupFailed(f"{target} already exists; choose another file name")
    if not target.parent.is_dir():
        raise BackupFailed(f"{target.parent} is not a folder; create it, or choose another path")
    # In the target's folder, so that one rename publishes the backup.
    with TemporaryDirectory(dir=target.parent, prefix=".trainshed-backup-") as folder:
        staged = Path(folder)
        revision = copy_database(database, staged / _DATABASE)
        _copy(settings.admin_key, staged / _KEY)
        names = [_DATABASE, _KEY]
        if (secret_key := secret_key_beside(settings.database)) is not None and secret_key.exists():
            _copy(secret_key, staged / _SECRET_KEY)
            names.append(_SECRET_KEY)
        sums = {name: _sha256(staged / name) for name in names}
        backup = Backup(trainshed=version("trainshed"), created_at=time.time(), revision=revision, sha256=sums)
        (staged / _MANIFEST).write_text(backup.model_dump_json(indent=2))
        _pack(staged, staged / "backup.tar")
        # Verify the backup before publishing it.
        _unpack(staged / "backup.tar", {name: staged / f"read-{name}" for name in sums})
        (staged / "backup.tar").rename(target)
    sync(target.parent)
    return backup


def restore(settings: Settings, source: Path, *, force: bool) -> Restored:
    """Restore a backup into the home and the database. Raises BackupFailed, HomeInUse, and then changes nothing.

    With `force`, existing files are kept under another name; without it, they make the restore fail.
    """
    instead = f"stop every service, run {restore_command(settings.database, source)}, and restore {settings.admin_key}"
    database = _embedded(settings, instead)
    # A key file that TRAINSHED_ADMIN_KEY_FILE names is managed elsewhere: leave it unchanged.
    key = {} if settings.admin_key_file is not None else {_KEY: settings.admin_key}
    targets = {_DATABASE: database, **key}
    if (secret_key := secret_key_beside(settings.database)) is not None:
        targets[_SECRET_KEY] = secret_key
    with locked(settings), ExitStack() as stack:
        if (there := [str(path) for path in targets.values() if path.exists()]) and not force:
            raise BackupFailed(f"{' and '.join(there)} already exist; --force keeps them under another name")
        staged = {name: path.with_name(f".{path.name}.restored") for name, path in targets.items()}
        for path in staged.values():
            stack.callback(path.unlink, missing_ok=True)
        backup = _unpack(source, staged)
        check_database(staged[_DATABASE])
        kept = _replace({staged[name]: path for name, path in targets.items() if name in backup.sha256}, database)
    return Restored(backup=backup, kept=[str(path) for path in kept])


def _embedded(settings: Settings, instead: str) -> Path:
    """Return the file of the embedded database. Raises BackupFailed, with what to run instead, for Postgres."""
    database = sqlite_file(settings.database)
    if database is None:
        raise BackupFailed(f"the database is Postgres, which has its own tools; {instead}")
    # Replace the target of a symbolic link, not the link.
    return database.resolve()


def _pack(folder: Path, tar: Path) -> None:
    descriptor = os.open(tar, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in (_MANIFEST, _DATABASE, _KEY, _SECRET_KEY):
                if (folder / name).exists():
                    archive.add(folder / name, name, filter=_private)
        file.flush()
        os.fsync(descriptor)


def _private(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode, member.uid, member.gid, member.uname, member.gname = 0o600, 0, 0, "", ""
    return member


def _unpack(tar: Path, targets: Mapping[str, Path]) -> Backup:
    """Extract the files of a backup, and check them against its manifest. Raises BackupFailed."""
    try:
        with tarfile.open(tar) as archive:
            backup = Backup.model_validate_json(_member(archive, _MANIFEST).read())
            for name, path in targets.items():
                if name == _SECRET_KEY and not backup.holds_secret_key:
                    continue
                _write(path, _member(archive, name))
                if _sha256(path) != backup.sha256.get(name):
                    raise BackupFailed(f"{tar} is damaged: wrong checksum of {name}; choose another backup")
    except (OSError, tarfile.TarError, ValidationError, KeyError) as error:
        message = str(error).splitlines()[0]
        raise BackupFailed(f"{tar} cannot be restored: {message}; name a file that `trainshed backup` wrote") from error
    return backup


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file


def _write(path: Path, content: IO[bytes]) -> None:
    make_folder(path.parent)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(content, file)
        file.flush()
        os.fsync(descriptor)


def _copy(source: Path, target: Path) -> None:
    try:
        with source.open("rb") as content:
            _write(target, content)
    except OSError as error:
        raise BackupFailed(f"{source} cannot be read: {error.strerror}; start the service once to create it") from error


def _replace(moves: Mapping[Path, Path], database: Path) -> list[Path]:
    """Replace files, and keep the old ones under another name; undo everything on an error."""
    settle(database)
    ending = time.strftime(".before-%Y%m%dT%H%M%SZ", time.gmtime())
    kept = list[Path]()
    with ExitStack() as undo:
        for path in (*(Path(f"{database}{end}") for end in _BESIDE), *moves.values()):
            if path.exists():
                kept.append(path.with_name(path.name + ending))
                # A hard link, so that the file exists at every moment.
                os.link(path, kept[-1])
                undo.callback(kept[-1].replace, path)
        for end in _BESIDE:
            Path(f"{database}{end}").unlink(missing_ok=True)
        for staged, path in moves.items():
            if not path.exists():
                undo.callback(path.unlink, missing_ok=True)
            staged.replace(path)
            sync(path.parent)
        undo.pop_all()
    return kept


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
