"""A user's script that gives and compares every enumerated value of every public model as a plain string."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from trainshed import models

_HEADER = "from datetime import UTC, datetime\n\nfrom trainshed.models import *\n\n"
_SAMPLES = {"string": "'x'", "integer": "1", "number": "1.0", "boolean": "True", "null": "None"}


def model_script() -> str:
    """Return the script: a function for each model, with a comparison for each of its enumerated values."""
    public = {name: getattr(models, name) for name in models.__all__}
    found = {name: kind for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    return _HEADER + "\n\n".join(_function(name, kind) for name, kind in found.items())


def _function(name: str, kind: type[BaseModel]) -> str:
    schema = kind.model_json_schema()
    lines = [line for at, one in schema["properties"].items() for line in _uses(f"given.{at}", _plain(one, schema))]
    if name.endswith("In") or name == "ScalingSpec":
        lines += _constructions(name, schema)
    annotation = f"{name}[int]" if kind.__pydantic_generic_metadata__["parameters"] else name
    return "\n    ".join([f"def use_{name}(given: {annotation}) -> None:", "print(given)", *lines])


def _plain(schema: Any, whole: Any) -> Any:
    """Return a schema with its enumerations in place of references, without null."""
    if isinstance(schema, list):
        return [_plain(one, whole) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        target = whole["$defs"][schema["$ref"].rpartition("/")[2]]
        return target if "enum" in target else {}
    kinds = [one for one in schema.get("anyOf", []) if one.get("type") != "null"]
    return _plain(kinds[0], whole) if kinds else {name: _plain(one, whole) for name, one in schema.items()}


def _values(schema: Any) -> Iterator[Any]:
    """Yield the schema of a mapping's values."""
    yield from schema.get("patternProperties", {}).values()
    if isinstance(schema.get("additionalProperties"), dict):
        yield schema["additionalProperties"]


def _uses(place: str, schema: Any) -> Iterator[str]:
    for name in schema.get("enum", []):
        yield f"print({place} == {name!r})"
    for name in schema.get("items", {}).get("enum", []):
        yield f"print(*(one == {name!r} for one in {place}))"
    for name in schema.get("propertyNames", {}).get("enum", []):
        yield f"print({place}[{name!r}])"
    for value in _values(schema):
        yield from _uses(f"{place}['key']", value)


def _constructions(kind: str, schema: Any) -> Iterator[str]:
    """Yield a call with all fields for each enumerated value."""
    given = {name: list(_literals(_plain(one, schema))) for name, one in schema["properties"].items()}
    first = {name: literals[0] for name, literals in given.items() if literals}
    for name, literals in given.items():
        for literal in literals:
            fields = ", ".join(f"{other}={value}" for other, value in (first | {name: literal}).items())
            yield f"{kind}({fields})"


def _literals(schema: Any) -> Iterator[str]:
    """Yield the Python literals of a schema's values: all that are enumerated, else one; none for a nested model."""
    if "enum" in schema or "const" in schema:
        yield from map(repr, schema.get("enum") or [schema["const"]])
    elif schema.get("format") == "date-time":
        yield "datetime.now(UTC)"
    elif schema.get("type") == "array":
        yield from (f"[{one}]" for one in _literals(schema["items"]))
    elif schema.get("type") == "object":
        yield from (f"{{'key': {one}}}" for value in _values(schema) for one in [*_literals(value)] or ["1"])
    elif "type" in schema:
        yield _SAMPLES[schema["type"]]
