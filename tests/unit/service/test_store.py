"""The contract of a JobStore: in memory, on SQLite and, where its binaries are, on a real Postgres."""

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from service.adapters.memory import MemoryJobStore
from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.adapters.sql.tables import metadata
from service.domain.job import Cancel, JobState
from service.errors import IdempotencyMismatch
from service.ports import JobQuery, JobStore, Lease, Once
from tests.support.postgres import postgres_server
from tests.support.service import a_job


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("no Postgres binaries on this machine")
    pytest.importorskip("psycopg", reason="the Postgres driver is not installed")
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    if request.param == "memory":
        yield MemoryJobStore()
        return
    url = request.getfixturevalue("postgres") if request.param == "postgres" else f"sqlite:///{tmp_path / 'jobs.db'}"
    engine = open_database(url)
    yield SqlJobStore(engine)
    with engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    engine.dispose()


def test_job_comes_back_as_it_was_stored(store: JobStore) -> None:
    job = a_job(labels={"team": "nlp"}).begin_attempt(now=1.5).mark_submitted(now=2.25)
    job = replace(job, cancel=Cancel(7.125, checkpoint=False), reason="because", next_attempt_at=3.0)
    assert store.add(job, None) == (job, True)
    assert store.get("job-1") == job


def test_unknown_job_is_none(store: JobStore) -> None:
    assert store.get("job-none") is None


def test_change_on_top_of_an_older_version_is_discarded(store: JobStore) -> None:
    store.add(a_job(), None)
    mine = store.get("job-1")
    assert mine is not None
    assert store.save(replace(mine, reason="first"))
    assert not store.save(replace(mine, reason="second"))
    stored = store.get("job-1")
    assert stored is not None
    assert (stored.reason, stored.version) == ("first", 2)


def test_lease_keeps_others_away_until_it_ends(store: JobStore) -> None:
    store.add(a_job(), None)
    assert store.claim("job-1", Lease("a", now=0.0, until=10.0)) is not None
    assert store.claim("job-1", Lease("b", now=5.0, until=15.0)) is None
    assert store.claim("job-1", Lease("a", now=9.0, until=19.0)) is not None
    assert store.claim("job-1", Lease("b", now=20.0, until=30.0)) is not None


def test_owner_that_lost_its_lease_cannot_save(store: JobStore) -> None:
    store.add(a_job(), None)
    mine = store.claim("job-1", Lease("a", now=0.0, until=10.0))
    assert mine is not None
    store.claim("job-1", Lease("b", now=20.0, until=30.0))
    assert not store.save(mine, owner="a")
    assert store.save(mine, owner="b")


def test_same_key_and_body_give_the_first_job(store: JobStore) -> None:
    once = Once("key", "sha")
    store.add(a_job("job-1"), once)
    first, new = store.add(a_job("job-2"), once)
    assert (first.id, new, store.get("job-2")) == ("job-1", False, None)
    assert store.replay(once) == first


def test_same_key_with_another_body_is_refused(store: JobStore) -> None:
    store.add(a_job("job-1"), Once("key", "sha"))
    with pytest.raises(IdempotencyMismatch, match="'key' was used with another body"):
        store.add(a_job("job-2"), Once("key", "other"))


def test_one_key_used_at_once_makes_one_job(store: JobStore) -> None:
    answers: list[tuple[str, bool]] = []

    def submit(number: int) -> None:
        job, new = store.add(a_job(f"job-{number}"), Once("key", "sha"))
        answers.append((job.id, new))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({job_id for job_id, _ in answers}) == 1
    assert sum(new for _, new in answers) == 1
    assert len(store.page(JobQuery())) == 1


def test_pages_are_newest_first_and_filtered(store: JobStore) -> None:
    for number in range(1, 6):
        labels = {"team": "nlp" if number % 2 else "cv", "n": str(number)}
        store.add(a_job(f"job-{number}", name=f"n{number}", project="p", labels=labels), None)

    def ids(query: JobQuery) -> list[str]:
        return [job.id for job in store.page(query)]

    assert ids(JobQuery(limit=2)) == ["job-5", "job-4"]
    assert ids(JobQuery(limit=2, after="job-4")) == ["job-3", "job-2"]
    assert ids(JobQuery(name="n3", project="p")) == ["job-3"]
    assert ids(JobQuery(labels=(("team", "nlp"), ("n", "5")))) == ["job-5"]
    assert ids(JobQuery(states=(JobState.RUNNING,))) == []


def test_live_jobs_come_in_the_order_in_which_they_start(store: JobStore) -> None:
    store.add(a_job("job-1"), None)
    store.add(a_job("job-2", priority=5), None)
    store.add(replace(a_job("job-3"), state=JobState.FAILED), None)
    assert [job.id for job in store.live()] == ["job-2", "job-1"]


def test_migrations_lead_to_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'jobs.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_sqlite_commits_are_on_disk_before_they_return(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    open_database(url).dispose()
    engine = open_database(url)
    with engine.connect() as connection:
        full = 2
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == full
    engine.dispose()
