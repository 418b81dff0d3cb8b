"""What the environment keeps secret, and a text without it."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

_NAMES = re.compile(
    r"secret|token(?!iz)|(^|_)(pass|pwd|auth|apikey)$|passw(or)?d|passphrase|credential|(api|access|private|account)_?key"
    r"|(?<!sort)(?<!primary)(?<!foreign)(?<!partition)_key$|connection_?string",
    re.IGNORECASE,
)
_IN_URLS = re.compile(r"://[^/@:\s]*:([^/@\s]+)@")
_LEAST = 6
"""Letters of a secret; shorter ones are parts of words, and are no secrets."""
MASK = "***"


def masker(environment: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """A function that puts *** in the place of the values of variables whose names say that they are secret."""
    values = {value for name, value in environment.items() if _NAMES.search(name)}
    values |= {found for value in environment.values() for found in _IN_URLS.findall(value)}
    secrets = sorted((value for value in values if _is_secret(value)), key=len, reverse=True)
    if not secrets:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, secrets)))
    return lambda text: pattern.sub(MASK, text)


def _is_secret(value: str) -> bool:
    # Neither the path of a file with a secret is one, nor how many tokens there are of something.
    return len(value) >= _LEAST and not value.isdigit() and not (value.startswith("/") and Path(value).exists())
