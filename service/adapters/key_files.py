"""Secrets in files that only their owner can read."""

import os
import secrets
import stat
from pathlib import Path

import structlog

from service.errors import KeyUnusable

log = structlog.get_logger(__name__)
_SHORT, _GUESSED = 32, 8
"""Lengths in characters: below the first, a warning is logged; below the second, the key is rejected."""


def ensure_key(path: Path, *, setting: str = "TRAINSHED_ADMIN_KEY_FILE") -> str:
    """Return the key in a file. Create a missing file, with mode 0600 from the start.

    Raises KeyUnusable if the file can be neither read nor created, or if others can guess or replace its key.
    """
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if key := path.read_text().strip():
                _check_secret(path, key)
                return key
            # A crash between creating and writing the file left it empty. It never held a key, so create it again.
            path.unlink()
            return ensure_key(path, setting=setting)
        with os.fdopen(descriptor, "w") as file:
            key = secrets.token_hex(32)
            file.write(key + "\n")
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise KeyUnusable(
            f"{path}: {error.strerror}; mount the key there, set {setting} to its file, or make the home of the "
            "service writable"
        ) from error
    except UnicodeDecodeError as error:
        raise KeyUnusable(f"{path}: is not text; delete it, and the next start creates another key") from error
    return key


def read_key(path: Path, *, setting: str) -> str:
    """Return the key in a file that the operator provides, e.g. a mounted Kubernetes Secret.

    Raises KeyUnusable if the file is missing or invalid.
    """
    remedy = f"{setting} must name a readable file with a key in one line"
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise KeyUnusable(f"{path}: {why}; {remedy}") from error
    if not key or len(key.split()) != 1:
        raise KeyUnusable(f"{path}: {'is empty' if not key else 'contains more than one word'}; {remedy}")
    _check_secret(path, key)
    return key


def _check_secret(path: Path, key: str) -> None:
    """Log a warning if the key is short or others may read it.

    Raises KeyUnusable if the key can be guessed or others may write to its file.
    """
    if len(key) < _GUESSED:
        raise KeyUnusable(
            f"{path}: the key has only {len(key)} characters and can be guessed; use {_SHORT} or more, e.g. from "
            "`openssl rand -hex 32`"
        )
    if len(key) < _SHORT:
        log.warning("key_is_short", file=str(path), characters=len(key), remedy=f"use {_SHORT} or more")
    check_mode(path)


def check_mode(path: Path) -> None:
    """Log a warning if others may read the file, as mounted Secrets allow.

    Raises KeyUnusable if others may write to it.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o002:
        raise KeyUnusable(f"{path}: other users may write to it ({mode:04o}); chmod 600, and replace the key")
    if mode & 0o024:
        log.warning("key_is_readable", file=str(path), mode=f"{mode:04o}", remedy="chmod 600, or 640 for its group")
