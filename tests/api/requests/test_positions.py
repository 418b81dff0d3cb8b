"""Errors of YAML specs name line and column, in the API and in the command."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.builders.specs import raw_spec
from tests.support.clients.command import run
from tests.support.fakes.service import FakeService
from train_loop.spec import Problem

TEXT = """\
name: tiny
model:
  config: {model_type: qwen3, vocab_size: 384, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}
  dtype: fp32
data:
  train: {path: "stdlib://*.py"}
training:
  learning_rate: 1.0e-3
  max_steps: 4
"""
WRONG = TEXT + "  max_stepz: 5\nscaling:\n    num_workers: none\n"
UNKNOWN = "no such field; did you mean max_steps?"
PATHS = ("/jobs", "/jobs/plan")


def errors_of(client: TestClient, path: str, text: str) -> list[dict[str, Any]]:
    answer = client.post(path, content=text, headers={"content-type": "application/yaml"})
    assert answer.status_code == 422, answer.text
    errors: list[dict[str, Any]] = answer.json()["errors"]
    return errors


@pytest.mark.parametrize("path", PATHS)
def test_rule_violation_in_yaml_has_line_and_column(client: TestClient, path: str) -> None:
    found = errors_of(client, path, WRONG)
    assert [(one["pointer"], one["line"], one["column"]) for one in found] == [
        ("/training/max_stepz", 10, 3),
        ("/scaling/num_workers", 12, 5),
    ]
    assert found[0].keys() == {"pointer", "message", "line", "column"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype"])
def test_misspelt_value_has_one_error_at_its_place(client: TestClient, path: str, field: str) -> None:
    (found,) = errors_of(client, path, f"{TEXT}strategy:\n  {field}: BF16\n")
    assert (found["pointer"], found["line"], found["column"]) == (f"/strategy/{field}", 11, 3)
    assert found["message"].endswith('; the value is "BF16"; did you mean bf16?')


@pytest.mark.parametrize("path", PATHS)
def test_fault_of_data_and_plan_has_line_and_column(client: TestClient, service: FakeService, path: str) -> None:
    service.preflight.problems = [Problem("/data/train/path", "no such folder")]
    found = errors_of(client, path, TEXT + "strategy: {ulysses_size: 3}\n")
    assert {one["pointer"]: (one["line"], one["column"]) for one in found} == {
        "/strategy/ulysses_size": (10, 12),
        "/data/train/path": (6, 11),
    }


@pytest.mark.parametrize("path", PATHS)
def test_syntax_error_in_yaml_has_line_and_column(client: TestClient, path: str) -> None:
    (found,) = errors_of(client, path, TEXT + "priority: *high\n")
    assert (found["pointer"], found["line"], found["column"]) == ("/priority", 10, 11)
    assert found["message"].startswith("line 10, column 11: aliases")


@pytest.mark.parametrize("path", PATHS)
def test_errors_of_json_have_no_line(client: TestClient, path: str) -> None:
    (found,) = errors_of(client, path, json.dumps(raw_spec(training={"max_stepz": 5})))
    assert found.keys() == {"pointer", "message"}


@pytest.mark.parametrize("verb", ["submit", "plan"])
def test_command_names_file_line_and_column(home: Path, verb: str) -> None:
    file = home / "job.yaml"
    file.write_text(WRONG)
    refused = run(verb, str(file))
    assert (refused.exit_code, refused.stderr) == (
        1,
        "trainshed: 2 things are wrong:\n"
        f"  {file}:10:3: training.max_stepz: {UNKNOWN}\n"
        f'  {file}:12:5: scaling.num_workers: input should be a valid integer; the value is "none"\n',
    )


def test_command_names_the_override_or_the_line(home: Path) -> None:
    file = home / "job.yaml"
    file.write_text(WRONG)
    refused = run("plan", str(file), "--set", "scaling.num_workers=some")
    assert refused.stderr.splitlines()[1:] == [
        f"  {file}:10:3: training.max_stepz: {UNKNOWN}",
        '  /scaling/num_workers: input should be a valid integer; the value is "some" (--set scaling.num_workers=some)',
    ]


@pytest.mark.parametrize(("changes", "code"), [((), 1), (("--set", "name=a"), 2)])
def test_command_names_line_and_column_of_syntax_errors(home: Path, changes: tuple[str, ...], code: int) -> None:
    refused = run("plan", "-", *changes, stdin=TEXT + "priority: *high\n")
    assert (refused.exit_code, refused.stderr) == (
        code,
        "trainshed: <stdin>:10:11: priority: aliases (*name) are not allowed in a job spec; write the value out\n",
    )
