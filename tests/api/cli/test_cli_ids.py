"""Shortened ids, and completion of ids in shells."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from tests.support.clients.command import run
from tests.support.fakes.service import FakeService
from trainshed.cli.ids import shorten
from trainshed.cli.main import app

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
IDS = st.lists(st.text(ALPHABET, min_size=26, max_size=26).map("job-{}".format), unique=True, max_size=20)


@pytest.fixture
def jobs(home: Path, service: FakeService) -> list[str]:
    numbers = iter(["0001", "0112", "0113"])
    service.ids = iter(())
    made = []
    for number in numbers:
        service.ids = iter([int(number)])
        made.append(service.submit().id)
    return made


def test_unique_id_prefix_is_enough(jobs: list[str]) -> None:
    for short in ("job-0001", "0001", "JOB-0001", "000", "job-00"):
        assert f"id  {jobs[0]}" in run("show", short).stdout, short
    assert f"id  {jobs[2]}" in run("show", "last").stdout


def test_ambiguous_id_prefix_lists_the_matches(jobs: list[str]) -> None:
    refused = run("cancel", "011")
    assert (refused.exit_code, refused.stdout, refused.stderr) == (
        1,
        "",
        "trainshed: ambiguous id job-011: several ids start with it; give more characters\n  job-0113\n  job-0112\n",
    )
    for short in ("0114", "what?", "job-"):
        assert run("show", short).exit_code == 1
    assert run("show", "what?").stderr == ("trainshed: job-what? not found; list ids with `trainshed ps`\n")


def test_last_without_jobs_is_an_error(home: Path) -> None:
    assert run("logs", "last").stderr == "trainshed: no jobs yet; submit one with `trainshed submit FILE`\n"


def test_key_ids_may_be_shortened(home: Path) -> None:
    for name in ("alice", "bob"):
        run("keys", "create", name, "--role", "nlp=viewer")
    assert "several ids start with it" in run("keys", "revoke", "00").stderr
    assert run("keys", "revoke", "0002").stdout == "revoked key-0002\n"


@given(IDS)
def test_shortened_ids_are_unique(ids: list[str]) -> None:
    short = shorten(ids)
    assert len(set(short)) == len(ids)
    assert all(whole.startswith(part) and len(part) >= 12 for whole, part in zip(ids, short, strict=True))


def tab(*words: str) -> dict[str, str]:
    """Return the variables with which bash runs the command on Tab."""
    line = " ".join(("trainshed", *words))
    return {"_TRAINSHED_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}


def complete(*words: str) -> Result:
    """Run the completion that a shell runs on Tab, in this process."""
    return CliRunner(env=tab(*words)).invoke(app, prog_name="trainshed")


def test_shell_completes_ids(jobs: list[str]) -> None:
    assert complete("pause", "job-").stdout.split() == jobs[::-1]
    assert complete("logs", "--rank", "0", "000").stdout.split() == ["0001"]
    assert complete("watch", jobs[0], "01").stdout.split() == ["0113", "0112"]
    for name in ("alice", "bob"):
        run("keys", "create", name, "--role", "nlp=viewer")
    run("webhooks", "create", "https://hooks.example/in", "--project", "nlp")
    assert complete("keys", "revoke", "key-").stdout.split() == ["key-0002", "key-0001"]
    assert complete("keys", "revoke", "0001").stdout.split() == ["0001"]
    assert complete("webhooks", "test", "ho").stdout.split() == ["hook-0001"]
    assert complete("ps", "--state", "pau").stdout.split() == ["PAUSING", "PAUSED"]
    command = [sys.executable, "-c", "from trainshed.cli.main import app; app(prog_name='trainshed')"]
    done = subprocess.run(command, env=os.environ | tab("checkp"), capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["checkpoints"], "")


def test_completion_prints_no_error(jobs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_URL", "http://127.0.0.1:9")
    done = complete("show", "job-")
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_completion_can_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    command = [
        sys.executable,
        "-c",
        "from trainshed.cli.main import app; app(prog_name='trainshed')",
        "--install-completion",
    ]
    # Typer installs completion for the parent shell, which may not be bash.
    in_bash = ["bash", "-c", '"$@"; exit $?', "bash", *command]
    done = subprocess.run(in_bash, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "_TRAINSHED_COMPLETE=complete_bash" in (tmp_path / ".bash_completions" / "trainshed.sh").read_text()
