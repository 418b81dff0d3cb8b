"""The real service process: start, stop, kill and a second start."""

import json
import signal
import stat
from pathlib import Path

import pytest

from tests.support.fakes.service import spec_body
from tests.support.servers.served import ended, environment_of, served


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.mark.slow
def test_job_survives_a_killed_service(home: Path) -> None:
    with served(home, real=True) as service:
        process, client = service.process, service.client
        service.takes_jobs()
        assert client.get("/readyz").json() == {"status": "ready"}
        job = client.post("/jobs", content=spec_body()).json()
        process.send_signal(signal.SIGKILL)
    with served(home) as service:
        process, client = service.process, service.client
        again = client.get(f"/jobs/{job['id']}").json()
        assert (again["id"], again["state"], again["spec"]) == (job["id"], "QUEUED", job["spec"])
        # An open stream does not delay shutdown, and it gets no `end` event.
        headers = {"accept": "text/event-stream"}
        with client.stream("GET", f"/jobs/{job['id']}/events", headers=headers) as answer:
            lines = answer.iter_lines()
            assert [next(lines), next(lines)] == [": begin", "id: 0.0"]
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line] == []
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_sigint_end_the_service_with_exit_code_0(home: Path, number: signal.Signals) -> None:
    address = home / "service.json"
    with served(home) as service:
        process, client = service.process, service.client
        written = json.loads(address.read_text())
        assert (written["url"], written["pid"]) == (str(client.base_url).rstrip("/"), process.pid)
        assert stat.S_IMODE(address.stat().st_mode) == 0o600
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
    assert not address.exists()


def test_second_service_on_one_home_or_one_sqlite_database_is_rejected(home: Path, tmp_path: Path) -> None:
    database = home / "trainshed.db"
    other = environment_of(tmp_path / "other", TRAINSHED_DATABASE_URL=f"sqlite:///{database}")
    with served(home) as service:
        assert ended(environment_of(home)) == (1, f"Another service uses {home}; stop it, or set TRAINSHED_HOME\n")
        assert ended(other) == (
            1,
            f"Another service uses the SQLite database {database}; to run several services, "
            "set TRAINSHED_DATABASE_URL to a Postgres database\n",
        )
        assert service.process.poll() is None
