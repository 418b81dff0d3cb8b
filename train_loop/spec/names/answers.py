"""Answers to fields and values that a spec does not have: misspelt ones, those of other tools, and those to come."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from train_loop.spec.base import Only
from train_loop.spec.names.spellings import LONGEST, REWRITTEN, normalised
from train_loop.spec.names.table import FIELDS, NAMES, TO_COME

_UNKNOWN = "no such field"
_MOST_LONGER = 3


def unknown_field(place: Sequence[str], model: type[BaseModel]) -> str:
    """Return the message about an unknown field at a place of a spec: its likely meaning, or that it is to come."""
    rewritten = (f"{section}.{name}" for section, name in REWRITTEN)
    name, fields = place[-1][:LONGEST], [*dict.fromkeys((*field_paths(model), *rewritten))]
    known = normalised(name)
    elsewhere = _outermost([path for path in fields if path.rpartition(".")[2] == known])
    if known in TO_COME and not elsewhere:
        return f"{'.'.join(place)} is not supported yet; remove it"
    beside = {path.rpartition(".")[2]: path for path in fields if path.rpartition(".")[0] == ".".join(place[:-1])}
    if (other := NAMES.get(known)) is not None:
        # A part may have its own field with the same meaning, such as learning_rate of a group.
        leaves = {path: path.rpartition(".")[2] for path in other.fields}
        own = [leaf for path, leaf in leaves.items() if beside.get(leaf, path) != path]
        return f"{_UNKNOWN}; use {' and '.join(own)}" if len(place) > 2 and own else other.answer
    if elsewhere:
        return f"{_UNKNOWN} here; did you mean {' or '.join(elsewhere[:3])}?"
    if near := difflib.get_close_matches(known, beside, n=1, cutoff=0.7) or _longer(known, beside):
        return f"{_UNKNOWN}; did you mean {' or '.join(near)}?"
    names = dict.fromkeys(path.rpartition(".")[2] for path in fields)
    if near := difflib.get_close_matches(known, [*names, *FIELDS], n=1, cutoff=0.8):
        meant = _outermost([path for path in fields if path.rpartition(".")[2] == near[0]]) or [FIELDS[near[0]]]
        return f"{_UNKNOWN}; did you mean {' or '.join(meant[:3])}?"
    return f"{_UNKNOWN}; check its spelling against GET /openapi.json, or remove it"


def _longer(name: str, fields: Iterable[str]) -> list[str]:
    """Return the fields of which a name is a word, such as adam_beta1 and adam_beta2 of beta, if they are few."""
    found = [field for field in fields if name in re.split("[_0-9]+", field)]
    return found if len(found) <= _MOST_LONGER else []


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths without those below the part of another, such as that of a group below that of the run."""
    parts = [f"{path.rpartition('.')[0]}." for path in paths]
    return [
        path for path, own in zip(paths, parts, strict=True) if not any(own != p and own.startswith(p) for p in parts)
    ]


@cache
def field_paths(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the paths of all fields of a spec, as model.dtype; those of a list's elements are those of the list."""
    return tuple(dict.fromkeys(_paths(model, "")))


def _paths(model: type[BaseModel], before: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{before}{name}"
        # Fields of a part that is not supported yet do not help.
        if any(isinstance(one, Only) for one in field.metadata):
            continue
        for inner in _models(field.annotation):
            yield from _paths(inner, f"{before}{name}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType, tuple):
        for part in get_args(annotation):
            yield from _models(part)
