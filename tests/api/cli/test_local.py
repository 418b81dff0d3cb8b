"""`trainshed up`, `down` and `doctor` against the real process, and invalid settings."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from train_loop.run_dir import ROOT_MARKER
from trainshed.cli.main import app

Done = subprocess.CompletedProcess[str]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a new home and a cluster that never answers, so that no Ray starts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAINSHED_")}
    own = {
        "TRAINSHED_HOME": str(tmp_path / "home"),
        "TRAINSHED_PORT": "0",
        "TRAINSHED_RAY_ADDRESS": "http://127.0.0.1:9",
        "COLUMNS": "300",
    }
    return kept | own


@pytest.fixture
def home(environment: dict[str, str]) -> Iterator[Path]:
    """Return the home; kill the service that still runs on it after the test."""
    home = Path(environment["TRAINSHED_HOME"])
    yield home
    if (home / "service.json").exists():
        os.kill(json.loads((home / "service.json").read_text())["pid"], signal.SIGKILL)


def run(environment: dict[str, str], *arguments: str) -> Done:
    command = [sys.executable, "-m", "trainshed.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_up_doctor_and_down_work_and_can_be_repeated(environment: dict[str, str], home: Path) -> None:
    first = run(environment, "up", "--json")
    assert first.returncode == 0, first.stderr
    up = json.loads(first.stdout)
    assert (up["started"], up["home"], up["log"]) == (True, str(home), str(home / "service.log"))
    assert httpx.get(f"{up['url']}/readyz", timeout=60).json() == {"status": "ready"}
    assert os.getsid(up["pid"]) == up["pid"], "the service outlives the terminal"

    second = run(environment, "up")
    assert (second.returncode, second.stdout) == (0, f"{up['url']}\n")
    assert f"runs already (pid {up['pid']})" in second.stderr
    assert "next: trainshed" in second.stderr

    other = run(environment | {"TRAINSHED_PORT": "1", "TRAINSHED_STORAGE_ROOTS": "file:///data"}, "up")
    assert (other.returncode, other.stdout) == (1, "")
    assert "already runs, with other settings; restart it with `trainshed down` and `trainshed up`" in other.stderr
    assert "\n  TRAINSHED_PORT: the service has 0, this command has 1\n" in other.stderr
    assert '\n  TRAINSHED_STORAGE_ROOTS: the service has {}, this command has {"*": ["file:///data"]}\n' in other.stderr

    # The address of Ray does not answer, and no other check fails.
    examined = run(environment, "doctor", "--json")
    assert examined.returncode == 1, examined.stderr
    found = {one["check"]: one for one in json.loads(examined.stdout)["findings"]}
    assert [name for name, one in found.items() if one["verdict"] == "failed"] == ["ray.reachable"]
    assert "TRAINSHED_RAY_ADDRESS" in found["ray.reachable"]["remedy"]
    assert found["storage.atomic"]["verdict"] == found["service.answers"]["verdict"] == "ok"
    assert found["storage.shared"]["verdict"] == "skipped"
    assert [path.name for path in (home / "runs").iterdir()] == [ROOT_MARKER]

    stopped = run(environment, "down", "--json")
    assert (stopped.returncode, json.loads(stopped.stdout)) == (
        0,
        {"home": str(home), "pid": up["pid"], "stopped": True},
    )
    assert not psutil.pid_exists(up["pid"])
    again = run(environment, "down")
    assert (again.returncode, again.stdout) == (0, f"no service runs on {home}\n")


def test_down_does_not_end_a_foreign_process(environment: dict[str, str], home: Path) -> None:
    """Write a stale service.json whose pid belongs to another process."""
    home.mkdir()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        try:
            (home / "service.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "pid": other.pid}))
            assert run(environment, "down").stdout == f"no service runs on {home}\n"
            assert other.poll() is None
        finally:
            other.kill()
            (home / "service.json").unlink()


def test_failed_up_shows_the_last_lines_of_the_log(environment: dict[str, str], home: Path) -> None:
    home.mkdir()
    (home / "trainshed.db").write_text("this is not a database, and long enough to be read" * 100)
    failed = run(environment, "up")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert f"the service ended with 1; {home}/service.log ends with" in failed.stderr
    assert "file is not a database" in failed.stderr


def test_up_on_a_port_in_use_names_the_setting(environment: dict[str, str], home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        failed = run(environment | {"TRAINSHED_PORT": str(port)}, "up")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; set TRAINSHED_PORT or TRAINSHED_HOST to another "
        "one, or end what listens there (ss -ltnp shows it)"
    ) in failed.stderr
    assert "Traceback" not in failed.stderr


def test_doctor_without_a_service_checks_the_home(environment: dict[str, str], home: Path) -> None:
    home.mkdir(mode=0o755)
    (home / "admin.key").write_text("0" * 64)
    (home / "admin.key").chmod(0o644)
    examined = run(environment, "doctor")
    assert examined.returncode == 1
    lines = examined.stdout.splitlines()
    assert [line.split()[:2] for line in lines if not line.startswith(" ")][:6] == [
        ["ok", "home.writable"],
        ["warning", "home.private"],
        ["failed", "home.key"],
        ["ok", "home.disk"],
        ["ok", "home.port"],
        ["failed", "service.answers"],
    ], examined.stdout
    assert f"→ chmod 600 {home}/admin.key" in examined.stdout
    assert "→ start it with `trainshed up`" in examined.stdout


INVALID = {"TRAINSHED_PORT": "http", "TRAINSHED_DATABASE_URL": "mysql://a:hush@b/c", "TRAINSHED_PROT": "8000"}


@pytest.mark.parametrize(
    "command", [["up"], ["down"], ["doctor"], ["ps"], ["backup", "b.tar"], ["restore", "b.tar"]], ids=" ".join
)
def test_invalid_settings_are_reported_in_lines(environment: dict[str, str], home: Path, command: list[str]) -> None:
    result = CliRunner(env=environment | INVALID).invoke(app, command)
    assert_reported(result.exit_code, result.stdout, result.stderr)
    assert not home.exists()


def test_serve_process_reports_invalid_settings_in_lines(environment: dict[str, str], home: Path) -> None:
    result = run(environment | INVALID, "serve")
    assert_reported(result.returncode, result.stdout, result.stderr)
    assert not home.exists()


def assert_reported(code: int, stdout: str, stderr: str) -> None:
    """Check that the errors of all settings are reported in lines, without the password."""
    assert (code, stdout) == (1, "")
    assert "TRAINSHED_PORT='http': Input should be a valid integer" in stderr
    assert "TRAINSHED_DATABASE_URL='mysql://***@b/c': must begin with" in stderr
    assert "unknown setting TRAINSHED_PROT has no effect; did you mean TRAINSHED_PORT?" in stderr
    assert "Traceback" not in stderr
    assert "hush" not in stderr
