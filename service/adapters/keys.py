"""Secrets in files that only their owner can read."""

import os
import secrets
from pathlib import Path

from service.errors import KeyUnusable


def ensure_key(path: Path, *, setting: str = "TRAINSHED_ADMIN_KEY_FILE") -> str:
    """Return the key in a file; a missing file is created with mode 0600, never wider.

    Raises KeyUnusable if it can be neither read nor created.
    """
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if key := path.read_text().strip():
                return key
            # A crash between creating and writing left it empty; nobody can have used it.
            path.unlink()
            return ensure_key(path, setting=setting)
        with os.fdopen(descriptor, "w") as file:
            key = secrets.token_hex(32)
            file.write(key + "\n")
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise KeyUnusable(
            f"{path}: {error.strerror}; mount the key there, name its file in {setting}, or let the "
            "service write to its home"
        ) from error
    return key


def read_key(path: Path, *, setting: str) -> str:
    """Return the key in a file that somebody else provides, as Kubernetes mounts a Secret. Raises KeyUnusable."""
    remedy = f"{setting} must name a readable file with a key in one line"
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text"
        raise KeyUnusable(f"{path}: {why}; {remedy}") from error
    if not key or len(key.split()) != 1:
        raise KeyUnusable(f"{path}: {'is empty' if not key else 'holds more than one word'}; {remedy}")
    return key
