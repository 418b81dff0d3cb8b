"""Errors for invalid settings: name, value, rule and remedy in one line each, without secrets."""

import os

import pytest
from pydantic import model_validator

from service.config import environment
from service.config.environment import BadSettings, read_settings, unknown_variables
from service.config.settings import Settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRAINSHED_")]:
        monkeypatch.delenv(name)


def problems(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    for name, value in variables.items():
        monkeypatch.setenv(f"TRAINSHED_{name}", value)
    with pytest.raises(BadSettings) as raised:
        read_settings()
    assert str(raised.value) == "\n".join(raised.value.problems)
    return list(raised.value.problems)


def test_read_settings_reports_all_problems_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = problems(monkeypatch, PORT="99999", QUOTAS="{nlp", BACKFILL="perhaps", HOST="127.0.0.1")
    assert [line.split("=")[0] for line in found] == ["TRAINSHED_PORT", "TRAINSHED_QUOTAS", "TRAINSHED_BACKFILL"]
    assert found[0] == (
        "TRAINSHED_PORT='99999': Input should be less than or equal to 65535; 0: any free port; "
        "unset it for the default, 8000"
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RAY_ADDRESS", "10.0.0.1:8265", "must be the URL of the cluster's dashboard"),
        ("DATABASE_URL", "mysql://x", "must begin with sqlite:///"),
        ("RUNS", "file://host/runs", "write file:/// and an absolute path"),
        ("STORAGE_ROOTS", "file:///a,file:b", "write file:/// and an absolute path"),
        ("STORAGE_ROOTS", '{"nlp": ["file:b"]}', "write file:/// and an absolute path"),
        (
            "STORAGE_ROOTS",
            '{"NLP": ["file:///b"]}',
            "'NLP' is not a project's name; expected a-z, 0-9",
        ),
        ("STORAGE_ROOTS", '{"nlp"', "it is not valid JSON"),
        ("SINKS", "tensorbored", "expected any of tensorboard"),
        ("QUOTAS", '{"nlp": {"jobs": "many"}}', "at nlp/jobs"),
        ("LEASE_SECONDS", "0", "greater than 0"),
    ],
)
def test_problem_line_states_the_remedy(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str) -> None:
    (line,) = problems(monkeypatch, **{name: value})
    assert line.startswith(f"TRAINSHED_{name}=")
    assert expected in line


class Conflicting(Settings):
    """Settings that are valid individually but not together."""

    @model_validator(mode="after")
    def _never(self) -> "Conflicting":
        raise ValueError("TRAINSHED_HOST and TRAINSHED_PORT do not go together; leave out one")


def test_conflicting_settings_are_one_problem_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "Settings", Conflicting)
    (line,) = problems(monkeypatch)
    assert line == "TRAINSHED_HOST and TRAINSHED_PORT do not go together; leave out one"


def test_problem_line_hides_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = problems(monkeypatch, DATABASE_URL="mysql://shed:hunter2@db/shed")
    assert "hunter2" not in line
    assert "mysql://***@db/shed" in line


def test_unknown_variable_is_reported_with_nearest_name() -> None:
    variables = {"TRAINSHED_PROT": "1", "TRAINSHED_URL": "x", "TRAINSHED_PORT": "1", "TRAINSHED_XYZZY": "1", "PATH": ""}
    # TRAINSHED_TEST_ variables configure the tests; the service does not report them.
    variables["TRAINSHED_TEST_CRDS"] = "/folder"
    assert unknown_variables(variables) == [
        "unknown setting TRAINSHED_PROT has no effect; did you mean TRAINSHED_PORT?",
        "unknown setting TRAINSHED_XYZZY has no effect; unset it",
    ]
