"""Drift of the reference pages: each page has everything that the code has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from typer import Typer
from typer.testing import CliRunner

import trainshed
from service.config.settings import Settings
from service.domain.jobs.reason import MEANINGS, Code
from service.domain.metrics import ALL
from service.errors import ServiceError
from tests.support.fakes.service import FakeService
from tools.docs.openapi import FILE, text
from tools.docs.pages import generate
from tools.docs.spec import EXAMPLES, Section, example, sections
from train_loop import errors as loop_errors
from train_loop.spec.kinds.any_kind import KINDS
from trainshed.cli.main import app

FIELDS = [(section, name, field) for section in sections() for name, field in section.fields.items()]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return generate()


def test_openapi_file_is_the_description_of_the_api(tmp_path: Path) -> None:
    assert FILE.read_text() == text(FakeService(tmp_path).app().openapi()), "run: python -m tools.docs.openapi"


def test_rest_page_has_every_call_and_schema(pages: dict[str, str]) -> None:
    document = json.loads(FILE.read_text())
    calls = [f"### {method.upper()} {path}\n" for path, item in document["paths"].items() for method in item]
    schemas = [f"### {name}\n" for name in document["components"]["schemas"] if f"(#{name.lower()})" in page_of(pages)]
    assert [one for one in [*calls, *schemas] if one not in page_of(pages)] == []


def test_part_of_a_spec_has_one_heading_for_all_its_forms(pages: dict[str, str]) -> None:
    headings = re.findall(r"^#+ .*$", pages["reference/spec.md"], re.MULTILINE)
    assert sorted(set(headings)) == sorted(headings)


def test_fields_of_another_kind_of_job_are_no_fields_to_come(pages: dict[str, str]) -> None:
    page = pages["reference/spec.md"]
    (row,) = re.findall(r"^\| `infer` \|.*$", page, re.MULTILINE)
    assert "| Only with `kind: infer`. |" in row
    assert "today" not in page.partition("## data, with kind: infer")[2].partition("## training")[0]


def page_of(pages: dict[str, str]) -> str:
    return pages["reference/rest-api.md"]


def properties(schema: Any, names: dict[str, Any], seen: set[str]) -> Iterator[str]:
    """Yield the names of all fields below a JSON schema."""
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            yield from properties(names[reference.rpartition("/")[2]], names, seen)
        yield from schema.get("properties", {})
        for value in schema.values():
            yield from properties(value, names, seen)
    elif isinstance(schema, list):
        for value in schema:
            yield from properties(value, names, seen)


@pytest.mark.parametrize("kind", KINDS)
def test_spec_page_has_every_field_of_the_json_schema(pages: dict[str, str], kind: str) -> None:
    schema = KINDS[kind].model_json_schema()
    missing = {name for name in properties(schema, schema["$defs"], set()) if f"| `{name}` |" not in spec_page(pages)}
    assert missing == set()


def spec_page(pages: dict[str, str]) -> str:
    return pages["reference/spec.md"]


@pytest.mark.parametrize(("section", "name", "field"), FIELDS, ids=[one.path_of(name) for one, name, _ in FIELDS])
def test_example_of_a_spec_field_is_valid(section: Section, name: str, field: FieldInfo) -> None:
    value = example(section, name, field)
    annotated: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    TypeAdapter(annotated).validate_json(json.dumps(value))


def test_examples_belong_to_fields() -> None:
    assert EXAMPLES.keys() - {section.path_of(name) for section, name, _ in FIELDS} == set()


def test_settings_page_has_every_setting(pages: dict[str, str]) -> None:
    names = [f"| `TRAINSHED_{name.upper()}` |" for name in Settings.model_fields]
    assert [name for name in names if name not in pages["reference/settings.md"]] == []


def test_cli_page_has_every_command_and_option_of_the_help(pages: dict[str, str]) -> None:
    page = pages["reference/cli.md"]
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    assert all(f"## trainshed {name}\n" in page for name in names_of(app))
    assert all(f"## trainshed {group} {name}\n" in page for group, one in groups.items() for name in names_of(one))
    options = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["submit", "--help"]).stdout
    submit = page.partition("## trainshed submit\n")[2].partition("\n## ")[0]
    assert {word for word in options.split() if word.startswith("--")} - {"--help"} == {
        word.strip("`") for word in submit.split() if word.startswith("`--")
    }


def names_of(group: Typer | None) -> list[str]:
    """Return the names of the commands that are registered in a group."""
    assert group is not None
    assert group.registered_commands
    return [
        one.name or str(getattr(one.callback, "__name__", "")).replace("_", "-") for one in group.registered_commands
    ]


def test_sdk_page_has_every_public_name(pages: dict[str, str]) -> None:
    assert [name for name in trainshed.__all__ if f".{name}\n" not in pages["reference/sdk.md"]] == []


def test_metrics_page_has_every_series(pages: dict[str, str]) -> None:
    assert [one for one in ALL if f"| `{one.full_name}` |" not in pages["reference/metrics.md"]] == []


def test_errors_page_has_every_code(pages: dict[str, str]) -> None:
    assert MEANINGS.keys() == set(Code)
    loop = {one.code for one in vars(loop_errors).values() if isinstance(one, type) and hasattr(one, "code")}
    assert loop <= set(Code)
    codes = {*map(str, Code), *(error.code for error in subclasses(ServiceError))}
    assert [code for code in codes if f"| `{code}` |" not in pages["reference/errors.md"]] == []


def subclasses(error: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for one in error.__subclasses__():
        yield one
        yield from subclasses(one)
