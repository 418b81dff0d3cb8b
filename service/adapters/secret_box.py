"""Encryption of the secrets in the database: Fernet, with the operator's keys."""

import base64
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from service.adapters.key_files import check_mode
from service.errors import KeyUnusable, SecretsUnreadable

_SEALED = "fernet:"
"""Prefix of encrypted secrets. Secrets from versions without encryption start with whsec_."""


class SecretBox:
    """A box that encrypts secrets with its first key and decrypts with any key. Without keys, secrets stay plain."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = tuple(_fernet(key) for key in keys)

    @property
    def encrypts(self) -> bool:
        """Return whether there is a key."""
        return bool(self._keys)

    def use(self, keys: Sequence[str]) -> None:
        """Replace the keys: they may become known only when the database is open."""
        self._keys = tuple(_fernet(key) for key in keys)

    def seal(self, secret: str) -> str:
        """Return a secret in its stored form: encrypted if there is a key."""
        return _SEALED + self._keys[0].encrypt(secret.encode()).decode() if self._keys else secret

    def open(self, stored: str) -> str:
        """Decrypt a stored secret; return a plain one unchanged. Raises SecretsUnreadable if no key decrypts it."""
        if not stored.startswith(_SEALED):
            return stored
        for key in self._keys:
            with suppress(InvalidToken):
                return key.decrypt(stored.removeprefix(_SEALED)).decode()
        raise SecretsUnreadable

    def reseal(self, stored: str) -> str:
        """Encrypt a stored secret with the first key; return it unchanged if it already is.

        Raises SecretsUnreadable if no key decrypts it.
        """
        secret = self.open(stored)
        if self._keys and stored.startswith(_SEALED):
            with suppress(InvalidToken):
                self._keys[0].decrypt(stored.removeprefix(_SEALED))
                return stored
        return self.seal(secret)


def _fernet(key: str) -> Fernet:
    # A key may be any text with enough entropy. Fernet needs exactly 32 bytes.
    return Fernet(base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest()))


def read_secret_keys(path: Path) -> tuple[str, ...]:
    """Return the keys in a file, one per line. Raises KeyUnusable if the file or a key is invalid."""
    try:
        check_mode(path)
        keys = tuple(path.read_text().split())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise KeyUnusable(f"{path}: {why}; it must be a readable file with one key per line") from error
    if not keys or min(map(len, keys)) < 32:
        raise KeyUnusable(f"{path}: a key must have at least 32 characters; create one with `openssl rand -hex 32`")
    return keys
