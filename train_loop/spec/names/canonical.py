"""Canonical form of a spec: other spellings, fields of other tools and numbers as text become our own. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from train_loop.spec.base import Problem
from train_loop.spec.names.spellings import REWRITTEN, SPELLINGS
from train_loop.spec.text.scalars import read_number

Record = Callable[["Spelling"], None]


@dataclass(frozen=True)
class Spelling:
    """A value of a spec that was written in another way than the schema's."""

    field: str
    """The written field, such as strategy.sharding_strategy."""
    written: Any
    became: Mapping[str, Any]
    """The fields that it became, with their values."""


class Canonical(NamedTuple):
    """Plain data of a spec in canonical form."""

    values: dict[str, Any]
    spellings: tuple[Spelling, ...]
    """The values that are written in another way."""
    problems: tuple[Problem, ...]
    """Fields that contradict others, or whose values no tool has; the values lack them."""


def canonical(raw: Mapping[str, Any], model: type[BaseModel]) -> Canonical:
    """Return plain data of a spec, or of a part of it, in canonical form. Other invalid values stay."""
    spellings, problems = list[Spelling](), list[Problem]()
    values: dict[str, Any] = _read(raw, (model,), [], spellings.append)
    for (section, name), rewrite in REWRITTEN.items():
        part = values.get(section)
        if not isinstance(part, dict) or name not in part:
            continue
        written, rest = part[name], {key: value for key, value in part.items() if key != name}
        try:
            became = rewrite(part)
        except ValueError as error:
            problems.append(Problem(f"/{section}/{name}", str(error)))
            values[section] = rest
            continue
        if became is None or became.get(name, ...) == written:
            continue
        values[section] = rest | became
        if written is not None:
            fields = {f"{section}.{key}": value for key, value in became.items()}
            spellings.append(Spelling(f"{section}.{name}", written, fields))
    return Canonical(values, tuple(spellings), tuple(problems))


def _read(value: Any, kinds: Sequence[Any], steps: list[str], record: Record) -> Any:
    """Return a value with the canonical form of each value inside, by the types of their fields."""
    if not kinds:
        # Values of unknown fields may be nested deep.
        return value
    if isinstance(value, dict):
        return {name: _read(one, _of_field(kinds, name), [*steps, str(name)], record) for name, one in value.items()}
    if isinstance(value, list):
        elements = _of_elements(kinds)
        return [_read(one, elements, [*steps, str(place)], record) for place, one in enumerate(value)]
    became = _scalar(value, kinds) if isinstance(value, str) else value
    if became is not value:
        field = ".".join(steps)
        record(Spelling(field, value, {field: became}))
    return became


def _scalar(text: str, kinds: Sequence[Any]) -> Any:
    """Return the value of a text: a dtype's own name, or a number if the field takes numbers and no text."""
    choices = {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}
    if text in choices:
        return text
    if SPELLINGS.get(text) in choices:
        return SPELLINGS[text]
    number = None if str in kinds else read_number(text)
    if number is None or not (float in kinds or (int in kinds and isinstance(number, int))):
        return text
    return number


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, without their constraints."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for one in get_args(annotation):
            yield from _members(one)
    elif annotation is not Any:
        yield annotation


@cache
def _fields(model: type[BaseModel]) -> Mapping[str, tuple[Any, ...]]:
    """Return the types of each field. Looking them up takes most of the time that a spec takes."""
    return {name: tuple(_members(field.annotation)) for name, field in model.model_fields.items()}


def _of_field(kinds: Sequence[Any], name: str) -> list[Any]:
    """Return the types of a field of a mapping."""
    found = list[Any]()
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += _fields(kind).get(name, ())
        elif get_origin(kind) is dict:
            found += _members(get_args(kind)[1])
    return found


def _of_elements(kinds: Sequence[Any]) -> list[Any]:
    """Return the types of the elements of a list."""
    arguments = [get_args(kind) for kind in kinds if get_origin(kind) in (tuple, list)]
    return [kind for given in arguments for one in given if one is not ... for kind in _members(one)]
