"""JobStore contract, on memory, SQLite and Postgres (if its binaries are installed)."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from sqlalchemy import text

from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.domain.jobs.job import JobState, StopRequest
from service.domain.jobs.reason import Code, Reason
from service.domain.jobs.usage import Usage
from service.domain.queue.entry import QueueEntry
from service.errors import IdempotencyMismatch
from service.ports import IDEMPOTENCY_TTL, IdempotencyKey, JobQuery, JobStore, Lease, NewJob
from tests.support.builders.specs import infer_spec
from tests.support.fakes.service import a_job
from tests.support.fakes.stores import MemoryJobStore
from tests.support.servers.databases import database_url, emptied
from train_loop.spec import parse_any


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    if request.param == "memory":
        yield MemoryJobStore()
        return
    with emptied(database_url(request, tmp_path)) as engine:
        yield SqlJobStore(engine)


def test_stored_job_is_returned_unchanged(store: JobStore) -> None:
    reason = Reason(Code.CAPACITY, "because", "wait")
    job = a_job(labels={"team": "nlp"}).begin_attempt(now=1.5).mark_submitted(now=2.25)
    job = job.end_attempt("failed", now=2.5, reason=reason, step=7).begin_attempt(now=2.75)
    job = replace(
        job,
        stop_request=StopRequest(
            "pause", checkpoint=False, deadline=7.125, reason=Reason(Code.PREEMPTED, "x"), then_resume=True
        ),
        reason=reason,
        times={JobState.QUEUED: 1.0, JobState.RUNNING: 2.5},
        next_attempt_at=3.0,
        scaling=a_job(scaling={"num_workers": 4}).spec.scaling,
    )
    store.add(NewJob(job))
    assert store.get("job-1") == job


def test_stored_job_of_another_kind_is_returned_unchanged(store: JobStore) -> None:
    job = replace(a_job(), spec=parse_any(infer_spec()))
    store.add(NewJob(job))
    assert store.get("job-1") == job


def test_unknown_job_is_none(store: JobStore) -> None:
    assert store.get("job-none") is None


def test_save_of_an_older_version_is_discarded(store: JobStore) -> None:
    store.add(NewJob(a_job()))
    mine = store.get("job-1")
    assert mine is not None
    assert store.save(replace(mine, next_attempt_at=1.0))
    assert not store.save(replace(mine, next_attempt_at=2.0))
    stored = store.get("job-1")
    assert stored is not None
    assert (stored.next_attempt_at, stored.version) == (1.0, 2)


def test_lease_excludes_other_owners_until_it_expires(store: JobStore) -> None:
    store.add(NewJob(a_job()))
    assert store.claim("job-1", Lease("a", now=0.0, until=10.0)) is not None
    assert store.claim("job-1", Lease("b", now=5.0, until=15.0)) is None
    assert store.claim("job-1", Lease("a", now=9.0, until=19.0)) is not None
    assert store.claim("job-1", Lease("b", now=20.0, until=30.0)) is not None


def test_released_leases_can_be_claimed_and_their_owner_cannot_save(store: JobStore) -> None:
    for job_id in ("job-1", "job-2"):
        store.add(NewJob(a_job(job_id)))
    mine = store.claim("job-1", Lease("a", now=0.0, until=1000.0))
    store.claim("job-2", Lease("b", now=0.0, until=1000.0))
    store.lead(Lease("a", now=0.0, until=1000.0))
    store.give_up_leases("a")
    assert mine is not None
    assert not store.save(mine, owner="a")
    assert not store.save(mine, owner="a", leads=True)
    assert store.lead(Lease("c", now=1.0, until=2.0))
    assert store.claim("job-1", Lease("c", now=1.0, until=2.0)) is not None
    assert store.claim("job-2", Lease("c", now=1.0, until=2.0)) is None


def test_owner_that_lost_its_lease_cannot_save(store: JobStore) -> None:
    store.add(NewJob(a_job()))
    mine = store.claim("job-1", Lease("a", now=0.0, until=10.0))
    assert mine is not None
    store.claim("job-1", Lease("b", now=20.0, until=30.0))
    assert not store.save(mine, owner="a")
    assert store.save(mine, owner="b")


ONCE = IdempotencyKey("key", "sha")


def test_job_of_key_with_the_same_body_is_the_first_job(store: JobStore) -> None:
    assert store.job_of(ONCE, now=0.0) is None
    assert store.add(NewJob(a_job("job-1"), ONCE))
    assert not store.add(NewJob(a_job("job-2"), ONCE))
    first = store.job_of(ONCE, now=IDEMPOTENCY_TTL - 1)
    assert (first and first.id, store.get("job-2")) == ("job-1", None)


def test_job_of_key_with_another_body_raises_idempotency_mismatch(store: JobStore) -> None:
    store.add(NewJob(a_job("job-1"), ONCE))
    with pytest.raises(IdempotencyMismatch, match="'key' was used with another body"):
        store.job_of(IdempotencyKey("key", "other"), now=1.0)


def test_key_expires_after_a_day(store: JobStore) -> None:
    store.add(NewJob(a_job("job-1"), ONCE))
    assert store.job_of(ONCE, now=IDEMPOTENCY_TTL + 1) is None
    assert store.add(NewJob(a_job("job-2", now=IDEMPOTENCY_TTL + 1), ONCE))


def test_concurrent_adds_with_one_key_store_one_job(store: JobStore) -> None:
    added: list[bool] = []

    def submit(number: int) -> None:
        added.append(store.add(NewJob(a_job(f"job-{number}"), ONCE)))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (added.count(True), added.count(False)) == (1, 5)
    assert len(store.page(JobQuery())) == 1


def test_add_all_stores_jobs_with_their_keys(store: JobStore) -> None:
    labelled = a_job("job-2", labels={"team": "nlp"})
    assert store.add_all(
        [NewJob(a_job("job-1")), NewJob(labelled, ONCE), NewJob(a_job("job-3"), IdempotencyKey("other", "sha"))],
        now=0.0,
    )
    assert [job.id for job in store.page(JobQuery())] == ["job-3", "job-2", "job-1"]
    assert store.page(JobQuery(labels=(("team", "nlp"),))) == [labelled]
    assert store.job_of(ONCE, now=1.0) == labelled
    with pytest.raises(IdempotencyMismatch):
        store.job_of(IdempotencyKey("other", "another"), now=1.0)


def test_add_all_stores_nothing_if_a_key_is_taken(store: JobStore) -> None:
    added = [NewJob(a_job("job-1")), NewJob(a_job("job-2"), ONCE)]
    store.add(NewJob(a_job("job-0"), ONCE))
    assert not store.add_all(added, now=1.0)
    assert not store.add_all(
        [NewJob(a_job("job-1"), IdempotencyKey("new", "a")), NewJob(a_job("job-2"), IdempotencyKey("new", "b"))],
        now=1.0,
    )
    assert [job.id for job in store.page(JobQuery())] == ["job-0"]
    assert store.job_of(IdempotencyKey("new", "c"), now=1.0) is None
    assert store.add_all(added, now=IDEMPOTENCY_TTL + 1)
    assert len(store.page(JobQuery())) == 3


def test_deleted_job_is_gone_with_its_labels_and_key(store: JobStore) -> None:
    job = a_job("job-1", labels={"team": "nlp"})
    store.add(NewJob(job, ONCE))
    assert not store.delete(replace(job, version=7), {})
    assert store.delete(job, {})
    assert (store.get("job-1"), store.page(JobQuery(labels=(("team", "nlp"),)))) == (None, [])
    assert store.job_of(ONCE, now=1.0) is None


def test_pages_are_newest_first_and_filtered(store: JobStore) -> None:
    for number in range(1, 6):
        labels = {"team": "nlp" if number % 2 else "cv", "n": str(number)}
        store.add(NewJob(a_job(f"job-{number}", name=f"n{number}", project="p", labels=labels)))

    def ids(query: JobQuery) -> list[str]:
        return [job.id for job in store.page(query)]

    assert ids(JobQuery(limit=2)) == ["job-5", "job-4"]
    assert ids(JobQuery(limit=2, after="job-4")) == ["job-3", "job-2"]
    assert ids(JobQuery(name="n3", projects=frozenset({"p"}))) == ["job-3"]
    assert ids(JobQuery(labels=(("team", "nlp"), ("n", "5")))) == ["job-5"]
    assert ids(JobQuery(states=(JobState.RUNNING,))) == []


def test_page_filters_by_id_prefix(store: JobStore) -> None:
    stored = [
        "job-01m7zz0000",
        "job-01m8000000",
        "job-01m80000zz",
        "job-01m8z00000",
        "job-01m9000000",
        "job-z000000000",
    ]
    for job_id in stored:
        store.add(NewJob(a_job(job_id)))
    for prefix in ("job-", "job-0", "job-01m8", "job-01m80", "job-01m8000000", "job-01mz", "job-zz", "job-z"):
        found = [job.id for job in store.page(JobQuery(id_prefix=prefix))]
        assert found == [job_id for job_id in reversed(stored) if job_id.startswith(prefix)]
    assert [job.id for job in store.page(JobQuery(id_prefix="job-01m8", limit=1))] == ["job-01m8z00000"]


def test_used_between_returns_jobs_active_in_the_interval(store: JobStore) -> None:
    for number, (started, finished) in enumerate([(10.0, 20.0), (15.0, None), (30.0, 40.0), (None, None)], start=1):
        job = a_job(f"job-{number}", project="p" if number < 3 else "q")
        store.add(NewJob(replace(job, started_at=started, finished_at=finished)))

    def ids(since: float, until: float, project: str | None = None) -> list[str]:
        return sorted(
            job.id
            for job in store.used_between(since, until, projects=None if project is None else frozenset({project}))
        )

    assert ids(0.0, 12.0) == ["job-1"]
    assert ids(18.0, 35.0) == ["job-1", "job-2", "job-3"]
    assert ids(25.0, 35.0, "p") == ["job-2"]
    assert ids(45.0, 50.0) == ["job-2"]


def test_usage_of_deleted_jobs_is_kept_by_project_and_day(store: JobStore) -> None:
    first, second = date(2026, 11, 20), date(2026, 11, 21)
    for number, (project, used) in enumerate(
        [("p", {first: Usage(1.0, 2.0, 0.5), second: Usage(0.25)}), ("p", {second: Usage(0.5, 0.5)}), ("q", {})]
    ):
        job = a_job(f"job-{number}", project=project)
        store.add(NewJob(job))
        assert store.delete(job, used)
        assert not store.delete(job, used), "the job is already deleted"
    both = {("p", first): Usage(1.0, 2.0, 0.5), ("p", second): Usage(0.75, 0.5)}
    assert (
        store.used_by_deleted(first, second) == store.used_by_deleted(first, second, projects=frozenset({"p"})) == both
    )
    assert store.used_by_deleted(second, second) == {("p", second): Usage(0.75, 0.5)}
    assert store.used_by_deleted(first, second, projects=frozenset({"q"})) == {}


def test_tickets_reflect_every_change_of_a_long_queue(store: JobStore) -> None:
    for number in range(1100):
        store.add(NewJob(a_job(f"job-{number:04}")))
    assert len(store.queue_entries()) == 1100, "more ids than one statement takes"
    first, second = store.get("job-0001"), store.get("job-0002")
    assert first is not None
    assert second is not None
    assert store.save(replace(first, state=JobState.FAILED))
    assert store.save(second.begin_attempt(now=1.0).move(JobState.STARTING, now=2.0))
    store.add(NewJob(a_job("job-2000")))
    assert store.delete(a_job("job-0003"), {})
    found = {entry.id: entry for entry in store.queue_entries()}
    assert len(found) == 1099
    assert found.keys().isdisjoint({"job-0001", "job-0003"})
    changed = store.get("job-0002")
    assert changed is not None
    assert found["job-0002"] == QueueEntry.of(changed)
    assert {entry.id: entry for entry in store.queue_entries()} == found


def test_ticket_of_stored_job_equals_ticket_of_job(store: JobStore) -> None:
    job = a_job(strategy={"ulysses_size": 2})
    store.add(NewJob(job))
    assert store.queue_entries() == [QueueEntry.of(job)]
    assert store.queue_entries()[0].group == 2


def test_tickets_cover_queued_and_active_jobs(store: JobStore) -> None:
    running = replace(a_job("job-2", priority=5).begin_attempt(now=3.5), state=JobState.RUNNING)
    for job in (a_job("job-1"), running, replace(a_job("job-3"), state=JobState.FAILED)):
        store.add(NewJob(job))
    assert sorted(store.queue_entries(), key=lambda entry: entry.id) == [
        QueueEntry.of(a_job("job-1")),
        QueueEntry.of(running),
    ]
    assert store.active() == ["job-2"]


def test_tickets_include_the_ulysses_size(store: JobStore) -> None:
    job = a_job()
    strategy = job.spec.strategy.model_copy(update={"ulysses_size": 2})
    job = replace(job, spec=job.spec.model_copy(update={"strategy": strategy}))
    store.add(NewJob(job))
    assert store.queue_entries() == [QueueEntry.of(job)]
    assert store.queue_entries()[0].group == 2


def test_only_one_owner_leads_at_a_time(store: JobStore) -> None:
    assert store.lead(Lease("a", now=0.0, until=10.0))
    assert not store.lead(Lease("b", now=5.0, until=15.0))
    assert store.lead(Lease("a", now=9.0, until=19.0))
    assert store.lead(Lease("b", now=20.0, until=30.0))


def test_owner_that_lost_the_lead_cannot_save_as_leader(store: JobStore) -> None:
    store.add(NewJob(a_job()))
    store.lead(Lease("a", now=0.0, until=10.0))
    mine = store.claim("job-1", Lease("a", now=0.0, until=100.0))
    assert mine is not None
    store.lead(Lease("b", now=20.0, until=30.0))
    assert not store.save(mine, owner="a", leads=True)
    assert store.save(mine, owner="a")


def test_leader_saves_without_a_lease_of_the_job(store: JobStore) -> None:
    store.add(NewJob(a_job()))
    store.claim("job-1", Lease("b", now=0.0, until=1e9))
    store.lead(Lease("a", now=0.0, until=10.0))
    job = store.get("job-1")
    assert job is not None
    assert store.save(job, owner="a", leads=True)
    assert not store.save(job, owner="a", leads=True)


def test_sqlite_uses_wal_and_full_synchronous_mode(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    open_database(url).dispose()
    engine = open_database(url)
    with engine.connect() as connection:
        full = 2
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == full
    engine.dispose()
