"""Schema upgrades and downgrades with stored jobs, on SQLite and Postgres."""

import json
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import MetaData, Table, create_engine

from service.adapters.sql.access import SqlKeyStore
from service.adapters.sql.database import Database, open_database
from service.adapters.sql.store import SqlJobStore
from service.adapters.sql.tables import idempotency_keys, metadata
from service.adapters.sql.webhooks import SqlWebhookStore
from service.domain.access.roles import OPERATOR, AuditEntry, Key, Role
from service.domain.jobs.job import JobState, Lineage, StopRequest
from service.domain.jobs.reason import Code, Reason
from service.domain.jobs.usage import Usage
from service.domain.queue.entry import QueueEntry
from service.domain.webhooks.delivery import Webhook
from service.errors import DatabaseUnusable
from service.ports import IdempotencyKey, NewJob
from tests.support.fakes.service import a_job
from tests.support.servers.databases import database_url
from train_loop.spec import dump

ONCE = IdempotencyKey("key", "sha")


def empty_database(url: str) -> None:
    """Drop every table."""
    engine, everything = create_engine(url), MetaData()
    everything.reflect(engine)
    everything.drop_all(engine)
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Provide an empty database and empty it again after the test."""
    url = database_url(request, tmp_path)
    empty_database(url)
    yield url
    empty_database(url)


def test_migrations_create_the_tables_of_the_code(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'jobs.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_migrations_keep_jobs_on_upgrade_and_downgrade(database: str) -> None:
    open_database(database, revision="0001").dispose()
    engine = create_engine(database)
    attempts = [{"number": 1, "submission_id": "job-2-1", "started_at": 1.5, "submitted_at": 2.0, "ended_at": None}]
    old: dict[str, Any] = {
        "name": "tiny",
        "project": "default",
        "spec": dump(a_job(priority=4, strategy={"ulysses_size": 2}).spec),
        "run_dir": "file:///x",
        "created_at": 1.0,
        "updated_at": 9.0,
        "version": 3,
    }
    rows: list[dict[str, Any]] = [
        {"id": "job-1", "state": "QUEUED", "attempts": "[]", "reason": "next in the queue"},
        {
            "id": "job-2",
            "state": "CANCELLING",
            "attempts": json.dumps([one | {"result": None, "reason": None} for one in attempts]),
            "reason": None,
        },
    ]
    with engine.begin() as connection:
        table = Table("jobs", MetaData(), autoload_with=connection)
        for row in rows:
            cancel = {"cancel_deadline": 7.5, "cancel_checkpoint": 0} if row["id"] == "job-2" else {}
            connection.execute(table.insert().values(old | row | cancel))
        keys = Table("idempotency_keys", MetaData(), autoload_with=connection)
        connection.execute(keys.insert().values(key="key", body="sha", job_id="job-1"))
    engine.dispose()

    upgraded = open_database(database)
    store = SqlJobStore(upgraded)
    queued, cancelling = store.get("job-1"), store.get("job-2")
    assert queued is not None
    assert cancelling is not None
    assert queued.reason == Reason(Code.WORKER_FAILURE, "next in the queue")
    assert cancelling.stop_request == StopRequest("cancel", checkpoint=False, deadline=7.5)
    assert (cancelling.attempts[0].workers, cancelling.times[JobState.CANCELLING]) == (2, 9.0)
    assert sorted(store.queue_entries(), key=lambda one: one.id) == [QueueEntry.of(queued), QueueEntry.of(cancelling)]
    assert store.job_of(ONCE, now=2.0) == queued
    assert store.job_of(IdempotencyKey("other", "sha"), now=2.0) is None
    upgraded.dispose()

    open_database(database, revision="0001").dispose()
    engine = create_engine(database)
    with engine.connect() as connection:
        table = Table("jobs", MetaData(), autoload_with=connection)
        found = {row.id: row for row in connection.execute(table.select()).all()}
        keys = Table("idempotency_keys", MetaData(), autoload_with=connection)
        assert [row.key for row in connection.execute(keys.select()).all()] == ["key"]
    engine.dispose()
    assert found["job-1"].reason == "next in the queue"
    assert (found["job-2"].cancel_deadline, found["job-2"].cancel_checkpoint) == (7.5, 0)
    assert json.loads(found["job-2"].attempts)[0].keys() == {*attempts[0], "result", "reason"}


def test_downgrade_fixes_elastic_job_at_its_largest_size(database: str) -> None:
    store = SqlJobStore(engine := open_database(database))
    workers = {"min": 1, "max": 5}
    job = a_job(scaling={"num_workers": workers}, training={"global_batch_size": 8})
    store.add(NewJob(replace(job, sizes=(1, 2, 4), parent=Lineage("job-0", 10))))
    plain = a_job("job-2", training={"global_batch_size": 8})
    store.add(NewJob(replace(plain, scaling=job.spec.scaling, sizes=(1, 2, 4))))
    store.add(NewJob(replace(job, id="job-3", scaling=plain.spec.scaling)))
    engine.dispose()
    open_database(database, revision="0002").dispose()
    store = SqlJobStore(engine := open_database(database))
    found = store.get("job-1")
    assert found is not None
    assert (found.size.world, found.sizes, found.parent) == (4, (), None)
    others = [store.get(job_id) for job_id in ("job-2", "job-3")]
    assert [(one.spec.scaling.world, one.size.world) for one in others if one] == [(2, 4), (5, 2)]
    assert store.queue_entries() == [QueueEntry.of(one) for one in (found, *others) if one]
    engine.dispose()


def test_preempted_job_restarts_after_every_migration(database: str) -> None:
    store = SqlJobStore(engine := open_database(database))
    paused = a_job().move(JobState.STARTING, now=1.0).move(JobState.PAUSING, now=2.0).move(JobState.PAUSED, now=3.0)
    stop_request = StopRequest(
        "pause", checkpoint=True, deadline=9.0, reason=Reason(Code.PREEMPTED, "makes room for job-9")
    )
    store.add(NewJob(replace(paused, stop_request=stop_request)))
    engine.dispose()
    # Revision 0002 stores only who requested the pause.
    engine = open_database(database, revision="0002")
    with engine.connect() as connection:
        table = Table("jobs", MetaData(), autoload_with=connection)
        (row,) = connection.execute(table.select()).all()
    assert json.loads(row.wish) == {
        "mode": "pause",
        "checkpoint": True,
        "deadline": 9.0,
        "then_resume": False,
        "by": "preempted",
    }
    engine.dispose()
    store = SqlJobStore(engine := open_database(database))
    found = store.get("job-1")
    assert found is not None
    assert found.stop_request is not None
    assert found.stop_request.reason.code is Code.PREEMPTED
    assert store.queue_entries() == [QueueEntry.of(found)]
    engine.dispose()
    open_database(database, revision="0001").dispose()
    engine = create_engine(database)
    with engine.connect() as connection:
        table = Table("jobs", MetaData(), autoload_with=connection)
        assert [row.state for row in connection.execute(table.select()).all()] == ["QUEUED"]
    engine.dispose()


def test_downgrade_drops_usage_of_deleted_jobs_and_keeps_jobs(database: str) -> None:
    store, day = SqlJobStore(engine := open_database(database)), date(2026, 11, 21)
    for number in (1, 2):
        store.add(NewJob(a_job(f"job-{number}")))
    assert store.delete(a_job("job-1"), {day: Usage(1.0, 2.0)})
    assert store.used_by_deleted(day, day) == {("default", day): Usage(1.0, 2.0)}
    engine.dispose()
    open_database(database, revision="0003").dispose()
    store = SqlJobStore(engine := open_database(database))
    assert store.used_by_deleted(day, day) == {}
    assert store.get("job-2") == a_job("job-2")
    engine.dispose()


def test_downgrade_drops_keys_and_keeps_their_jobs(database: str) -> None:
    engine = open_database(database)
    store, keys = SqlJobStore(engine), SqlKeyStore(engine)
    key = Key("key-1", "alice", {"nlp": Role.EDITOR}, "ab" * 32, 1.0, "operator")
    entry = AuditEntry(1.0, OPERATOR, "key.create", "nlp", "key-1", {}, {"name": "alice"})
    keys.add(key, entry)
    assert [one for _, one in keys.entries(None, after=None, limit=9)] == [
        replace(entry, caller=replace(OPERATOR, roles={}))
    ]
    for number, once in enumerate((ONCE, IdempotencyKey("k" * 255, "sha", scope="key-01m7y52wjcsrqx0er877149vvx"))):
        assert store.add(NewJob(a_job(f"job-{number}", now=1.0), once))
    engine.dispose()
    open_database(database, revision="0004").dispose()
    engine = open_database(database)
    store, keys = SqlJobStore(engine), SqlKeyStore(engine)
    assert (keys.all(), keys.entries(None, after=None, limit=9)) == ([], [])
    assert store.job_of(ONCE, now=2.0) == a_job("job-0", now=1.0)
    assert store.get("job-1") == a_job("job-1", now=1.0)
    engine.dispose()


def test_downgrade_drops_webhooks_and_keeps_jobs(database: str) -> None:
    engine = open_database(database)
    store, hooks = SqlJobStore(engine), SqlWebhookStore(engine)
    entry = AuditEntry(1.0, OPERATOR, "webhook.create", "default", "hook-1")
    hooks.add(Webhook("hook-1", "default", "https://x/", tuple(JobState), "whsec_QUJD", 1.0, "operator"), entry)
    store.add(NewJob(a_job()))
    assert [one.message.id for one in hooks.deliveries("hook-1", after=None, limit=9)] == ["job-1.1"]
    engine.dispose()
    open_database(database, revision="0007").dispose()
    engine = open_database(database)
    assert SqlWebhookStore(engine).among(None) == []
    assert SqlWebhookStore(engine).deliveries("hook-1", after=None, limit=9) == []
    assert SqlJobStore(engine).get("job-1") == a_job()
    engine.dispose()


def test_idempotency_key_left_in_flight_by_older_version_is_free(database: str) -> None:
    engine = open_database(database, revision="0009")
    with engine.begin() as connection:
        connection.execute(idempotency_keys.insert().values(key="key", body="sha", created_at=1.0))
    engine.dispose()
    store = SqlJobStore(engine := open_database(database))
    assert store.add(NewJob(a_job(), ONCE))
    engine.dispose()


def test_services_that_start_at_once_migrate_one_after_the_other(postgres: str) -> None:
    empty_database(postgres)
    code = f"from service.adapters.sql.database import open_database; open_database({postgres!r}).dispose()"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in started] == [0, 0, 0]


def test_interrupted_migration_changes_nothing(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_database(database, revision="0001").dispose()
    with monkeypatch.context() as patch:
        patch.setattr(Operations, "create_index", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_database(database)
    open_database(database).dispose()


def test_database_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "trainshed.db"
    file.touch(mode=0o644)
    database = Database(f"sqlite:///{file}")
    database.bring_up_to_date()
    assert list(SqlKeyStore(database.engine).all()) == []
    database.close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("statements", "rule"),
    [
        (["CREATE TABLE jobs (title TEXT)"], r"tables that Trainshed did not create \(jobs\)"),
        (
            ["CREATE TABLE alembic_version (version_num TEXT)", "INSERT INTO alembic_version VALUES ('0000')"],
            "revision '0000' of another program",
        ),
        (
            ["CREATE TABLE alembic_version (version_num TEXT)", "INSERT INTO alembic_version VALUES ('ae1027a6acf')"],
            "revision 'ae1027a6acf' of another program",
        ),
    ],
)
def test_database_of_another_program_is_rejected_and_unchanged(
    tmp_path: Path, statements: list[str], rule: str
) -> None:
    file = tmp_path / "other.db"
    with sqlite3.connect(file) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    before = file.read_bytes()
    database = Database(f"sqlite:///{file}")
    with pytest.raises(DatabaseUnusable, match=rule):
        database.bring_up_to_date()
    database.close()
    assert file.read_bytes() == before
