"""Elastic jobs: initial size, growth, shrinking and resizes by users."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.jobs.commands import request_pause, request_resume
from service.domain.jobs.decide import decide
from service.domain.jobs.decision import Retry
from service.domain.jobs.job import Job, JobSize, JobState
from service.domain.jobs.observation import Observation, SubmissionStatus
from service.domain.jobs.reason import Code, Reason
from service.domain.jobs.transitions import resize, start
from service.domain.queue.admission import admit
from service.domain.queue.entry import QueueEntry
from service.domain.queue.policy import QueuePolicy, Quota
from service.domain.queue.snapshot import Admission
from tests.support.fakes.service import a_job
from train_loop.plan import Capacity
from train_loop.run_dir import Outcome
from train_loop.spec import ScalingSpec

GPU = {"CPU": 0.1, "GPU": 1}
RETRY = Retry(base=10.0, cap=100.0)
RESIZE_SECONDS = 600.0
"""Seconds that an attempt runs before its job may grow."""


def elastic(job_id: str, sizes: tuple[int, ...], **parts: Any) -> Job:
    scaling = {"num_workers": {"min": sizes[0], "max": sizes[-1]}, "resources_per_worker": GPU}
    job = a_job(job_id, scaling=scaling, training={"global_batch_size": 24}, **parts)
    return replace(job, sizes=sizes)


def running(job: Job, workers: int, *, since: float = 0.0, state: JobState = JobState.RUNNING) -> Job:
    return replace(start(job, now=since, workers=workers), state=state)


def fixed(job_id: str, workers: int, **parts: Any) -> Job:
    return a_job(job_id, scaling={"num_workers": workers, "resources_per_worker": GPU}, **parts)


def admit_jobs(
    jobs: list[Job], gpus: float, rules: QueuePolicy | None = None, *, now: float = RESIZE_SECONDS
) -> Admission:
    cluster = Capacity({"CPU": 999.0, "GPU": gpus})
    return admit(map(QueueEntry.of, jobs), cluster, rules or QueuePolicy(resize_seconds=RESIZE_SECONDS), now=now)


@pytest.mark.parametrize(("gpus", "workers"), [(2, 2), (3, 2), (5, 4), (7, 6), (100, 6)])
def test_elastic_job_starts_at_largest_size_that_fits(gpus: float, workers: int) -> None:
    found = admit_jobs([elastic("job-1", (2, 4, 6))], gpus)
    assert (found.starts, found.workers) == (("job-1",), {"job-1": workers})


def test_elastic_job_waits_for_its_smallest_size() -> None:
    found = admit_jobs([fixed("job-1", 3), elastic("job-2", (2, 4))], 4)
    assert found.starts == ("job-1",)
    assert "waits for 2 GPU (3 of the cluster's 4 are in use)" in found.waits["job-2"].message
    assert admit_jobs([elastic("job-2", (2, 4))], 1).waits["job-2"].code is Code.UNSCHEDULABLE


def test_elastic_job_starts_smaller_within_quota_and_beside_earlier_jobs() -> None:
    rules = QueuePolicy(quotas={"*": Quota(workers=5)})
    assert admit_jobs([elastic("job-1", (2, 4, 6))], 8, rules).workers == {"job-1": 4}
    held, first = running(elastic("job-0", (4,)), 4), fixed("job-1", 6)
    assert admit_jobs([held, first, elastic("job-2", (1, 2, 3))], 8).workers == {"job-2": 2}, (
        "job-1 fits alongside two workers"
    )


def test_elastic_job_grows_if_no_job_waits_and_resize_seconds_have_passed() -> None:
    job = running(elastic("job-1", (2, 4, 6)), 2, since=100.0)
    assert admit_jobs([job], 8, now=100.0 + RESIZE_SECONDS - 1).resizes == {}
    assert admit_jobs([job], 8, now=100.0 + RESIZE_SECONDS).resizes == {"job-1": 6}
    assert admit_jobs([job, running(fixed("job-2", 3), 3)], 8, now=9e9).resizes == {"job-1": 4}
    assert admit_jobs([job, fixed("job-2", 7)], 8, now=9e9).resizes == {}, "free GPUs are kept for the waiting job"
    assert admit_jobs([job], 8, QueuePolicy(quotas={"*": Quota(gpus=5)}), now=9e9).resizes == {"job-1": 4}
    for state in (JobState.STARTING, JobState.RECOVERING):
        assert admit_jobs([replace(job, state=state)], 8, now=9e9).resizes == {}


def test_elastic_job_grows_only_to_size_that_nodes_can_place() -> None:
    job = running(elastic("job-1", (2, 3)), 2)
    pair = replace(
        job,
        spec=job.spec.model_copy(
            update={"scaling": job.requested_scaling.model_copy(update={"resources_per_worker": {"GPU": 2.0}})}
        ),
    )
    total = {"CPU": 9.0, "GPU": 6.0}
    whole, halves = Capacity(total, (total,)), Capacity(total, ({"CPU": 9.0, "GPU": 3.0}, {"GPU": 3.0}))
    entries = [QueueEntry.of(replace(pair, attempts=(replace(pair.attempts[0], resources={"GPU": 2.0}),)))]
    assert admit(entries, whole, QueuePolicy(), now=RESIZE_SECONDS).resizes == {"job-1": 3}
    assert admit(entries, halves, QueuePolicy(), now=RESIZE_SECONDS).resizes == {}


def on_nodes(jobs: list[Job], nodes: int, **each: float) -> Admission:
    every = {"CPU": 99.0, **each}
    cluster = Capacity({name: nodes * amount for name, amount in every.items()}, (every,) * nodes)
    return admit(map(QueueEntry.of, jobs), cluster, QueuePolicy(resize_seconds=RESIZE_SECONDS), now=RESIZE_SECONDS)


def with_scaling(job: Job, **parts: Any) -> Job:
    return replace(job, spec=job.spec.model_copy(update={"scaling": job.spec.scaling.model_copy(update=parts)}))


def test_elastic_job_starts_and_grows_only_to_sizes_that_can_be_placed() -> None:
    # Each node has 3 free GPUs and a worker needs 2: two workers can be placed, although 6 GPUs are free.
    other = running(with_scaling(fixed("job-1", 2), placement_strategy="SPREAD"), 2)
    job = with_scaling(elastic("job-2", (1, 2, 3)), resources_per_worker={"CPU": 0.1, "GPU": 2.0})
    assert on_nodes([other, job], 2, GPU=4.0).workers == {"job-2": 2}
    assert on_nodes([other, running(job, 2)], 2, GPU=4.0).resizes == {}
    assert on_nodes([running(job, 2)], 2, GPU=4.0).resizes == {"job-2": 3}


@pytest.mark.parametrize("strategy", ["PACK", "STRICT_SPREAD", "STRICT_PACK"])
def test_recovering_job_shrinks_if_gpus_suffice_but_placement_fails(strategy: str) -> None:
    each = {"CPU": 0.1, "GPU": 2.0}
    job = with_scaling(elastic("job-1", (1, 2, 3)), resources_per_worker=each, placement_strategy=strategy)
    lost = running(job, 3, state=JobState.RECOVERING)
    # The cluster has six GPUs, but each of the two nodes fits only one worker.
    fits = 1 if strategy == "STRICT_PACK" else 2
    assert on_nodes([lost], 2, GPU=3.0).resizes == {"job-1": fits}


def test_elastic_jobs_do_not_grow_into_the_same_resources() -> None:
    jobs = [running(elastic(f"job-{n}", (2, 4)), 2) for n in range(3)]
    assert admit_jobs(jobs, 8).resizes == {"job-0": 4}


def test_recovering_job_shrinks_if_lost_workers_do_not_fit() -> None:
    job = running(elastic("job-1", (1, 2, 4)), 4, state=JobState.RECOVERING)
    assert admit_jobs([job], 3).resizes == {"job-1": 2}
    assert admit_jobs([job], 4).resizes == {}, "the lost workers fit and restart without a resize"
    assert admit_jobs([job], 0.5).resizes == {}, "no size fits"
    assert admit_jobs([replace(job, state=JobState.RUNNING)], 3).resizes == {}, "it has lost no worker"
    assert admit_jobs([job, running(fixed("job-2", 1), 1)], 3).resizes == {"job-1": 2}


def test_fixed_size_job_is_never_resized() -> None:
    job = running(fixed("job-1", 2), 2)
    assert admit_jobs([job], 8, now=9e9).resizes == {}
    assert admit_jobs([replace(job, state=JobState.RECOVERING)], 1).resizes == {}


def test_resize_saves_and_restarts_through_the_queue() -> None:
    job = resize(running(elastic("job-1", (2, 4)), 2), workers=4, timeout=300.0, now=50.0)
    assert (job.state, job.reason and job.reason.code) == (JobState.PAUSING, Code.RESIZED)
    assert job.stop_request is not None
    assert (job.stop_request.mode, job.stop_request.checkpoint, job.stop_request.deadline) == ("resize", True, 350.0)
    seen = Observation(SubmissionStatus.SUCCEEDED, outcome=Outcome(result="resized", step=7), committed=7)
    queued = decide(job, seen, now=60.0, retry=RETRY).job
    assert (queued.state, queued.stop_request, queued.granted) == (JobState.QUEUED, None, None)
    assert [(attempt.result, attempt.workers) for attempt in queued.attempts] == [("resized", 2)]
    assert queued.failures == ()
    again = start(queued, now=61.0, workers=admit_jobs([queued], 8).workers["job-1"])
    assert (again.size.world, again.attempts[-1].workers) == (4, 4)


def test_resize_of_job_with_lost_workers_has_short_deadline() -> None:
    job = resize(running(elastic("job-1", (2, 4)), 4), workers=2, timeout=300.0, now=50.0)
    assert job.stop_request is not None
    assert job.stop_request.deadline == 60.0
    assert job.reason is not None
    assert job.reason.message == "resumes with 2 workers instead of 4: the cluster has lost capacity"


def test_shrinking_job_names_the_lost_host() -> None:
    lost = Reason(Code.HOST_LOST, "host node1 was lost (rank 1)")
    job = resize(replace(running(elastic("job-1", (1, 2)), 2), reason=lost), workers=1, timeout=300.0, now=50.0)
    assert job.reason is not None
    assert job.reason.message == "resumes with 1 workers instead of 2: host node1 was lost (rank 1)"


def test_retried_attempt_keeps_its_size() -> None:
    job = running(elastic("job-1", (2, 4)), 4)
    failed = decide(job, Observation(SubmissionStatus.FAILED), now=10.0, retry=RETRY).job
    tried = decide(failed, Observation(), now=9e9, retry=RETRY).job
    assert [attempt.workers for attempt in tried.attempts] == [4, 4]


def test_resume_with_other_scaling_resizes_running_job() -> None:
    job = running(fixed("job-1", 2), 2)
    requested = JobSize(ScalingSpec(num_workers=4, resources_per_worker=GPU))
    resized = request_resume(job, requested, deadline=90.0, now=50.0)
    assert (resized.state, resized.stop_request and resized.stop_request.mode) == (JobState.PAUSING, "resize")
    assert QueueEntry.of(resized).scaling.world == 2, "it still holds the resources of its attempt"
    assert request_resume(resized, requested, deadline=99.0, now=51.0) == resized
    assert request_resume(job, JobSize(job.requested_scaling), deadline=90.0, now=50.0) == job
    seen = Observation(SubmissionStatus.SUCCEEDED, outcome=Outcome(result="resized", step=7), committed=7)
    queued = decide(resized, seen, now=60.0, retry=RETRY).job
    assert (queued.state, queued.size.world) == (JobState.QUEUED, 4)
    held = request_pause(resized, deadline=90.0, now=52.0)
    assert (held.stop_request and held.stop_request.mode, held.stop_request and held.stop_request.then_resume) == (
        "pause",
        False,
    )


sizes = st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True).map(lambda found: tuple(sorted(found)))


@given(st.lists(st.tuples(sizes, st.booleans()), min_size=1, max_size=5), st.integers(0, 12))
def test_elastic_jobs_never_exceed_capacity(requested: list[tuple[tuple[int, ...], bool]], gpus: int) -> None:
    jobs = [elastic(f"job-{n}", of) for n, (of, _) in enumerate(requested)]
    jobs = [running(job, job.sizes[0]) if runs else job for job, (_, runs) in zip(jobs, requested, strict=True)]
    found = admit_jobs(jobs, gpus, now=9e9)
    now = {job.id: job.attempts[-1].workers for job in jobs if job.attempts}
    then = now | dict(found.workers) | dict(found.resizes)
    assert sum(then.values()) <= max(gpus, sum(now.values()))
    of = {job.id: job.sizes for job in jobs}
    assert all(workers in of[job_id] for job_id, workers in then.items())
    assert not found.resizes or not found.starts or sum(then.values()) <= gpus
