"""Admission of queued jobs: starts, preemptions and the wait reasons of the rest."""

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.domain.jobs.job import Job, JobState
from service.domain.jobs.reason import Code, Reason
from service.domain.jobs.transitions import preempt
from service.domain.queue.admission import admit
from service.domain.queue.entry import QueueEntry
from service.domain.queue.policy import QueuePolicy, Quota
from service.domain.queue.snapshot import Admission
from tests.support.fakes.service import a_job
from train_loop.plan import Capacity

GPU = {"CPU": 0.1, "GPU": 1}


def active(job: Job, *, since: float = 0.0) -> Job:
    return replace(job.begin_attempt(now=since), state=JobState.RUNNING)


def gpu_job(job_id: str, workers: int, **parts: Any) -> Job:
    return a_job(job_id, scaling={"num_workers": workers, "resources_per_worker": GPU}, **parts)


def admit_jobs(jobs: list[Job], total: dict[str, float] | None, rules: QueuePolicy | None = None) -> Admission:
    return admit(map(QueueEntry.of, jobs), None if total is None else Capacity(total), rules or QueuePolicy())


def wait_message(
    job: Job, others: list[Job], total: dict[str, float] | None, rules: QueuePolicy | None = None
) -> str | None:
    reason = admit_jobs([job, *others], total, rules).waits.get(job.id)
    return reason.message if reason else None


def test_job_that_fits_with_one_cpu_for_ray_data_starts() -> None:
    assert admit_jobs([a_job()], {"CPU": 3.0}) == Admission(starts=("job-1",))


def test_job_waits_while_cluster_is_unreachable() -> None:
    assert wait_message(a_job(), [], None) == "the cluster is not reachable yet; the job starts once it answers"


def test_job_larger_than_cluster_is_unschedulable() -> None:
    job = a_job(scaling={"num_workers": 9})
    reason = admit_jobs([job], {"CPU": 4.0}).waits["job-1"]
    assert (reason.code, reason.message) == (Code.UNSCHEDULABLE, "9 workers need 9 CPU (the cluster has 4)")
    assert reason.remedy == "add nodes, or cancel and submit fewer or smaller workers"


def test_wait_message_names_missing_gpus() -> None:
    assert "2 GPU (the cluster has 0)" in str(wait_message(gpu_job("job-1", 2), [], {"CPU": 8.0}))


def test_wait_message_names_missing_cpu_for_ray_data() -> None:
    assert "leave less than the 1 that Ray Data needs" in str(wait_message(a_job(), [], {"CPU": 2.0}))


def test_resources_of_active_jobs_are_not_available() -> None:
    assert wait_message(a_job("job-2"), [active(a_job("job-1"))], {"CPU": 5.0}) == (
        "next in the queue; waits for 3 CPU (3 of the cluster's 5 are in use)"
    )
    assert wait_message(a_job("job-2"), [active(a_job("job-1"))], {"CPU": 6.0}) is None


def test_cancelling_job_holds_resources_until_its_attempt_ends() -> None:
    cancelling = replace(active(a_job("job-1")), state=JobState.CANCELLING)
    gone = cancelling.end_attempt("cancelled", now=1.0)
    assert wait_message(a_job("job-2"), [cancelling], {"CPU": 5.0}) is not None
    assert wait_message(a_job("job-2"), [gone], {"CPU": 5.0}) is None


def test_younger_job_that_would_delay_an_older_one_waits() -> None:
    holder, big = active(a_job("job-0")), a_job("job-1", scaling={"num_workers": 4})
    assert wait_message(a_job("job-2"), [holder, big], {"CPU": 6.0}) == (
        "number 2 in the queue; job-1 is before it and waits for capacity"
    )


def test_higher_priority_job_starts_before_older_job() -> None:
    urgent, old = a_job("job-2", priority=1), a_job("job-1")
    assert admit_jobs([old, urgent], {"CPU": 3.0}).starts == ("job-2",)


def test_unschedulable_job_does_not_block_others() -> None:
    assert wait_message(a_job("job-2"), [a_job("job-1", scaling={"num_workers": 99})], {"CPU": 3.0}) is None


def test_backfill_starts_job_that_uses_other_resources_than_the_first() -> None:
    total = {"CPU": 32.0, "GPU": 8.0}
    jobs = [active(gpu_job("job-0", 6)), gpu_job("job-1", 4), a_job("job-2")]
    assert admit_jobs(jobs, total).starts == ("job-2",)
    assert admit_jobs(jobs, total, QueuePolicy(backfill=False)).starts == ()


