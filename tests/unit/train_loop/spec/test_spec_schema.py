"""The JSON schema of the job spec: it accepts every example, rejects wrong specs, and describes every field."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.builders.specs import raw_spec
from train_loop.spec import JobSpec, SpecError, dump_schema, job_schema, parse, read_yaml

EXAMPLES = sorted(Path("examples").rglob("*.yaml"))
PAGES = [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
MODELINE = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")
VALIDATOR = Draft202012Validator(job_schema())


def errors_of(spec: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(spec)]


def specs_in_pages() -> Iterator[tuple[Path, str]]:
    """Return the YAML blocks in the docs that are complete job specs."""
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            if re.search(r"^model:", block, re.MULTILINE) and re.search(r"^training:", block, re.MULTILINE):
                yield page, block


def test_schema_is_valid_and_names_itself() -> None:
    Draft202012Validator.check_schema(job_schema())
    assert job_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert job_schema()["$id"] == "urn:trainshed:job-spec"
    assert job_schema()["title"] == "Trainshed job spec"


def test_committed_schema_equals_the_models() -> None:
    assert Path("examples/job.schema.json").read_text() == dump_schema(), (
        "run: trainshed schema --output examples/job.schema.json"
    )


def test_every_object_forbids_unknown_fields_and_every_field_has_a_description() -> None:
    schema = job_schema()
    for name, part in schema["$defs"].items():
        assert part["additionalProperties"] is False, name
        assert part["description"], name
        properties = part["properties"].items()
        assert [field for field, field_schema in properties if not field_schema.get("description")] == [], name


@pytest.mark.parametrize("file", EXAMPLES, ids=str)
def test_example_validates_and_names_a_schema(file: Path) -> None:
    text = file.read_text()
    assert errors_of(read_yaml(text)) == []
    modeline = MODELINE.match(text)
    assert modeline is not None, f"{file} must start with # yaml-language-server: $schema=…"
    assert (file.parent / modeline[1]).resolve() == Path("examples/job.schema.json").resolve()


def test_specs_in_docs_validate_and_name_a_schema() -> None:
    found = list(specs_in_pages())
    assert found
    for page, block in found:
        assert errors_of(read_yaml(block)) == [], page
        modeline = MODELINE.match(block)
        assert modeline is not None, f"{page}: a spec must start with # yaml-language-server: $schema=…"
        assert modeline[1].endswith(("/schemas/job.json", "job.schema.json"))


def test_resolved_spec_validates() -> None:
    assert errors_of(parse(raw_spec()).model_dump(mode="json")) == []
    assert errors_of(raw_spec(scaling={"num_workers": {"min": 1, "max": 2}}, training={"global_batch_size": 2})) == []


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"training": {"max_stepz": 4}}, "'max_stepz' was unexpected"),
        ({"training": {"max_steps": 0}}, "0 is not valid"),
        ({"training": {"optimizer": "adagrad"}}, "'adagrad' is not one of"),
        ({"training": {"learning_rate": None}}, "None is not of type 'number'"),
        ({"data": {"sequence_length": 1}}, "1 is less than the minimum of 2"),
        ({"scaling": {"num_workers": 5000}}, "5000 is not valid"),
        ({"labels": {"": "x"}}, "should be non-empty"),
        ({"model": {"lora": {"init": "pissa"}}}, "{'init': 'pissa'} is not valid under any of the given schemas"),
    ],
)
def test_wrong_spec_does_not_validate(parts: dict[str, Any], message: str) -> None:
    spec = raw_spec(**parts)
    with pytest.raises(SpecError):
        parse(spec)
    assert any(message in error for error in errors_of(spec)), errors_of(spec)


@pytest.mark.parametrize("field", [name for name, one in JobSpec.model_fields.items() if one.is_required()])
def test_missing_required_field_does_not_validate(field: str) -> None:
    spec = raw_spec()
    del spec[field]
    assert errors_of(spec) == [f"'{field}' is a required property"]


@pytest.mark.parametrize("name", ["Upper", "-x", "x" * 41, ""])
def test_invalid_name_does_not_validate(name: str) -> None:
    assert errors_of({**raw_spec(), "name": name})
