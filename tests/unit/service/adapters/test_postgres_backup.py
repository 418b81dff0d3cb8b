"""Backup commands for Postgres, run exactly as the docs and the CLI give them."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.ports import NewJob
from tests.support.fakes.service import a_job
from tests.support.servers.databases import emptied
from trainshed.cli.main import app

OPERATIONS = Path(__file__).parents[4] / "docs" / "operate" / "operations.md"


@pytest.fixture
def store(postgres: str) -> Iterator[SqlJobStore]:
    if shutil.which("pg_restore") is None:
        pytest.skip("no pg_restore on this machine")
    with emptied(postgres) as engine:
        store = SqlJobStore(engine)
        store.add(NewJob(a_job("job-1")))
        yield store


def commands_of_the_docs() -> list[str]:
    """Return the commands in the console blocks of the Postgres section."""
    part = OPERATIONS.read_text().partition("\n**Postgres**")[2].partition("\n**")[0]
    return re.findall(r"^\$ (.*)$", part, re.MULTILINE)


def run(command: str, folder: Path, url: str = "") -> None:
    environment = os.environ | {"TRAINSHED_DATABASE_URL": url}
    done = subprocess.run(["sh", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def jobs_of(url: str) -> list[str]:
    engine = open_database(url)
    found = [job_id for job_id in ("job-1", "job-2") if SqlJobStore(engine).get(job_id)]
    engine.dispose()
    return found


def test_commands_of_the_docs_back_up_and_restore(store: SqlJobStore, postgres: str, tmp_path: Path) -> None:
    example, own_url, dump, restore = commands_of_the_docs()
    assert example.startswith("export TRAINSHED_DATABASE_URL=postgresql+psycopg://")
    run(f"{own_url}\n{dump}", tmp_path, postgres)
    store.add(NewJob(a_job("job-2")))
    assert store.delete(a_job("job-1"), {})
    assert jobs_of(postgres) == ["job-2"]
    run(f"{own_url}\n{restore}", tmp_path, postgres)
    assert jobs_of(postgres) == ["job-1"]


def test_commands_printed_by_backup_and_restore_work(
    store: SqlJobStore, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path))
    monkeypatch.setenv("TRAINSHED_DATABASE_URL", postgres)
    monkeypatch.setenv("COLUMNS", "1000")
    file = tmp_path / "the dump"
    printed = [CliRunner().invoke(app, [command, str(file)]).stderr for command in ("backup", "restore")]
    dump, restore = (re.search(r"run (pg_.*), and", text) for text in printed)
    assert dump is not None
    assert restore is not None
    run(dump[1], tmp_path)
    before = file.read_bytes()
    assert store.delete(a_job("job-1"), {})
    run(restore[1], tmp_path)
    assert jobs_of(postgres) == ["job-1"]
    assert file.read_bytes() == before
