"""Text or plain data → a spec of a kind, with all problems at once. The JSON schema is for editors and validators."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from train_loop.spec.base import Problem, SpecError, SpecModel
from train_loop.spec.heads import LabelHeadSpec
from train_loop.spec.job import JobSpec
from train_loop.spec.kinds.any_kind import KINDS, AnyJobSpec, kind_of
from train_loop.spec.model import Dtype
from train_loop.spec.names import Spelling, accept_spellings, canonical, nearest_value, unknown_field
from train_loop.spec.text import add_positions, as_pointer, check_data, read_yaml

T = TypeVar("T")
S = TypeVar("S", bound=SpecModel)
SCHEMA_ID = "urn:trainshed:job-spec"

_MOST_PROBLEMS = 50
"""Maximum number of problems to list: a body may have ten thousand unknown fields."""
_FORMS: dict[tuple[int | str, ...], str] = {
    ("data", "train"): "{{path: {}}}",
    ("data", "eval"): "{{path: {}}}",
    ("data", "columns"): "{{text: {}}}",
}
"""Mappings in whose place a text may be written."""
_LONGEST_FORM = 200


def parse_text(text: str | bytes) -> JobSpec:
    """Parse the spec of a training job as YAML or JSON (JSON is YAML). Raises SpecError as `parse_any_text`."""
    return _parse_text(text, parse)


def parse_any_text(text: str | bytes) -> AnyJobSpec:
    """Parse the spec of a job of any kind. Raises SpecError, with the positions of its problems in YAML text."""
    return _parse_text(text, parse_any)


def _parse_text(text: str | bytes, parse: Callable[[Any], T]) -> T:
    try:
        return parse(read_yaml(text))
    except SpecError as error:
        raise SpecError(add_positions(error.problems, text)) from error


def load(text: str | bytes) -> AnyJobSpec:
    """Parse a spec from `dump`, which may hold more values than a submitted body. Raises SpecError."""
    try:
        return parse_any(json.loads(text))
    except (ValueError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError([Problem("", f"the stored spec is not JSON: {error}")]) from error


def parse(raw: Any) -> JobSpec:
    """Validate plain data as the spec of a training job. Raises SpecError with all problems."""
    return _parse(raw, JobSpec)


def parse_any(raw: Any) -> AnyJobSpec:
    """Validate plain data as the spec of a job of the kind that it names. Raises SpecError with all problems."""
    kind = kind_of(check_mapping(raw))
    if kind not in KINDS:
        near = nearest_value(kind, [*KINDS])
        remedy = f"choose {' or '.join(KINDS)}" if near is None else f"did you mean {near}?"
        raise SpecError([Problem("/kind", f"{kind!r:.60} is not a kind of job; {remedy}")])
    return _parse(raw, KINDS[kind])


def _parse(raw: Any, model: type[S]) -> S:
    form = canonical(check_mapping(raw), model)
    try:
        # Validated as JSON, so that strict types are JSON's types whatever the format of the text.
        spec = model.model_validate_json(json.dumps(_with_one_dtype(form.values), allow_nan=False))
    except (TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise SpecError([*form.problems, *_problems(error, model)]) from error
        raise SpecError([Problem("", f"a job spec holds JSON values only: {error}")]) from error
    if form.problems:
        raise SpecError([*form.problems])
    return spec


def spellings(raw: Any) -> tuple[Spelling, ...]:
    """Return the values of a spec that are written in another way than the schema has them. Raises SpecError."""
    return canonical(check_mapping(raw), KINDS.get(kind_of(check_mapping(raw)), JobSpec)).spellings


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


def override(spec: S, patch: Mapping[str, Any]) -> S:
    """Return a spec with a patch merged into it, mapping by mapping. Raises SpecError."""
    check_data(patch)
    # A field of another tool replaces the fields that it stands for.
    form = canonical(patch, JobSpec)
    if form.problems:
        raise SpecError([*form.problems])
    patch = form.values
    base = spec.model_dump(mode="json")
    if isinstance(patch.get("model"), dict) and "gradient_checkpointing" in patch["model"]:
        # {every: n} and {budget: x} replace each other.
        base["model"].pop("gradient_checkpointing")
    model, strategy = patch.get("model"), patch.get("strategy")
    # The two fields are one quantity: a patch that changes one of them need not name the other.
    if isinstance(model, dict) and "dtype" in model:
        base["strategy"].pop("param_dtype")
    if isinstance(strategy, dict) and "param_dtype" in strategy:
        base["model"].pop("dtype")
    return _parse(merged(base, patch), type(spec))


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


def dump(spec: AnyJobSpec) -> str:
    """Return the resolved spec as JSON, including every default; `load` returns the same spec."""
    return spec.model_dump_json(indent=2)


def _problems(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    found = error.errors(include_url=False)
    listed = [problem for one in found[:_MOST_PROBLEMS] for problem in _problems_of(one, model)]
    more = len(found) - _MOST_PROBLEMS
    return [*listed, Problem("", f"{more} more problems are not listed; fix these first")] if more > 0 else listed


def _problems_of(error: ErrorDetails, model: type[BaseModel]) -> list[Problem]:
    """Return the problems of one of pydantic's errors; a rule between parts names the fields to change itself."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return cause.problems
    place = _place(error["loc"])
    return [Problem(as_pointer([str(step) for step in place]), _message(error, place, model))]