def test_backfill_starts_job_if_the_first_fits_alongside_it() -> None:
    total = {"CPU": 32.0, "GPU": 8.0}
    first, small = gpu_job("job-2", 6), gpu_job("job-3", 2)
    assert admit_jobs([active(gpu_job("job-0", 4)), first, small], total).starts == ("job-3",)
    # After job-0 ends, job-1 (1 GPU) and job-2 (6 GPUs) fit, but job-3 (2 GPUs) does not fit with them.
    assert admit_jobs([active(gpu_job("job-0", 3)), active(gpu_job("job-1", 1)), first, small], total).starts == ()


def test_quota_limits_only_jobs_of_its_project() -> None:
    rules = QueuePolicy(quotas={"nlp": Quota(jobs=1), "*": Quota(workers=3)})
    running = active(a_job("job-1", project="nlp"))
    second, third = a_job("job-2", project="nlp"), a_job("job-3", project="nlp")
    jobs = [running, second, third, a_job("job-4"), a_job("job-5")]
    found = admit_jobs(jobs, {"CPU": 64.0}, rules)
    assert found.starts == ("job-4",)
    assert {job_id: reason.code for job_id, reason in found.waits.items()} == dict.fromkeys(
        ("job-2", "job-3", "job-5"), Code.QUOTA
    )
    assert found.waits["job-2"].message == "the quota of project nlp is 1 jobs; with this job it would use 2"
    assert found.waits["job-5"].message == "the quota of project default is 3 workers; with this job it would use 4"


def test_quota_counts_gpus() -> None:
    rules, total = QueuePolicy(quotas={"*": Quota(gpus=2)}), {"CPU": 8.0, "GPU": 8.0}
    assert "is 2 GPUs; with this job" in str(
        wait_message(gpu_job("job-2", 1), [active(gpu_job("job-1", 2))], total, rules)
    )


def test_job_larger_than_its_quota_is_unschedulable_and_does_not_block_others() -> None:
    rules, total = QueuePolicy(quotas={"*": Quota(gpus=2)}), {"CPU": 8.0, "GPU": 8.0}
    found = admit_jobs([gpu_job("job-1", 4), gpu_job("job-2", 1)], total, rules)
    assert found.starts == ("job-2",)
    assert (found.waits["job-1"].code, found.waits["job-1"].remedy) == (
        Code.UNSCHEDULABLE,
        "raise the quota, or cancel the job and submit one with fewer or smaller workers",
    )


def test_preemption_takes_lowest_priority_then_newest_jobs() -> None:
    total = {"CPU": 64.0, "GPU": 8.0}
    running = [
        active(gpu_job("job-1", 2, priority=3), since=1.0),
        active(gpu_job("job-2", 2), since=2.0),
        active(gpu_job("job-3", 2), since=3.0),
        active(gpu_job("job-4", 2, priority=9), since=4.0),
    ]
    found = admit_jobs([*running, gpu_job("job-5", 2, priority=5)], total)
    assert found.preempts == {"job-3": "job-5"}
    assert "preempting job-3 of lower priority" in found.waits["job-5"].message
    assert admit_jobs([*running, gpu_job("job-5", 6, priority=5)], total).preempts == dict.fromkeys(
        ("job-1", "job-2", "job-3"), "job-5"
    )
    assert admit_jobs([*running, gpu_job("job-5", 7, priority=5)], total).preempts == {}
    assert admit_jobs([*running, gpu_job("job-5", 2, priority=0)], total).preempts == {}
    assert admit_jobs([*running, gpu_job("job-5", 2, priority=5)], total, QueuePolicy(preemption=False)).preempts == {}


def test_reasons_do_not_name_jobs_of_other_projects() -> None:
    total = {"CPU": 64.0, "GPU": 4.0}
    running = [active(gpu_job(f"job-{n}", 1, project="ab"[n % 2]), since=n) for n in range(4)]
    large = [gpu_job("job-7", 4, priority=9, project="a"), gpu_job("job-8", 4, project="b")]
    small = [gpu_job(f"job-9{name}", 1, project=name) for name in "ab"]
    preempting = admit_jobs([*running, *large], total).waits
    assert "preempting job-2, job-0, 2 of other projects of lower priority" in preempting["job-7"].message
    waiting = admit_jobs([*running[:2], *large, *small], total, QueuePolicy(preemption=False, backfill=False)).waits
    assert "; job-7 is before it" in waiting["job-9a"].message
    assert "; a job of another project is before it" in waiting["job-9b"].message
    project_of = {job.id: job.spec.project for job in [*running, *large, *small]}
    for job_id, reason in [*preempting.items(), *waiting.items()]:
        foreign = [other for other, project in project_of.items() if project != project_of[job_id]]
        assert not [other for other in foreign if other in reason.message]


