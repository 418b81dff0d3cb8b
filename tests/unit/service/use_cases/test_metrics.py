"""Service metrics: queue waits, outcomes, job counts, goodput and the series of each job."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from service.adapters.sql.database import open_database
from service.adapters.sql.queries import SqlJobCounts
from service.adapters.sql.store import SqlJobStore
from service.domain.access.roles import OPERATOR
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.jobs.transitions import start
from service.domain.metrics import ALL, attempt_results, wait_seconds
from service.ports import NewJob, WebhookCounts
from service.use_cases.metrics import OTHERS, bounded
from tests.support.fakes.service import FakeService, a_job
from tests.support.fakes.stores import MemoryJobStore
from tests.support.servers.databases import database_url
from train_loop.run_dir import Outcome

Labels = tuple[tuple[str, str], ...]
counts = st.dictionaries(
    st.tuples(st.sampled_from(JobState), st.sampled_from("abcdefgh")), st.integers(min_value=1, max_value=9)
)


@given(counts, st.integers(min_value=0, max_value=9))
def test_bounded_counts_keep_every_job_and_few_projects(jobs: dict[tuple[JobState, str], int], most: int) -> None:
    found = bounded(jobs, most)
    own = {project for _, project in found} - {OTHERS}
    assert len(own) == min(most, len({project for _, project in jobs}))
    for state in JobState:
        assert sum(n for (s, _), n in found.items() if s is state) == sum(n for (s, _), n in jobs.items() if s is state)
    sizes = {project: sum(n for (_, p), n in jobs.items() if p == project) for _, project in jobs}
    left_out = sizes.keys() - own
    assert all(sizes[one] >= sizes[other] for one in own for other in left_out)


@given(st.floats(min_value=0, max_value=1e9), st.floats(min_value=-1e6, max_value=1e6))
def test_waited_is_returned_once_and_never_negative(since: float, seconds: float) -> None:
    queued = replace(a_job(now=since), times={JobState.QUEUED: since})
    started = start(queued, now=since + seconds)
    assert wait_seconds(queued, started) == pytest.approx(max(seconds, 0.0), abs=1e-3)
    assert wait_seconds(started, started.move(JobState.RUNNING, now=since)) is None
    assert wait_seconds(queued, queued) is None


def test_outcome_of_an_attempt_is_returned_once() -> None:
    running = start(a_job(), now=1.0)
    over = running.end_attempt("failed", now=2.0)
    assert (
        attempt_results(running, over),
        attempt_results(over, over),
        attempt_results(over, over.begin_attempt(now=3.0)),
    ) == (
        ("failed",),
        (),
        (),
    )
    again = over.begin_attempt(now=3.0)
    assert attempt_results(again, again.end_attempt("succeeded", now=4.0)) == ("succeeded",)


def series(text: bytes) -> dict[tuple[str, Labels], float]:
    """Return the value of every sample, keyed by name and labels."""
    families = text_string_to_metric_families(text.decode())
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for each in families for one in each.samples}


def value(service: FakeService, series_name: str, /, **labels: str) -> float | None:
    """Return the current value of a sample, or None."""
    return series(service.service_metrics.text(OPERATOR)).get(
        (f"trainshed_{series_name}", tuple(sorted(labels.items())))
    )


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


def test_job_metrics_follow_a_job_from_queue_to_end(service: FakeService) -> None:
    assert value(service, "attempts_total", outcome="failed") == value(service, "job_moves_total", state="FAILED") == 0
    job = service.submit(project="nlp")
    assert value(service, "jobs", state="QUEUED", project="nlp") == 1
    service.clock.now += 40
    service.reconciler().run_once()
    assert (value(service, "queue_wait_seconds_count"), value(service, "queue_wait_seconds_sum")) == (1, 40)
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.RUNNING
    service.event(job.id, "training_started", steps=20, replayed=0)
    for step in (1, 2):
        service.metric(job.id, step=step, step_seconds=5.0)
    service.reconciler().run_once()
    service.clock.now += 40
    assert value(service, "goodput_ratio", project="nlp") == pytest.approx(10 / 40)
    service.end(job.id, Outcome(result="succeeded", step=20))
    service.reconciler().run_once()
    assert value(service, "attempts_total", outcome="succeeded") == 1
    assert [value(service, "job_moves_total", state=one) for one in ("STARTING", "RUNNING", "SUCCEEDED")] == [1, 1, 1]
    assert value(service, "jobs", state="QUEUED", project="nlp") == 0
    assert value(service, "jobs", state="SUCCEEDED", project="nlp") == 1
    assert value(service, "goodput_ratio", project="nlp") is None, "only for running jobs"


def test_running_job_has_its_own_series(service: FakeService) -> None:
    job = service.submit(project="nlp")
    service.clock.now += 40
    assert value(service, "queue_oldest_seconds", project="nlp") == 40
    service.reconciler().run_once()
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.RUNNING
    service.event(job.id, "training_started", steps=20, replayed=0)
    written = time.time()
    for step, seconds in ((1, 2.0), (2, 3.0), (3, 4.0)):
        service.metric(job.id, step=step, step_seconds=seconds, data_wait_seconds=1.0, loss=2.5, tokens_per_second=64.0)
    service.reconciler().run_once()
    service.clock.now = written + 100
    labels = {"project": "nlp", "job_id": job.id, "name": "tiny"}
    found = {name: value(service, f"job_{name}", **labels) for name in JOB_SERIES}
    assert found == {
        "step": 3,
        "step_seconds": 3.0,
        "tokens_per_second": 64.0,
        "loss": 2.5,
        "data_wait_ratio": 0.25,
        "restarts": 0,
        "progress_age_seconds": pytest.approx(100, abs=5),
        # The job has no checkpoint yet and began long before the clock was moved.
        "checkpoint_age_seconds": pytest.approx(written + 100 - 1040, abs=5),
    }
    service.event(job.id, "checkpoint_committed", step=3)
    service.event(job.id, "stalled", step=3, seconds=12.0)
    service.reconciler().run_once()
    service.clock.now += 5
    assert value(service, "job_checkpoint_age_seconds", **labels) == pytest.approx(105, abs=5)
    assert value(service, "job_waits", **labels, code="stalled") == 1
    service.end(job.id, Outcome(result="succeeded", step=20))
    service.reconciler().run_once()
    service.clock.now += 5
    assert value(service, "job_step", **labels) is None, "only for running jobs"


JOB_SERIES = (
    *("step", "step_seconds", "tokens_per_second", "loss", "data_wait_ratio", "restarts"),
    *("progress_age_seconds", "checkpoint_age_seconds"),
)


def test_cluster_and_database_outages_are_reported(service: FakeService) -> None:
    assert (value(service, "cluster_up"), value(service, "database_up")) == (1, 1)
    service.queue.unreachable = True
    assert value(service, "cluster_up") == 0
    found = series(service.service_metrics.text(OPERATOR, database_up=False))
    assert found["trainshed_database_up", ()] == 0
    assert not any(name == "trainshed_jobs" for name, _ in found)
    assert any(name == "trainshed_build_info" for name, _ in found), "metrics of the process need no database"


def test_idle_service_detects_cluster_outage_and_recovery(service: FakeService) -> None:
    def passes(seconds: int) -> None:
        for _ in range(seconds):
            service.clock.now += 1
            reconciler.run_once()

    reconciler, total = service.reconciler(), service.cluster.total
    passes(3)
    assert value(service, "cluster_up") == 1
    service.cluster.total = None
    passes(9)
    assert value(service, "cluster_up") == 1, "not before ten seconds without an answer"
    passes(16)
    assert value(service, "cluster_up") == 0
    # The outage ends when Ray answers again, even without a new job.
    service.cluster.total = total
    passes(12)
    assert value(service, "cluster_up") == 1


def test_progress_age_starts_at_the_newest_attempt(service: FakeService) -> None:
    job = service.submit()
    service.reconciler().run_once()
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.RUNNING
    service.event(job.id, "training_started", steps=20, replayed=0)
    service.metric(job.id, step=1)
    service.event(job.id, "checkpoint_committed", step=1)
    service.reconciler().run_once()
    # As after a pause of hours: written lines carry the time of this machine's clock.
    service.clock.now = time.time() + 3 * 3600
    attempt = replace(service.get(job.id).attempts[0], started_at=service.clock.now - 30)
    assert service.store.save(replace(service.get(job.id), attempts=(attempt,)))
    labels = {"project": "default", "job_id": job.id, "name": "tiny"}
    for name in ("progress", "checkpoint"):
        assert value(service, f"job_{name}_age_seconds", **labels) == pytest.approx(30, abs=1)


def test_every_series_is_in_the_series_list_and_the_docs(service: FakeService) -> None:
    service.submit()
    families = text_string_to_metric_families(service.service_metrics.text(OPERATOR).decode())
    exported = {family.name for family in families if family.name.startswith("trainshed_")}
    known = {one.full_name.removesuffix("_total") for one in ALL}
    assert {name for name in exported if not name.endswith("_created")} == known
    page = Path("docs/operate/monitoring.md").read_text()
    assert [one.full_name for one in ALL if f"`{one.full_name}`" not in page] == []


def test_concurrent_scrapes_query_the_database_once(service: FakeService) -> None:
    service_metrics = service.service_metrics
    service.submit()
    first = service_metrics.text(OPERATOR)
    service.submit()
    queued = ("trainshed_jobs", (("project", "default"), ("state", "QUEUED")))
    assert series(service_metrics.text(OPERATOR))[queued] == series(first)[queued] == 1
    service.clock.now += 5
    assert series(service_metrics.text(OPERATOR))[queued] == 2


@pytest.fixture(params=["sqlite", "postgres"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SqlJobStore, SqlJobCounts]]:
    url = database_url(request, tmp_path)
    engine = open_database(url)
    yield SqlJobStore(engine), SqlJobCounts(engine)
    engine.dispose()


def test_sql_counts_equal_memory_counts(stores: tuple[SqlJobStore, SqlJobCounts]) -> None:
    (store, database), memory = stores, MemoryJobStore()
    before = dict(database.counts())
    jobs = [a_job(f"job-watch-{n}", project=f"watch-{n % 2}") for n in range(5)]
    jobs[0] = start(jobs[0], now=1.0)
    for one in (store, memory):
        for job in jobs:
            one.add(NewJob(job))
    found = {key: count for key, count in database.counts().items() if key not in before}
    assert (
        found
        == memory.counts()
        == {
            (JobState.STARTING, "watch-0"): 1,
            (JobState.QUEUED, "watch-0"): 2,
            (JobState.QUEUED, "watch-1"): 2,
        }
    )


def test_sql_queued_since_equals_memory_queued_since(stores: tuple[SqlJobStore, SqlJobCounts]) -> None:
    (store, database), memory = stores, MemoryJobStore()
    jobs = [a_job(f"job-wait-{n}", project=f"wait-{n % 3}", now=100.0 - n) for n in range(6)]
    # A resumed job waits since its resume; a started job does not wait.
    jobs[3] = replace(jobs[3], times={JobState.QUEUED: 500.0})
    jobs[5] = start(jobs[5], now=1.0)
    for one in (store, memory):
        for job in jobs:
            one.add(NewJob(job))
    found = {project: since for project, since in database.queued_since().items() if project.startswith("wait-")}
    assert found == memory.queued_since() == {"wait-0": 100.0, "wait-1": 96.0, "wait-2": 98.0}
    assert database.webhooks() == memory.webhooks() == WebhookCounts()
