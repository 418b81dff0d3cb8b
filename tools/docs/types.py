"""Types and limits of pydantic fields, in the words of a spec's author."""

import json
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as limits
from pydantic import BaseModel, StringConstraints
from pydantic.fields import FieldInfo

from train_loop.spec.base import Only

NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Path: "path",
    Any: "any value",
}


def type_name(annotation: Any, names: Mapping[Any, str] = MappingProxyType({})) -> str:
    """Return a type in YAML's words; `names` has the words for some classes."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(args[0], names)
    if origin is Literal:
        return " or ".join(f"`{_scalar(arg)}`" for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(arg, names) for arg in args if arg is not type(None)))
    if origin in (tuple, list, set, frozenset):
        return f"list of {type_name(args[0], names)}"
    if origin is dict:
        return f"mapping of {type_name(args[0], names)} to {type_name(args[1], names)}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{one.value}`" for one in annotation)
    return names.get(annotation) or NAMES.get(annotation, "mapping")


def rules(field: FieldInfo) -> list[str]:
    """Return the limits of a field and of the items of a list, each as a phrase."""
    return list(dict.fromkeys([*_limits(field.metadata), *_inner(field.annotation)]))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models inside a type, in their order."""
    if _is_model(annotation):
        return [annotation]
    return [model for arg in get_args(annotation) for model in models_in(arg)]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _inner(annotation: Any) -> list[str]:
    """Return the limits inside unions; those of list items and mapping values say so."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return [*_limits(args[1:]), *_inner(args[0])]
    if origin in (tuple, list):
        return [f"each {rule}" for rule in _inner(args[0])]
    if origin is dict:
        parts = (("key", args[0]), ("value", args[1]))
        return [f"each {part} {rule}" for part, arg in parts for rule in _inner(arg)]
    return [rule for arg in args for rule in _inner(arg)]


def _limits(metadata: Sequence[Any]) -> list[str]:
    found = list[str]()
    for one in metadata:
        match one:
            case limits.Interval() | FieldInfo():
                found += _limits(list(one) if isinstance(one, limits.Interval) else one.metadata)
            case limits.Gt():
                found.append(f"> {_number(one.gt)}")
            case limits.Ge():
                found.append(f"≥ {_number(one.ge)}")
            case limits.Lt():
                found.append(f"< {_number(one.lt)}")
            case limits.Le():
                found.append(f"≤ {_number(one.le)}")
            case limits.MinLen():
                found.append(_count("at least", one.min_length, "entry", "entries"))
            case limits.MaxLen():
                found.append(_count("at most", one.max_length, "entry", "entries"))
            case StringConstraints():
                found += _text_limits(one)
            case _:
                found += _only(one)
    return found


def _number(limit: Any) -> str:
    return f"{limit:,.10g}" if isinstance(limit, float) and abs(limit) >= 1 else str(limit)


def _count(bound: str, number: int, one: str, many: str) -> str:
    return f"{bound} {number} {one if number == 1 else many}"


def _text_limits(one: StringConstraints) -> list[str]:
    pattern = [f"matches `{one.pattern}`"] if one.pattern else []
    shortest = [_count("at least", one.min_length, "character", "characters")] if one.min_length else []
    return (
        pattern + shortest + ([_count("at most", one.max_length, "character", "characters")] if one.max_length else [])
    )


def supported(field: FieldInfo) -> tuple[Any, ...] | None:
    """Return the values that the code supports today, or None for all values of the type."""
    found = [values for one in field.metadata if (values := _supported(one)) is not None]
    return found[0] if found else None


def _only(one: Any) -> list[str]:
    values = _supported(one)
    return [f"only {' or '.join(f'`{_scalar(value)}`' for value in values)} today"] if values is not None else []


def _supported(one: Any) -> tuple[Any, ...] | None:
    """Return the arguments of `only(...)`."""
    return one.supported if isinstance(one, Only) else None


def _scalar(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
