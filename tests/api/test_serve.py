"""The real process: what it prints, what it leaves, and what survives when it is killed."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.service import spec_body


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of its own, and a cluster that never answers: no Ray is started."""
    own = {
        "TRAINSHED_HOME": str(tmp_path / "home"),
        "TRAINSHED_PORT": "0",
        "TRAINSHED_RAY_ADDRESS": "http://127.0.0.1:9",
    }
    return {**os.environ, **own}


@contextmanager
def serving(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-m", "service.cli.main", "serve"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = re.fullmatch(
                r"Trainshed listens on (http://127\.0\.0\.1:\d+) \(docs: /docs\)\n", process.stdout.readline()
            )
            assert line is not None
            key = (Path(environment["TRAINSHED_HOME"]) / "admin.key").read_text().strip()
            with httpx.Client(base_url=line[1], headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
                yield process, client
        finally:
            process.kill()


def test_job_outlives_a_killed_service(environment: dict[str, str]) -> None:
    with serving(environment) as (process, client):
        assert client.get("/readyz").json() == {"status": "ready"}
        job = client.post("/jobs", content=spec_body()).json()
        process.send_signal(signal.SIGKILL)
    with serving(environment) as (process, client):
        again = client.get(f"/jobs/{job['id']}").json()
        assert (again["id"], again["state"], again["spec"]) == (job["id"], "QUEUED", job["spec"])
        # Whoever follows a job does not keep the service from leaving, and is not told that the job has ended.
        headers = {"accept": "text/event-stream"}
        with client.stream("GET", f"/jobs/{job['id']}/events", headers=headers) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": begin"
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line] == []
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_leaves_with_0(environment: dict[str, str], number: signal.Signals) -> None:
    address = Path(environment["TRAINSHED_HOME"]) / "service.json"
    with serving(environment) as (process, client):
        assert json.loads(address.read_text()) == {"url": str(client.base_url).rstrip("/"), "pid": process.pid}
        assert stat.S_IMODE(address.stat().st_mode) == 0o600
        process.send_signal(number)
        assert process.wait(timeout=30) == 0
    assert not address.exists()


def test_second_service_on_one_home_is_refused(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "service.serve"]
    with serving(environment) as (process, _):
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (second.returncode, process.poll()) == (1, None)
    assert second.stderr == f"Another service uses {environment['TRAINSHED_HOME']}; stop it, or set TRAINSHED_HOME\n"


def test_second_service_on_one_sqlite_database_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'home' / 'trainshed.db'}"
    other = environment | {"TRAINSHED_HOME": str(tmp_path / "other"), "TRAINSHED_DATABASE_URL": url}
    command = [sys.executable, "-m", "service.serve"]
    with serving(environment) as (process, _):
        second = subprocess.run(command, env=other, capture_output=True, text=True, timeout=60)
        assert (second.returncode, process.poll()) == (1, None)
    assert second.stderr == (
        f"Another service uses the SQLite database {tmp_path / 'home' / 'trainshed.db'}; several services share a "
        "Postgres one, which TRAINSHED_DATABASE_URL names\n"
    )
