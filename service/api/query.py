"""What a query may say: the parameters that the call has, each of them once unless it takes several values."""

import math
from collections import Counter
from collections.abc import Mapping
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
"""For words that are written in capitals here, and otherwise elsewhere."""
_FAMILY = ".KEY"
"""How the name of a parameter ends that stands for many: `label.KEY` for `label.team`."""


async def check_query(request: Request) -> None:
    """Refuse what the call does not know, rather than answer another question than was asked. Raises InvalidRequest."""
    if not request.scope["query_string"]:
        return
    known = _parameters(request.scope["route"])
    given = Counter(name for name, _ in request.query_params.multi_items())
    problems = [
        Problem(f"/query/{name}", _fault(name, known))
        for name, times in given.items()
        if times > known.get(_declared(name, known), 0)
    ]
    if problems:
        raise InvalidRequest(problems)


CHECKED = Depends(check_query)
"""For calls without a key; the others' keys and queries are looked at together."""


def _parameters(route: APIRoute) -> Mapping[str, float]:
    """How often each parameter of a call may be given."""
    fields = get_flat_params(route.dependant)
    # The fields of a model that stands for a query are no Param at all.
    wanted = [
        field for field in fields if isinstance(field.field_info, Query) or not isinstance(field.field_info, Param)
    ]
    return {field.alias: _times(field.field_info.annotation) for field in wanted}


def _times(annotation: object) -> float:
    return math.inf if any(get_origin(part) is list for part in (annotation, *get_args(annotation))) else 1


def _declared(name: str, known: Mapping[str, float]) -> str:
    """The parameter that a name belongs to."""
    beginning, _, rest = name.partition(".")
    family = f"{beginning}{_FAMILY}"
    return family if rest and family in known else name


def _fault(name: str, known: Mapping[str, float]) -> str:
    if _declared(name, known) in known:
        return "it takes one value, and several are given; leave the others out"
    near = get_close_matches(name, known, 1)
    hint = f", did you mean {near[0]}?" if near else ";"
    return f"there is no such parameter{hint} this call has {', '.join(sorted(known)) or 'none'}"
