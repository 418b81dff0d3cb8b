"""Settings from the environment, with one error line per invalid TRAINSHED_ variable. Secrets are masked."""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from service.config.settings import Settings

_PREFIX = "TRAINSHED_"
_OTHERS = ("URL", "KEY", "EMBEDDED_RAY")
"""Variables of clients, and internal variables between the service's own processes."""
_TESTS = _PREFIX + "TEST_"
"""Prefix of the variables that only tests read."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL")
_USER_INFO = re.compile(r"://[^/@\s]*@")


class BadSettings(ValueError):
    """Invalid configuration; `problems` has one line per variable."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings in the environment of this process. Raises BadSettings."""
    try:
        return Settings()
    except ValidationError as error:
        raise BadSettings(tuple(dict.fromkeys(_problem(one, environment) for one in error.errors()))) from None


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return one warning per unknown TRAINSHED_ variable, with the closest known name."""
    known = [*(_PREFIX + name.upper() for name in Settings.model_fields), *(_PREFIX + name for name in _OTHERS)]
    ours = (name for name in sorted(environment) if name.upper().startswith(_PREFIX))
    found = [name for name in ours if name.upper() not in known and not name.upper().startswith(_TESTS)]
    return [f"unknown setting {name} has no effect; {_remedy(name, known)}" for name in found]


def _remedy(name: str, known: list[str]) -> str:
    near = get_close_matches(name.upper().removeprefix(_PREFIX), [one.removeprefix(_PREFIX) for one in known], n=1)
    return f"did you mean {_PREFIX}{near[0]}?" if near else "unset it"


def _problem(error: ErrorDetails, environment: Mapping[str, str]) -> str:
    """Return an error line: name, value, rule and remedy."""
    rule = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        # The rule is about several variables, and its text names them.
        return _USER_INFO.sub("://***@", rule)
    field, *inside = (str(part) for part in error["loc"])
    name = _PREFIX + field.upper()
    value = next((given for given_name, given in environment.items() if given_name.upper() == name), "")
    place = f" at {'/'.join(inside)}" if inside else ""
    line = f"{name}={value!r}{place}: {rule}; {_meaning(field)}"
    return _USER_INFO.sub("://***@", line.replace(value, "***") if value and _SECRET.search(name) else line)


def _meaning(name: str) -> str:
    field = Settings.model_fields[name]
    default = "unset it for the default" + (f", {field.default}" if field.default not in (None, (), {}) else "")
    plain = field.default_factory is None
    return "; ".join(filter(None, (field.description, default if plain else "unset it for the default")))
