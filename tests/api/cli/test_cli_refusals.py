"""Messages of the `trainshed` command about wrong input, options and settings."""

import json
import re
from pathlib import Path

import pytest

from tests.support.clients.command import run
from tests.support.fakes.service import KEY, FakeService, spec_body


def test_rejected_submit_prints_the_reason_and_exits_1(home: Path) -> None:
    answer = run("submit", "-", stdin=spec_body(strategy={"fsdp_size": 3}, scaling={"num_workers": 4}))
    assert answer.exit_code == 1
    assert "/strategy/fsdp_size: fsdp_size=3 does not divide the 4 workers" in answer.stderr


def test_environment_overrides_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_KEY", "wrong")
    assert "unknown, expired or revoked key" in run("ps").stderr
    monkeypatch.setenv("TRAINSHED_URL", "http://127.0.0.1:9")
    assert "the service does not answer" in run("ps").stderr


@pytest.mark.parametrize("url", ["localhost:8000", "http://[::1", "https://", "http://me:hush@h:x"])
@pytest.mark.parametrize("command", ["ps", "doctor"])
def test_invalid_url_is_reported_without_its_password(
    home: Path, monkeypatch: pytest.MonkeyPatch, command: str, url: str
) -> None:
    monkeypatch.setenv("TRAINSHED_URL", url)
    result = run(command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("trainshed: invalid configuration\n  TRAINSHED_URL=")
    assert "expected http://HOST:PORT" in result.stderr
    assert "hush" not in result.stderr


def test_invalid_key_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_KEY", "café")
    result = run("ps")
    assert (result.exit_code, result.stderr.startswith("trainshed: the key contains invalid characters")) == (
        1,
        True,
    )
    monkeypatch.setenv("TRAINSHED_KEY", " ")
    assert run("ps").stderr.startswith("trainshed: the key is empty; copy it into TRAINSHED_KEY again")
    monkeypatch.setenv("TRAINSHED_KEY", f"{KEY}\n")
    assert run("ps").exit_code == 0


def test_service_without_the_call_is_reported_without_the_call(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = json.loads((home / "service.json").read_text())["url"]
    monkeypatch.setenv("TRAINSHED_URL", f"{url}/api")
    result = run("ps")
    expected = f"trainshed: the service at {url}/api does not have this call; set TRAINSHED_URL to http://HOST:PORT"
    assert (result.exit_code, result.stderr.startswith(expected)) == (1, True), result.stderr


@pytest.mark.parametrize("content", ["", "# nothing", "5", "- a", "a: 'b"])
def test_file_that_is_not_a_spec_is_named(home: Path, content: str) -> None:
    (home / "job.yaml").write_text(content)
    for more in ((), ("--set", "name=a")):
        refused = run("plan", str(home / "job.yaml"), *more)
        assert refused.stderr.startswith(f"trainshed: {home}/job.yaml:"), refused.stderr
        assert not re.search(r"NoneType|not int|not list|body|string>", refused.stderr), refused.stderr


@pytest.mark.parametrize(
    "line",
    [
        *(("submit", "spec.json", "--idempotency-key", key) for key in ("", "é", "a\nb", "a" * 256)),
        *((verb, "job-0001", "--grace", much) for verb in ("pause", "cancel") for much in ("inf", "86401")),
        *(("keys", "create", "alice", "--role", "a=viewer", "--days", days) for days in ("inf", "1e300")),
    ],
    ids=lambda line: f"{line[0]} {line[-1]!r}",
)
def test_invalid_option_value_exits_2(home: Path, line: tuple[str, ...]) -> None:
    refused = run(*line)
    assert (refused.exit_code, "Invalid value for" in refused.stderr) == (2, True), refused.stderr


def test_missing_key_or_file_names_the_remedy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "name a readable job spec" in run("submit", "nowhere.yaml").stderr
    (home / "admin.key").unlink()
    for place in (home, home / "spec.json"):
        monkeypatch.setenv("TRAINSHED_HOME", str(place))
        answer = run("ps")
        assert (answer.exit_code, "start the service first, or set TRAINSHED_KEY" in answer.stderr) == (1, True)


@pytest.mark.parametrize("role", ["nlp", "nlp=owner", "=viewer", "N!=viewer"])
def test_invalid_role_creates_no_key(home: Path, service: FakeService, role: str) -> None:
    refused = run("keys", "create", "alice", "--role", role)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("trainshed: roles/")
    assert refused.stderr.endswith("; write --role nlp=editor\n")
    assert service.keys.all() == []
