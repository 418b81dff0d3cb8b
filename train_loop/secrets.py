"""What the environment keeps secret, and a text without it."""

import os
import re
from collections.abc import Callable, Mapping

_NAMES = re.compile(r"secret|token|passw(or)?d|credential|api_?key|access_?key|private_?key|auth$|_key$", re.IGNORECASE)
_LEAST = 6
"""Letters of a secret; shorter ones are parts of words, and are no secrets."""
MASK = "***"


def masker(environment: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """A function that puts *** in the place of the values of variables whose names say that they are secret."""
    values = {value for name, value in environment.items() if _NAMES.search(name) and len(value) >= _LEAST}
    # A path is a place to look, and often a part of others.
    secrets = sorted((value for value in values if not value.startswith("/")), key=len, reverse=True)
    if not secrets:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, secrets)))
    return lambda text: pattern.sub(MASK, text)