def _place(loc: tuple[int | str, ...]) -> list[int | str]:
    """Return the steps to a field: its names, and as numbers the places in lists."""
    # Pydantic adds the arm of a union to the location: a type's name or a constraint is not a field.
    return [
        step
        for step in loc
        if not re.fullmatch(
            r"(str|int|float|bool|tuple|constrained)\W.*|str|int|float|bool|source|list|\w+HeadSpec|EverySpec|BudgetSpec|\w+Range",
            str(step),
        )
    ]


def _message(error: ErrorDetails, place: list[int | str], model: type[BaseModel]) -> str:
    kind, message, value = error["type"], error["msg"], error["input"]
    if kind == "extra_forbidden":
        names = [step for step in place if isinstance(step, str)]
        if model is not JobSpec and len(place) == 1 and names[0] in JobSpec.model_fields:
            return f"{names[0]} belongs to training jobs; remove it, or choose kind: train"
        return unknown_field(names, model)
    if kind == "missing":
        return "this field is required"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    told = f"{message[0].lower()}{message[1:]}; the value is {_shortened(json.dumps(value, default=str))}"
    expected = re.findall("'([^']*)'", error.get("ctx", {}).get("expected", "")) if kind == "literal_error" else []
    # A head may also be a mapping, which the expected texts lack.
    forms = [one for one in LabelHeadSpec.model_fields if place == ["model", "head"] and one not in expected]
    near = nearest_value(value, [*expected, *forms])
    form = _form(place, near if near in forms else value, message)
    if near is not None and near != value:
        return f"{told}; did you mean {form if near in forms else near}?"
    return told if form is None else f"{told}; write {form}"


def _form(place: list[int | str], value: Any, message: str) -> str | None:
    """Return the form of a text that stands for a list or for a mapping; None for other values."""
    if not isinstance(value, str) or len(value) > _LONGEST_FORM:
        return None
    if "valid array" in message:
        return f"[{json.dumps(value, ensure_ascii=False)}]"
    if tuple(place) == ("model", "head") and value in LabelHeadSpec.model_fields:
        return f"{{{value}: {'{}' if value == 'regression' else '{labels: 2}'}}}"
    return _FORMS[tuple(place)].format(json.dumps(value, ensure_ascii=False)) if tuple(place) in _FORMS else None


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
    parts = accept_spellings(TypeAdapter(AnyJobSpec).json_schema(schema_generator=_Generator))["$defs"]
    # Editors show the schema's own name.
    head = {"$schema": GenerateJsonSchema.schema_dialect, "$id": SCHEMA_ID, "title": "Trainshed job spec"}
    # Not oneOf: its errors name no field.
    other = {"if": {"properties": {"kind": {"const": "infer"}}, "required": ["kind"]}}
    of_kind = {"then": {"$ref": "#/$defs/InferJobSpec"}, "else": {"$ref": "#/$defs/JobSpec"}}
    return {**head, "type": "object", **other, **of_kind, "$defs": parts}


def dump_schema() -> str:
    """Return the JSON schema of a job spec as text."""
    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"
