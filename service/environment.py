"""Reads the settings, and says of each TRAINSHED_ variable what is wrong with it, in a line, without its secrets."""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from service.settings import Settings

_PREFIX = "TRAINSHED_"
_OTHERS = ("URL", "KEY", "EMBEDDED_RAY", "AHEAD_UNTIL")
"""What callers are told, and what our own processes tell each other."""
_TESTS = _PREFIX + "TEST_"
"""Begins the variables that only tests read."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL")
_USER_INFO = re.compile(r"://[^/@\s]*@")


class BadSettings(ValueError):
    """The environment says what cannot be; `problems` has a line for each variable."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """What the environment of this process says. Raises BadSettings."""
    try:
        return Settings()
    except ValidationError as error:
        raise BadSettings(tuple(dict.fromkeys(_problem(one, environment) for one in error.errors()))) from None


def strangers(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each TRAINSHED_ variable that nobody reads, with the nearest one that somebody does."""
    known = [*(_PREFIX + name.upper() for name in Settings.model_fields), *(_PREFIX + name for name in _OTHERS)]
    ours = (name for name in sorted(environment) if name.upper().startswith(_PREFIX))
    found = [name for name in ours if name.upper() not in known and not name.upper().startswith(_TESTS)]
    return [f"{name} is no setting and does nothing; {_remedy(name, known)}" for name in found]


def _remedy(name: str, known: list[str]) -> str:
    near = get_close_matches(name.upper().removeprefix(_PREFIX), [one.removeprefix(_PREFIX) for one in known], n=1)
    return f"did you mean {_PREFIX}{near[0]}?" if near else "unset it"


def _problem(error: ErrorDetails, environment: Mapping[str, str]) -> str:
    """Name, value, rule and remedy."""
    rule = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        # It is about several of them, and names them itself.
        return _USER_INFO.sub("://***@", rule)
    field, *inside = (str(part) for part in error["loc"])
    name = _PREFIX + field.upper()
    value = next((given for given_name, given in environment.items() if given_name.upper() == name), "")
    place = f" at {'/'.join(inside)}" if inside else ""
    line = f"{name}={value!r}{place}: {rule}; {_meaning(field)}"
    return _USER_INFO.sub("://***@", line.replace(value, "***") if value and _SECRET.search(name) else line)


def _meaning(name: str) -> str:
    field = Settings.model_fields[name]
    default = "leave it out for the default" + (f", {field.default}" if field.default not in (None, (), {}) else "")
    plain = field.default_factory is None
    return "; ".join(filter(None, (field.description, default if plain else "leave it out for the default")))
