"""The settings of a running service, as its home records them, compared with the settings of a command."""

import hashlib
import json
import re
import secrets
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from service.config.settings import Settings
from service.domain.access.rate_limit import Rate

_ROUNDS = 100_000
"""Rounds of the digests of secrets, so that a reader of the record cannot try many values."""
_SECRET = re.compile(r"(://)[^/@\s]+(?=@)|([?&][^=&]*(?:password|secret|token|key)[^=&]*=)[^&\s\"]+", re.IGNORECASE)
"""User and password of a URI, or a secret among its parameters; the groups are what stays."""


class SettingsRecord(BaseModel):
    """The effective settings of a service, by variable. Secrets are salted digests."""

    salt: str = ""
    values: dict[str, str] = {}

    @classmethod
    def of(cls, settings: Settings, salt: str | None = None) -> "SettingsRecord":
        """Return the record of settings. Records with the same salt can be compared."""
        salt = secrets.token_hex(16) if salt is None else salt
        names = Settings.model_fields.keys() - {"home"}
        return cls(salt=salt, values={variable(name): _text(getattr(settings, name), salt) for name in sorted(names)})

    def differences(self, settings: Settings) -> list[str]:
        """Return one line per setting that differs. An older service lacks the newest settings: they are skipped."""
        ours = SettingsRecord.of(settings, self.salt).values
        return [
            f"{name}: the service has {self.values[name]}, this command has {ours[name]}"
            for name in ours
            if self.values.get(name, ours[name]) != ours[name]
        ]


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{Settings.model_config['env_prefix']}{name.upper()}"


def _text(value: Any, salt: str) -> str:
    """Return a value as text, with a digest in the place of its secrets."""
    if value is None or value == ():
        return "no value"
    found = list[str]()

    def plain(part: Any) -> Any:
        if isinstance(part, SecretStr):
            found.append(part.get_secret_value())
            return "***"
        return asdict(part) if is_dataclass(part) and not isinstance(part, type) else str(part)

    def hide(secret: re.Match[str]) -> str:
        found.append(secret[0])
        return f"{secret[1] or secret[2]}***"

    is_text = isinstance(value, str | Path | Rate)
    text = _SECRET.sub(hide, str(value) if is_text else json.dumps(value, default=plain, sort_keys=True))
    return f"{text} (digest {_digest(found, salt)})" if found else text


def _digest(found: list[str], salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", "\n".join(found).encode(), salt.encode(), _ROUNDS).hex()[:12]
