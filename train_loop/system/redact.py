"""Masking of secrets from environment variables in texts."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

_NAMES = re.compile(
    r"secret|token(?!iz)|(^|_)(pass|pwd|pw|auth|pat|jwt|dsn|cookie)$|passw(or)?d|passphrase|credential|bindpw"
    r"|(api|access|private|account|signing|encryption)_?keys?|(?<!sort)(?<!primary)(?<!foreign)(?<!partition)_keys?$"
    r"|connection_?string",
    re.IGNORECASE,
)
_IN_VALUES = re.compile(
    # A password in a URL, also one with a slash; a long name in a URL, which is a token; a password of a database.
    r"://[^/@:\s]*:(?!\d+/)([^/@\s]+|[^@\s,\"']+)@|https?://([^/@:\s]{20,})@|\b(?:password|pwd)\s*=\s*([^\s;&'\"]+)",
    re.IGNORECASE,
)
_LEAST = 6
"""Minimum length of a secret; shorter values occur in ordinary words."""
MASK = "***"


def may_hold_secret(name: str, value: str) -> bool:
    """Return whether a variable has a secret name, also for a secret's file, or a value with a password."""
    return bool((_NAMES.search(name) and not value.isdigit()) or _IN_VALUES.search(value))


def redactor(environment: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """Return a function that masks secrets in a text: values of variables with secret names, and passwords."""
    values = {value for name, value in environment.items() if _NAMES.search(name)}
    values |= {part for value in environment.values() for found in _IN_VALUES.findall(value) for part in found}
    secrets = sorted((value for value in values if _is_secret(value)), key=len, reverse=True)
    if not secrets:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, secrets)))
    return lambda text: pattern.sub(MASK, text)


def _is_secret(value: str) -> bool:
    # The path of a secret's file is not secret, nor is a number such as a count of tokens.
    return len(value) >= _LEAST and not value.isdigit() and not (value.startswith("/") and Path(value).exists())