def test_preemption_of_one_large_job_spares_small_jobs() -> None:
    running = [active(gpu_job("job-1", 1), since=2.0), active(gpu_job("job-2", 4, priority=1), since=1.0)]
    found = admit_jobs([*running, gpu_job("job-3", 6, priority=5)], {"CPU": 64.0, "GPU": 8.0})
    assert found.preempts == {"job-2": "job-3"}


def test_preemption_counts_jobs_that_are_already_pausing() -> None:
    leaving = preempt(active(gpu_job("job-1", 4)), whom="job-3", deadline=9.0, now=1.0)
    other = active(gpu_job("job-2", 4))
    found = admit_jobs([leaving, other, gpu_job("job-3", 4, priority=5)], {"CPU": 64.0, "GPU": 8.0})
    assert found.preempts == {}


def test_preempted_job_restarts_from_queue_and_user_paused_job_does_not() -> None:
    preempted = preempt(active(gpu_job("job-1", 4)), whom="job-2", deadline=9.0, now=1.0)
    preempted = replace(preempted.end_attempt("paused", now=2.0), state=JobState.PAUSED)
    assert preempted.stop_request is not None
    by_user = replace(
        preempted, id="job-9", stop_request=replace(preempted.stop_request, reason=Reason(Code.USER, "x"))
    )
    total = {"CPU": 64.0, "GPU": 8.0}
    assert admit_jobs([preempted, by_user], total).starts == ("job-1",)
    assert wait_message(preempted, [active(gpu_job("job-2", 6))], total) is not None


sizes = st.lists(st.integers(1, 5), min_size=0, max_size=5)


@given(sizes, st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=6))
def test_admitted_jobs_never_exceed_capacity(held: list[int], requested: list[tuple[int, int]]) -> None:
    running = [active(gpu_job(f"job-{number}", size)) for number, size in enumerate(held)]
    queued = [gpu_job(f"job-x{number}", size, priority=p) for number, (size, p) in enumerate(requested)]
    found = admit_jobs([*running, *queued], {"CPU": 999.0, "GPU": 8.0})
    started = sum(requested[int(job_id.removeprefix("job-x"))][0] for job_id in found.starts)
    assert not found.starts or sum(held) + started <= 8
    assert {*found.starts} | {*found.waits} == {job.id for job in queued}
    assert not {*found.starts} & {*found.waits}


@given(sizes, st.integers(1, 8), st.integers(1, 4))
def test_backfilled_job_never_delays_the_first(held: list[int], first: int, small: int) -> None:
    """Check by brute force that the first job starts as early as without the backfilled job."""
    running = [active(gpu_job(f"job-{number}", size)) for number, size in enumerate(held)]
    found = admit_jobs([*running, gpu_job("job-a", first), gpu_job("job-b", small)], {"CPU": 999.0, "GPU": 8.0})
    if "job-a" in found.starts or "job-b" not in found.starts:
        return
    for left in itertools.chain.from_iterable(itertools.combinations(held, n) for n in range(len(held) + 1)):
        assert (sum(left) + first <= 8) == (sum(left) + first + small <= 8)


memory = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@given(memory, memory, st.integers(6, 12))
def test_reserved_memory_never_exceeds_that_of_the_node(held: list[int], requested: list[int], total: int) -> None:
    running = [active(replace(a_job(f"job-{place}"), memory={2: each})) for place, each in enumerate(held)]
    queued = [replace(a_job(f"job-x{place}"), memory={2: each}) for place, each in enumerate(requested)]
    cluster = Capacity({"CPU": 999.0, "memory": float(total)}, ({"CPU": 999.0, "memory": float(total)},))
    found = admit(map(QueueEntry.of, [*running, *queued]), cluster, QueuePolicy())
    started = sum(2 * requested[int(job_id.removeprefix("job-x"))] for job_id in found.starts)
    assert not found.starts or 2 * sum(held) + started <= total
    for job in queued:
        assert 2 * job.memory[2] <= total or found.waits[job.id].code is Code.UNSCHEDULABLE
    # A cluster that does not count memory starts them all, as after a change from embedded Ray to another.
    others = admit(map(QueueEntry.of, [*running, *queued]), Capacity({"CPU": 999.0}), QueuePolicy())
    assert len(others.starts) == len(queued)


def test_elastic_job_starts_with_the_workers_whose_memory_is_free() -> None:
    elastic = a_job(scaling={"num_workers": {"min": 1, "max": 4}}, training={"global_batch_size": 4})
    job = replace(elastic, sizes=(1, 2, 4), memory={1: 8, 2: 4, 4: 3})
    for free, workers in ((12.0, 4), (11.0, 2)):
        found = admit([QueueEntry.of(job)], Capacity({"CPU": 9.0, "memory": free}), QueuePolicy())
        assert found.workers == {"job-1": workers}
        assert QueueEntry.of(job).at(workers).needs["memory"] == workers * job.memory[workers]
