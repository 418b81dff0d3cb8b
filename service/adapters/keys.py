"""Secrets in files that only their owner can read."""

import os
import secrets
from pathlib import Path


def ensure_key(path: Path) -> str:
    """The key in a file; created with mode 0600, never wider, where there is none."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if key := path.read_text().strip():
            return key
        # A crash between creating and writing left it empty; nobody can have used it.
        path.unlink()
        return ensure_key(path)
    with os.fdopen(descriptor, "w") as file:
        key = secrets.token_hex(32)
        file.write(key + "\n")
        file.flush()
        os.fsync(descriptor)
    return key
