"""Checks of the query: only parameters of the call, each once unless it takes several values."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import get_args, get_origin

from fastapi import Depends, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Param, Query
from fastapi.routing import APIRoute
from pydantic import BeforeValidator

from service.errors import InvalidRequest
from train_loop.spec import Problem

ANY_CASE = BeforeValidator(lambda given: given.upper() if isinstance(given, str) else given)
"""Validator that accepts upper-case enum values in any case."""
MAX_VALUES = 16
"""Maximum number of values of one parameter, and of label filters: a job has at most as many labels."""
_MAX_PARAMETERS = 64
_MAX_LENGTH = 1024
"""Maximum total length of a name and its value, in characters; cursors, labels and search texts are shorter."""
_FAMILY = ".KEY"
"""Suffix of a declared parameter that covers many names: `label.KEY` covers `label.team`."""


async def check_query(request: Request) -> None:
    """Reject unknown and repeated parameters instead of ignoring them. Raises InvalidRequest."""
    if not request.scope["query_string"]:
        return
    known, pairs = _parameters(request.scope["route"]), request.query_params.multi_items()
    given = Counter(name for name, _ in pairs)
    # Checked before names are compared: a query may contain thousands of parameters.
    if problems := _too_much(pairs, known):
        raise InvalidRequest(problems)
    problems = [
        Problem(f"/query/{name}", _fault(name, known))
        for name, times in given.items()
        if times > known.get(_declared(name, known), 0)
    ]
    if problems:
        raise InvalidRequest(problems)


def _too_much(pairs: Sequence[tuple[str, str]], known: Mapping[str, float]) -> list[Problem]:
    """Return the limits that a query exceeds. Limits exist because each filter costs database time."""
    if len(pairs) > _MAX_PARAMETERS:
        return [Problem("/query", f"{len(pairs)} parameters are given; at most {_MAX_PARAMETERS} are allowed")]
    families = Counter(declared for name, _ in pairs if (declared := _declared(name, known)) in known)
    most = [
        Problem(f"/query/{name}", f"{times} values are given; at most {MAX_VALUES} are allowed, leave some out")
        for name, times in families.items()
        if times > MAX_VALUES and (name.endswith(_FAMILY) or math.isinf(known[name]))
    ]
    long = [
        Problem(f"/query/{name[:64]}", f"it has {len(name) + len(value)} characters; at most {_MAX_LENGTH} are allowed")
        for name, value in pairs
        if len(name) + len(value) > _MAX_LENGTH
    ]
    return [*most, *long]


CHECKED = Depends(check_query)
"""Query check for calls without a key; other calls check key and query together."""


def _parameters(route: APIRoute) -> Mapping[str, float]:
    """Return the maximum number of values of each parameter of a call."""
    fields = get_flat_params(route.dependant)
    # The fields of a query model are not Param instances.
    wanted = [
        field for field in fields if isinstance(field.field_info, Query) or not isinstance(field.field_info, Param)
    ]
    return {field.alias: _times(field.field_info.annotation) for field in wanted}


def _times(annotation: object) -> float:
    return math.inf if any(get_origin(part) is list for part in (annotation, *get_args(annotation))) else 1


def _declared(name: str, known: Mapping[str, float]) -> str:
    """Return the declared parameter that a name belongs to."""
    beginning, _, rest = name.partition(".")
    family = f"{beginning}{_FAMILY}"
    return family if rest and family in known else name


def _fault(name: str, known: Mapping[str, float]) -> str:
    if _declared(name, known) in known:
        return "it takes one value, and several are given; leave the others out"
    near = get_close_matches(name, known, 1)
    hint = f", did you mean {near[0]}?" if near else ";"
    return f"unknown parameter{hint} this call has {', '.join(sorted(known)) or 'none'}"
