"""Text or plain data → JobSpec, with every problem named at once."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml
from pydantic import ValidationError

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.job import JobSpec


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-6 as a number, as YAML 1.2 and JSON do, and knows neither aliases nor repeated keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # An alias inside an alias inside an alias is how a small body becomes gigabytes.
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed in a job spec; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # YAML would let the second of two equal keys win without a word.
        names = [key.value for key, _ in node.value]
        twice = sorted({name for name in names if isinstance(name, str) and names.count(name) > 1})
        if twice:
            raise yaml.YAMLError(f"{', '.join(twice)} is given twice in one mapping; remove one")
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?$"), list("-+0123456789")
)


def parse_text(text: str | bytes) -> JobSpec:
    """Parse YAML or JSON (JSON is YAML). Raises SpecError."""
    return parse(read_yaml(text))


def read_yaml(text: str | bytes) -> Any:
    """Plain data as a spec's text has it. Raises SpecError."""
    with suppress(ValueError, RecursionError):
        # JSON is YAML, and what it says is told below where it is none; YAML takes twenty times as long.
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError) as error:
        # YAML reads dates, numbers and its own tags by Python's functions, and passes on what those raise.
        raise SpecError([Problem("", f"the body is neither YAML nor JSON: {' '.join(str(error).split())}")]) from error


def parse(raw: Any) -> JobSpec:
    """Check plain data against the spec. Raises SpecError with all problems."""
    if not isinstance(raw, dict):
        raise SpecError([Problem("", f"a job spec is a mapping of fields, not {type(raw).__name__}")])
    try:
        # Through JSON, so that strict types mean JSON's types whatever the text was written in.
        return JobSpec.model_validate_json(json.dumps(_with_one_dtype(raw), allow_nan=False))
    except (TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise SpecError(_problems(error)) from error
        raise SpecError([Problem("", f"a job spec holds JSON values only: {error}")]) from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(whole := dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return whole


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def override(spec: JobSpec, patch: Mapping[str, Any]) -> JobSpec:
    """A spec with some of it different, merged mapping by mapping. Raises SpecError."""
    base = spec.model_dump(mode="json")
    model, strategy = patch.get("model"), patch.get("strategy")
    # Two homes of one quantity: who moves in one of them need not name the other.
    if isinstance(model, dict) and "dtype" in model:
        base["strategy"].pop("param_dtype")
    if isinstance(strategy, dict) and "param_dtype" in strategy:
        base["model"].pop("dtype")
    return parse(merged(base, patch))


def merged(base: Any, patch: Any) -> Any:
    """Plain data with some of it different, mapping by mapping."""
    if not isinstance(patch, Mapping):
        return patch
    whole = dict(base) if isinstance(base, dict) else {}
    return whole | {name: merged(whole.get(name), value) for name, value in patch.items()}


def _with_one_dtype(raw: dict[str, Any]) -> dict[str, Any]:
    """Let model.dtype and strategy.param_dtype, two homes of one quantity, follow each other where one is unset."""
    model, strategy = raw.get("model"), raw.get("strategy", {})
    if (
        not isinstance(model, dict)
        or not isinstance(strategy, dict)
        or ("dtype" in model) == ("param_dtype" in strategy)
    ):
        return raw
    dtype = model["dtype"] if "dtype" in model else strategy["param_dtype"]
    return {**raw, "model": {**model, "dtype": dtype}, "strategy": {**strategy, "param_dtype": dtype}}


def dump(spec: JobSpec) -> str:
    """The resolved spec as JSON, every default written out; `parse_text` gives the same spec back."""
    return spec.model_dump_json(indent=2)


def _problems(error: ValidationError) -> list[Problem]:
    return [Problem(_pointer(e["loc"]), _message(e["type"], e["msg"], e.get("input"))) for e in error.errors()]


def _pointer(loc: tuple[int | str, ...]) -> str:
    # Pydantic names the arm of a union as a part of the place: a type's name or a constraint is no field.
    steps = [
        str(step)
        for step in loc
        if not re.fullmatch(r"(str|int|float|bool|tuple|constrained)\W.*|str|int|bool|source|list|\w+Range", str(step))
    ]
    return "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)


def _message(kind: str, message: str, value: Any) -> str:
    if kind == "extra_forbidden":
        return "no such field; check its spelling against GET /openapi.json, or remove it"
    if kind == "missing":
        return "this field is required"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}; the value is {json.dumps(value, default=str)}"
