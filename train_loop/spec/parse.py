"""Text or plain data → JobSpec; all problems are reported at once. The JSON schema is for editors and validators."""

import json
import re
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.job import JobSpec
from train_loop.spec.model import Dtype
from train_loop.spec.names import Spelling, accept_spellings, canonical, nearest_value, unknown_field
from train_loop.spec.text import add_positions, as_pointer, check_data, read_yaml

SCHEMA_ID = "urn:trainshed:job-spec"

_MOST_PROBLEMS = 50
"""Maximum number of problems to list: a body may have ten thousand unknown fields."""


def parse_text(text: str | bytes) -> JobSpec:
    """Parse YAML or JSON (JSON is YAML). Raises SpecError, with the positions of its problems in YAML text."""
    try:
        return parse(read_yaml(text))
    except SpecError as error:
        raise SpecError(add_positions(error.problems, text)) from error


def load(text: str | bytes) -> JobSpec:
    """Parse a spec from `dump`, which may hold more values than a submitted body. Raises SpecError."""
    try:
        return parse(json.loads(text))
    except (ValueError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError([Problem("", f"the stored spec is not JSON: {error}")]) from error


def parse(raw: Any) -> JobSpec:
    """Validate plain data as a spec. Raises SpecError with all problems."""
    form = canonical(check_mapping(raw), JobSpec)
    try:
        # Validated as JSON, so that strict types are JSON's types whatever the format of the text.
        spec = JobSpec.model_validate_json(json.dumps(_with_one_dtype(form.values), allow_nan=False))
    except (TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise SpecError([*form.problems, *_problems(error)]) from error
        raise SpecError([Problem("", f"a job spec holds JSON values only: {error}")]) from error
    if form.problems:
        raise SpecError([*form.problems])
    return spec


def spellings(raw: Any) -> tuple[Spelling, ...]:
    """Return what plain data of a spec writes in another way than the schema, and what it becomes. Raises SpecError."""
    return canonical(check_mapping(raw), JobSpec).spellings


def check_mapping(raw: Any) -> dict[Any, Any]:
    """Return plain data that is a mapping. Raises SpecError for other data."""
    if isinstance(raw, dict):
        return raw
    if raw is None:
        raise SpecError(
            [Problem("", "the job spec is empty; write its fields, such as name, model, data and training")]
        )
    given = "a list" if isinstance(raw, list) else "text" if isinstance(raw, str) else f"the value {raw!r:.60}"
    raise SpecError([Problem("", f"a job spec is a mapping of fields, not {given}; write name: VALUE for each field")])


def override(spec: JobSpec, patch: Mapping[str, Any]) -> JobSpec:
    """Return a spec with a patch merged into it, mapping by mapping. Raises SpecError."""
    check_data(patch)
    # What a field of another tool becomes replaces those of the spec.
    form = canonical(patch, JobSpec)
    if form.problems:
        raise SpecError([*form.problems])
    patch = form.values
    base = spec.model_dump(mode="json")
    model, strategy = patch.get("model"), patch.get("strategy")
    # The two fields are one quantity: a patch that changes one of them need not name the other.
    if isinstance(model, dict) and "dtype" in model:
        base["strategy"].pop("param_dtype")
    if isinstance(strategy, dict) and "param_dtype" in strategy:
        base["model"].pop("dtype")
    return parse(merged(base, patch))


def merged(base: Any, patch: Any) -> Any:
    """Return plain data with a patch merged into it, mapping by mapping."""
    if not isinstance(patch, Mapping):
        return patch
    whole = dict(base) if isinstance(base, dict) else {}
    return whole | {name: merged(whole.get(name), value) for name, value in patch.items()}


def _with_one_dtype(raw: dict[str, Any]) -> dict[str, Any]:
    """Copy model.dtype to strategy.param_dtype, or the reverse, if only one of them is set."""
    model, strategy = raw.get("model"), raw.get("strategy", {})
    if (
        not isinstance(model, dict)
        or not isinstance(strategy, dict)
        or ("dtype" in model) == ("param_dtype" in strategy)
    ):
        return raw
    dtype = model["dtype"] if "dtype" in model else strategy["param_dtype"]
    if dtype not in get_args(Dtype):
        # One error is enough for one value.
        return raw
    return {**raw, "model": {**model, "dtype": dtype}, "strategy": {**strategy, "param_dtype": dtype}}


def dump(spec: JobSpec) -> str:
    """Return the resolved spec as JSON, including every default; `load` returns the same spec."""
    return spec.model_dump_json(indent=2)


def _problems(error: ValidationError) -> list[Problem]:
    found = error.errors(include_url=False)
    listed = [problem for one in found[:_MOST_PROBLEMS] for problem in _problems_of(one)]
    more = len(found) - _MOST_PROBLEMS
    return [*listed, Problem("", f"{more} more problems are not listed; fix these first")] if more > 0 else listed


def _problems_of(error: ErrorDetails) -> list[Problem]:
    """Return the problems of one of pydantic's errors; a rule between parts names the fields to change itself."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return cause.problems
    place = _place(error["loc"])
    return [Problem(as_pointer([str(step) for step in place]), _message(error, place))]


def _place(loc: tuple[int | str, ...]) -> list[int | str]:
    """Return the steps to a field: its names, and as numbers the places in lists."""
    # Pydantic adds the arm of a union to the location: a type's name or a constraint is not a field.
    return [
        step
        for step in loc
        if not re.fullmatch(
            r"(str|int|float|bool|tuple|constrained)\W.*|str|int|float|bool|source|list|\w+HeadSpec|\w+Range", str(step)
        )
    ]


def _message(error: ErrorDetails, place: list[int | str]) -> str:
    kind, message, value = error["type"], error["msg"], error["input"]
    if kind == "extra_forbidden":
        return unknown_field([step for step in place if isinstance(step, str)], JobSpec)
    if kind == "missing":
        return "this field is required"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    told = f"{message[0].lower()}{message[1:]}; the value is {_shortened(json.dumps(value, default=str))}"
    expected = re.findall("'([^']*)'", error.get("ctx", {}).get("expected", "")) if kind == "literal_error" else []
    near = nearest_value(value, expected)
    return told if near is None else f"{told}; did you mean {near}?"


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


class _Generator(GenerateJsonSchema):
    """A generator without titles of fields: they repeat the fields' names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job spec, with descriptions, defaults and limits of every field.

    It cannot express the rules between fields; `parse` checks those, too.
    """
    schema = accept_spellings(JobSpec.model_json_schema(schema_generator=_Generator))
    # Editors show the schema's own name.
    head = {"$schema": GenerateJsonSchema.schema_dialect, "$id": SCHEMA_ID, "title": "Trainshed job spec"}
    return {**head, **{name: part for name, part in schema.items() if name not in head}}


def dump_schema() -> str:
    """Return the JSON schema of a job spec as text."""
    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"
