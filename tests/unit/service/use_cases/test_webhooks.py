"""Webhook messages and their delivery from the outbox, on SQLite and Postgres."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, event, select, update

from service.adapters.sql.outbox import SqlOutbox
from service.adapters.sql.queries import SqlJobCounts
from service.adapters.sql.store import SqlJobStore
from service.adapters.sql.tables import deliveries, webhooks
from service.adapters.sql.webhooks import SqlWebhookStore
from service.domain.access.roles import ANY, OPERATOR, AuditEntry
from service.domain.jobs.job import TRANSITIONS, Job, JobState
from service.domain.jobs.reason import Code, Reason
from service.domain.webhooks.delivery import (
    FAILING,
    FIRST_PAUSE,
    KEPT,
    LONGEST_PAUSE,
    RETRY_SECONDS,
    Answer,
    Delivery,
    DeliveryStatus,
    Message,
    Webhook,
)
from service.ports import Lease, NewJob, WebhookCounts
from service.use_cases.webhooks.delivery_loop import LEASE, Deliverer
from tests.support.fakes.service import Clock, a_job
from tests.support.fakes.webhooks import MemorySender, a_webhook
from tests.support.servers.databases import database_url, emptied

ENTRY = AuditEntry(1.0, OPERATOR, "webhook.test", "default", "hook-1")
RECEIVED, FAILED, DEAD = Answer(200), Answer(500, "answered 500"), Answer(None, "no answer")


@dataclass
class World:
    """A database with jobs, webhooks and an outbox, and a sender with scripted answers."""

    engine: Engine
    jobs: SqlJobStore
    hooks: SqlWebhookStore
    outbox: SqlOutbox
    sender: MemorySender
    clock: Clock

    @property
    def deliverer(self) -> Deliverer:
        return Deliverer(self.outbox, self.sender, self.clock, lambda: 1.0, "me")

    def deliver(self) -> list[str]:
        """Deliver until nothing is due; return the ids of the messages sent."""
        before = len(self.sender.sent)
        while self.deliverer.run_once():
            pass
        return [message.id for _, message in self.sender.sent[before:]]

    def log(self, number: int = 1) -> list[Delivery]:
        """Return the deliveries of a webhook, oldest first."""
        return self.hooks.deliveries(f"hook-{number}", after=None, limit=1000)[::-1]

    def messages(self, number: int = 1) -> list[tuple[str, str | None, str]]:
        """Return the message id, the old and the new state of each delivery."""
        bodies = [(one.message.id, json.loads(one.message.body)["data"]) for one in self.log(number)]
        return [(message_id, data["from"], data["to"]) for message_id, data in bodies]

    def claimed(self) -> bool:
        """Return True if a deliverer holds the lease of a webhook."""
        query = select(webhooks.c.id).where(webhooks.c.lease_owner.is_not(None))
        with self.engine.connect() as connection:
            return connection.execute(query).first() is not None

    def move(self, job_id: str, *states: JobState) -> None:
        """Move a job through `states`."""
        for state in states:
            job = self.jobs.get(job_id)
            assert job is not None
            assert self.jobs.save(job.move(state, now=self.clock()))


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with emptied(database_url(request, tmp_path)) as engine:
        yield World(
            engine, SqlJobStore(engine), SqlWebhookStore(engine), SqlOutbox(engine), MemorySender(), Clock(1000.0)
        )


@pytest.mark.parametrize("before", JobState)
def test_every_transition_creates_one_message_per_matching_webhook(world: World, before: JobState) -> None:
    for number, project in enumerate(("default", ANY, "other"), 1):
        world.hooks.add(a_webhook(number, project=project), ENTRY)
    world.hooks.add(a_webhook(4, states=(JobState.SUCCEEDED, JobState.FAILED)), ENTRY)
    expected = list[tuple[str, str | None, str]]()
    for after in TRANSITIONS[before]:
        job = replace(a_job(f"job-{after.lower()}"), state=before)
        world.jobs.add(NewJob(job))
        assert world.jobs.save(job.move(after, now=5.0, reason=Reason(Code.USER, "why", "what helps")))
        expected += [(f"{job.id}.1", None, before), (f"{job.id}.2", before, after)]
    assert world.messages(1) == world.messages(2) == expected
    assert world.messages(3) == []
    assert world.messages(4) == [one for one in expected if one[2] in (JobState.SUCCEEDED, JobState.FAILED)]


def test_message_body_describes_the_transition(world: World) -> None:
    world.hooks.add(a_webhook(), ENTRY)
    job = a_job().move(JobState.STARTING, now=1.0).begin_attempt(now=1.0).move(JobState.RUNNING, now=2.0)
    world.jobs.add(NewJob(job))
    assert world.jobs.save(job.move(JobState.FAILED, now=3.5, reason=Reason(Code.DATA_ERROR, "row 7", "fix it")))
    assert json.loads(world.log()[-1].message.body) == {
        "id": "job-1.2",
        "type": "job.state",
        "timestamp": "1970-01-01T00:00:03.500+00:00",
        "data": {
            "job": {"id": "job-1", "name": "tiny", "project": "default"},
            "from": "RUNNING",
            "to": "FAILED",
            "reason": {"code": "data_error", "message": "row 7", "remedy": "fix it"},
            "attempt": 1,
        },
    }


def test_change_that_is_not_stored_creates_no_message(world: World) -> None:
    world.hooks.add(a_webhook(), ENTRY)
    job = a_job()
    assert world.jobs.add_all([NewJob(job), NewJob(a_job("job-2"))], now=0.0)
    before = world.messages()
    assert len(before) == 2
    paused = job.move(JobState.PAUSING, now=1.0)
    assert not world.jobs.save(replace(paused, version=7))
    assert not world.jobs.save(paused, owner="other")
    assert not world.jobs.save(paused, owner="other", leads=True)
    assert world.jobs.save(replace(job, next_attempt_at=2.0)), "not a change of state"
    assert not world.jobs.save(paused), "the version is outdated"
    with pytest.raises(ZeroDivisionError), failing_database(world.engine):
        world.jobs.save(replace(paused, version=2))
    with pytest.raises(ZeroDivisionError), failing_database(world.engine):
        world.jobs.add(NewJob(a_job("job-3")))
    assert world.messages() == before
    stored = world.jobs.get("job-1")
    assert stored is not None
    assert (stored.state, world.jobs.get("job-3")) == (JobState.QUEUED, None)
    with pytest.raises(ZeroDivisionError), failing_database(world.engine, "INSERT INTO deliveries"):
        world.jobs.save(replace(paused, version=2))
    assert world.jobs.get("job-1") == stored, "a change is not stored without its message"


@contextmanager
def failing_database(engine: Engine, statement: str | None = None) -> Iterator[None]:
    """Fail every commit, or every statement that starts with `statement`, as if the service died there."""

    def at(*given: object) -> None:
        if statement is None or str(given[2]).startswith(statement):
            1 / 0

    name = "commit" if statement is None else "before_cursor_execute"
    event.listen(engine, name, at)
    try:
        yield
    finally:
        event.remove(engine, name, at)


def test_messages_of_a_job_are_sent_in_order_without_blocking_other_jobs(world: World) -> None:
    world.hooks.add(a_webhook(), ENTRY)
    for job_id in ("job-1", "job-2"):
        world.jobs.add(NewJob(a_job(job_id, now=900.0)))
        world.move(job_id, JobState.STARTING, JobState.RUNNING)
    world.sender.answers = [FAILED, RECEIVED]
    assert world.deliver() == ["job-1.1", "job-2.1", "job-2.2", "job-2.3"]
    assert [one.settled for one in world.log()] == [*[DeliveryStatus.WAITING] * 3, *[DeliveryStatus.DELIVERED] * 3]
    world.clock.now += FIRST_PAUSE - 0.1
    assert world.deliver() == []
    world.clock.now += 0.1
    assert world.deliver() == ["job-1.1", "job-1.2", "job-1.3"]
    assert [one.attempts for one in world.log()] == [2, 1, 1, 1, 1, 1]
    assert {one.error for one in world.log()} == {None}


def test_unreachable_receiver_is_tried_once_before_other_webhooks(world: World) -> None:
    for number in (1, 2):
        world.hooks.add(a_webhook(number), ENTRY)
    for job_id in ("job-1", "job-2", "job-3"):
        world.jobs.add(NewJob(a_job(job_id, now=900.0)))
    world.sender.answers = [DEAD, RECEIVED]
    assert world.deliverer.run_once()
    assert len(world.sender.sent) == 1
    world.clock.now += 0.1
    assert world.deliverer.run_once()
    assert [webhook.id for webhook, _ in world.sender.sent] == ["hook-1", *["hook-2"] * 3]


def test_message_failing_for_three_days_is_given_up_and_can_be_redelivered(world: World) -> None:
    world.hooks.add(a_webhook(), ENTRY)
    world.jobs.add(NewJob(a_job(now=1000.0)))
    world.move("job-1", JobState.CANCELLING)
    world.sender.answers = [FAILED]
    while (first := world.log()[0]).next_at is not None:
        world.clock.now = first.next_at
        assert world.deliverer.run_once()
    assert first.settled is DeliveryStatus.GIVEN_UP
    assert RETRY_SECONDS - 2 * LONGEST_PAUSE < world.clock.now - 1000.0 <= RETRY_SECONDS
    assert first.attempts > RETRY_SECONDS / LONGEST_PAUSE
    world.sender.answers = [RECEIVED]
    assert world.deliver() == ["job-1.2"], "the next message is not blocked"
    again = world.hooks.redeliver("hook-1", first.number, now=world.clock(), entry=ENTRY)
    assert again is not None
    assert (again.settled, again.attempts) == (DeliveryStatus.WAITING, 0)
    assert world.deliver() == ["job-1.1"]
    assert world.hooks.redeliver("hook-1", 99, now=1.0, entry=ENTRY) is None
    assert world.hooks.redeliver("hook-2", first.number, now=1.0, entry=ENTRY) is None


def test_webhook_answering_410_is_disabled_until_enabled(world: World) -> None:
    world.hooks.add(a_webhook(), ENTRY)
    for number in (1, 2):
        world.jobs.add(NewJob(a_job(f"job-{number}", now=900.0)))
    world.sender.answers = [Answer(410, "gone"), RECEIVED]
    assert world.deliver() == ["job-1.1"]
    webhook = world.hooks.get("hook-1")
    assert webhook is not None
    assert (webhook.disabled_at, webhook.disabled_because) == (1000.0, "gone")
    world.move("job-1", JobState.STARTING)
    assert [(one.settled, one.error) for one in world.log()] == [(DeliveryStatus.GIVEN_UP, "gone")] * 2
    assert world.hooks.enable("hook-1", ENTRY)
    assert not world.hooks.enable("hook-1", ENTRY)
    world.move("job-1", JobState.RUNNING)
    assert world.deliver() == ["job-1.3"]


def test_webhook_lease_excludes_other_deliverers_until_it_ends_or_is_released(world: World) -> None:
    world.hooks.add(a_webhook(), ENTRY)
    world.jobs.add(NewJob(a_job(now=900.0)))
    assert world.outbox.claim(Lease("a", 1000.0, 1000.0 + LEASE)) is not None
    assert world.outbox.claim(Lease("b", 1001.0, 1061.0)) is None
    assert world.outbox.claim(Lease("a", 1001.0, 1061.0)) is None, "threads of one owner do not share a webhook"
    world.outbox.release("hook-1", owner="b", now=1001.0)
    assert world.outbox.claim(Lease("b", 1001.0, 1061.0)) is None
    world.outbox.release_all("a", now=1001.0)
    assert world.outbox.claim(Lease("b", 1001.0, 1001.0 + LEASE)) is not None
    assert LEASE <= 90
    found = world.outbox.claim(Lease("a", 1001.0 + LEASE, 2000.0))
    assert found is not None
    assert [one.message.id for one in found.deliveries] == ["job-1.1"]


def test_concurrent_deliverers_send_every_message_once(world: World) -> None:
    for number in (1, 2, 3):
        world.hooks.add(a_webhook(number), ENTRY)
    for number in range(10):
        world.jobs.add(NewJob(a_job(f"job-{number}", now=900.0)))
        world.move(f"job-{number}", JobState.STARTING, JobState.RUNNING)
    chance = random.Random(7)
    in_flight, twice = set[tuple[str, str]](), list[object]()

    class Sender(MemorySender):
        def send(self, webhook: Webhook, message: Message, *, now: float) -> Answer | None:
            this = (webhook.id, message.id)
            twice.extend([this] if this in in_flight else [])
            in_flight.add(this)
            answer = chance.choice([RECEIVED, RECEIVED, FAILED])
            if answer.received:
                self.sent.append((webhook, message))
            in_flight.discard(this)
            return answer

    world.sender = Sender()

    def work() -> None:
        while any(one.next_at is not None for number in (1, 2, 3) for one in world.log(number)):
            if not world.deliverer.run_once() and not world.claimed():
                # Nothing is due: advance the clock, but by less than a lease.
                world.clock.now += FIRST_PAUSE

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert twice == []
    for number in (1, 2, 3):
        got = [message.id for webhook, message in world.sender.sent if webhook.id == f"hook-{number}"]
        assert len(got) == len(set(got)) == 30
        for job in range(10):
            assert [one for one in got if one.startswith(f"job-{job}.")] == [f"job-{job}.{n}" for n in (1, 2, 3)]


def test_deleted_webhook_loses_its_messages(world: World) -> None:
    world.hooks.add(a_webhook(), ENTRY)
    world.jobs.add(NewJob(a_job(now=900.0)))
    assert world.hooks.delete("hook-1", ENTRY)
    assert not world.hooks.delete("hook-1", ENTRY)
    assert (world.log(), world.deliver()) == ([], [])


def test_prune_removes_settled_messages_and_keeps_untried_ones(world: World) -> None:
    for number in (1, 2):
        world.hooks.add(a_webhook(number), ENTRY)
    world.jobs.add(NewJob(a_job(now=1000.0)))
    world.sender.answers = [RECEIVED, DEAD]
    assert world.deliverer.run_once()
    world.hooks.rotate("hook-1", "new", until=1500.0, entry=ENTRY)
    world.outbox.prune(now=1000.0 + KEPT - 1)
    assert [len(world.log(number)) for number in (1, 2)] == [1, 1]
    webhook = world.hooks.get("hook-1")
    assert webhook is not None
    assert (webhook.secret, webhook.previous_secret) == ("new", None)
    world.outbox.prune(now=1000.0 + KEPT + 1)
    assert sum(len(world.log(number)) for number in (1, 2)) == 1
    world.outbox.disable("hook-1", "x", now=1.0)
    world.outbox.disable("hook-2", "x", now=1.0)
    world.outbox.prune(now=1000.0 + KEPT + 1)
    assert sum(len(world.log(number)) for number in (1, 2)) == 0


def test_metrics_count_failing_and_disabled_webhooks(world: World) -> None:
    counts = SqlJobCounts(world.engine)
    assert counts.webhooks() == WebhookCounts()
    for number in (1, 2, 3):
        world.hooks.add(a_webhook(number), ENTRY)
    world.jobs.add(NewJob(a_job(now=1000.0)))
    assert counts.webhooks() == WebhookCounts(backlog=3, active=3)
    with world.engine.begin() as connection:
        for number, attempts in ((1, FAILING), (2, FAILING - 1)):
            mine = update(deliveries).where(deliveries.c.webhook_id == f"hook-{number}")
            connection.execute(mine.values(attempts=attempts))
    world.outbox.disable("hook-3", "gone", now=1.0)
    assert counts.webhooks() == WebhookCounts(backlog=2, active=1, failing=1, disabled=1)
    world.outbox.disable("hook-1", "gone", now=1.0)
    assert counts.webhooks() == WebhookCounts(backlog=1, active=1, failing=0, disabled=2)


def test_change_without_webhooks_costs_one_query(world: World) -> None:
    statements = list[str]()
    event.listen(world.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    job: Job = a_job()
    world.jobs.add(NewJob(job))
    world.jobs.save(job.move(JobState.STARTING, now=1.0))
    assert sum("webhooks" in statement for statement in statements) == 2
    assert not any("deliveries" in statement for statement in statements)
