"""Who starts, who makes room, and what the others are told."""

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.domain.jobs.job import Job, JobState
from service.domain.jobs.reason import Code, Reason
from service.domain.jobs.transitions import make_room
from service.domain.queue.admission import admit
from service.domain.queue.entry import Ticket
from service.domain.queue.policy import Quota, Rules
from service.domain.queue.snapshot import Admission
from tests.support.service import a_job
from train_loop.plan import Capacity

GPU = {"CPU": 0.1, "GPU": 1}


def active(job: Job, *, since: float = 0.0) -> Job:
    return replace(job.begin_attempt(now=since), state=JobState.RUNNING)


def gpus(job_id: str, workers: int, **parts: Any) -> Job:
    return a_job(job_id, scaling={"num_workers": workers, "resources_per_worker": GPU}, **parts)


def look(jobs: list[Job], total: dict[str, float] | None, rules: Rules | None = None) -> Admission:
    return admit(map(Ticket.of, jobs), None if total is None else Capacity(total), rules or Rules())


def wait(job: Job, others: list[Job], total: dict[str, float] | None, rules: Rules | None = None) -> str | None:
    reason = look([job, *others], total, rules).waits.get(job.id)
    return reason.message if reason else None


def test_job_that_fits_with_a_cpu_for_data_starts() -> None:
    assert look([a_job()], {"CPU": 3.0}) == Admission(starts=("job-1",))


def test_unreachable_cluster_is_waited_for() -> None:
    assert wait(a_job(), [], None) == "the cluster is not reachable yet; the job starts once it answers"


def test_too_many_workers_are_told_so_for_ever() -> None:
    job = a_job(scaling={"num_workers": 9})
    reason = look([job], {"CPU": 4.0}).waits["job-1"]
    assert (reason.code, reason.message) == (Code.UNSCHEDULABLE, "9 workers need 9 CPU (the cluster has 4)")
    assert reason.remedy == "add nodes, or cancel and submit fewer or smaller workers"


def test_missing_gpus_are_named() -> None:
    assert "2 GPU (the cluster has 0)" in str(wait(gpus("job-1", 2), [], {"CPU": 8.0}))


def test_no_cpu_left_for_data_is_told_where_the_submit_could_not_know() -> None:
    assert "leave less than the 1 that Ray Data needs" in str(wait(a_job(), [], {"CPU": 2.0}))


def test_what_active_jobs_hold_is_not_given_twice() -> None:
    assert wait(a_job("job-2"), [active(a_job("job-1"))], {"CPU": 5.0}) == (
        "next in the queue; waits for 3 CPU (3 of the cluster's 5 are in use)"
    )
    assert wait(a_job("job-2"), [active(a_job("job-1"))], {"CPU": 6.0}) is None


def test_cancelling_job_holds_until_it_is_gone() -> None:
    cancelling = replace(active(a_job("job-1")), state=JobState.CANCELLING)
    gone = cancelling.end_attempt("cancelled", now=1.0)
    assert wait(a_job("job-2"), [cancelling], {"CPU": 5.0}) is not None
    assert wait(a_job("job-2"), [gone], {"CPU": 5.0}) is None


def test_older_goes_first_where_the_younger_would_delay_it() -> None:
    holder, big = active(a_job("job-0")), a_job("job-1", scaling={"num_workers": 4})
    assert wait(a_job("job-2"), [holder, big], {"CPU": 6.0}) == (
        "number 2 in the queue; job-1 is before it and waits for capacity"
    )


def test_priority_goes_before_age() -> None:
    urgent, old = a_job("job-2", priority=1), a_job("job-1")
    assert look([old, urgent], {"CPU": 3.0}).starts == ("job-2",)


def test_job_that_can_never_start_blocks_nobody() -> None:
    assert wait(a_job("job-2"), [a_job("job-1", scaling={"num_workers": 99})], {"CPU": 3.0}) is None


def test_a_job_passes_where_what_it_takes_is_not_what_the_first_waits_for() -> None:
    total = {"CPU": 32.0, "GPU": 8.0}
    jobs = [active(gpus("job-0", 6)), gpus("job-1", 4), a_job("job-2")]
    assert look(jobs, total).starts == ("job-2",)
    assert look(jobs, total, Rules(backfill=False)).starts == ()


def test_a_job_passes_where_the_first_fits_beside_it_whenever_others_end() -> None:
    total = {"CPU": 32.0, "GPU": 8.0}
    first, small = gpus("job-2", 6), gpus("job-3", 2)
    assert look([active(gpus("job-0", 4)), first, small], total).starts == ("job-3",)
    # Once the three have ended, 1 and 6 fit and 1, 6 and 2 do not.
    assert look([active(gpus("job-0", 3)), active(gpus("job-1", 1)), first, small], total).starts == ()


def test_quota_of_a_project_holds_its_jobs_and_nobody_elses() -> None:
    rules = Rules(quotas={"nlp": Quota(jobs=1), "*": Quota(workers=3)})
    running = active(a_job("job-1", project="nlp"))
    second, third = a_job("job-2", project="nlp"), a_job("job-3", project="nlp")
    jobs = [running, second, third, a_job("job-4"), a_job("job-5")]
    found = look(jobs, {"CPU": 64.0}, rules)
    assert found.starts == ("job-4",)
    assert {job_id: reason.code for job_id, reason in found.waits.items()} == dict.fromkeys(
        ("job-2", "job-3", "job-5"), Code.QUOTA
    )
    assert found.waits["job-2"].message == "the quota of project nlp is 1 jobs; with this job it would use 2"
    assert found.waits["job-5"].message == "the quota of project default is 3 workers; with this job it would use 4"


def test_gpus_count_for_a_quota() -> None:
    rules, total = Rules(quotas={"*": Quota(gpus=2)}), {"CPU": 8.0, "GPU": 8.0}
    assert "is 2 GPUs; with this job" in str(wait(gpus("job-2", 1), [active(gpus("job-1", 2))], total, rules))


def test_job_over_its_quota_all_alone_is_told_so_and_blocks_nobody() -> None:
    rules, total = Rules(quotas={"*": Quota(gpus=2)}), {"CPU": 8.0, "GPU": 8.0}
    found = look([gpus("job-1", 4), gpus("job-2", 1)], total, rules)
    assert found.starts == ("job-2",)
    assert (found.waits["job-1"].code, found.waits["job-1"].remedy) == (
        Code.UNSCHEDULABLE,
        "raise the quota, or cancel the job and submit one with fewer or smaller workers",
    )


def test_the_least_and_newest_make_room_for_a_higher_priority() -> None:
    total = {"CPU": 64.0, "GPU": 8.0}
    running = [
        active(gpus("job-1", 2, priority=3), since=1.0),
        active(gpus("job-2", 2), since=2.0),
        active(gpus("job-3", 2), since=3.0),
        active(gpus("job-4", 2, priority=9), since=4.0),
    ]
    found = look([*running, gpus("job-5", 2, priority=5)], total)
    assert found.preempts == {"job-3": "job-5"}
    assert "preempting job-3 of lower priority" in found.waits["job-5"].message
    assert look([*running, gpus("job-5", 6, priority=5)], total).preempts == dict.fromkeys(
        ("job-1", "job-2", "job-3"), "job-5"
    )
    assert look([*running, gpus("job-5", 7, priority=5)], total).preempts == {}
    assert look([*running, gpus("job-5", 2, priority=0)], total).preempts == {}
    assert look([*running, gpus("job-5", 2, priority=5)], total, Rules(preemption=False)).preempts == {}


def test_a_large_job_that_makes_room_spares_the_small_ones() -> None:
    running = [active(gpus("job-1", 1), since=2.0), active(gpus("job-2", 4, priority=1), since=1.0)]
    found = look([*running, gpus("job-3", 6, priority=5)], {"CPU": 64.0, "GPU": 8.0})
    assert found.preempts == {"job-2": "job-3"}


def test_what_makes_room_already_is_not_asked_for_twice() -> None:
    leaving = make_room(active(gpus("job-1", 4)), whom="job-3", deadline=9.0, now=1.0)
    other = active(gpus("job-2", 4))
    found = look([leaving, other, gpus("job-3", 4, priority=5)], {"CPU": 64.0, "GPU": 8.0})
    assert found.preempts == {}


def test_preempted_job_waits_for_room_like_others_and_a_paused_one_does_not() -> None:
    preempted = make_room(active(gpus("job-1", 4)), whom="job-2", deadline=9.0, now=1.0)
    preempted = replace(preempted.end_attempt("paused", now=2.0), state=JobState.PAUSED)
    assert preempted.wish is not None
    by_user = replace(preempted, id="job-9", wish=replace(preempted.wish, reason=Reason(Code.USER, "x")))
    total = {"CPU": 64.0, "GPU": 8.0}
    assert look([preempted, by_user], total).starts == ("job-1",)
    assert wait(preempted, [active(gpus("job-2", 6))], total) is not None


sizes = st.lists(st.integers(1, 5), min_size=0, max_size=5)


@given(sizes, st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=6))
def test_nobody_gets_more_than_there_is(held: list[int], asked: list[tuple[int, int]]) -> None:
    running = [active(gpus(f"job-{number}", size)) for number, size in enumerate(held)]
    queued = [gpus(f"job-x{number}", size, priority=p) for number, (size, p) in enumerate(asked)]
    found = look([*running, *queued], {"CPU": 999.0, "GPU": 8.0})
    started = sum(asked[int(job_id.removeprefix("job-x"))][0] for job_id in found.starts)
    assert not found.starts or sum(held) + started <= 8
    assert {*found.starts} | {*found.waits} == {job.id for job in queued}
    assert not {*found.starts} & {*found.waits}


@given(sizes, st.integers(1, 8), st.integers(1, 4))
def test_whoever_passes_delays_nobody_whatever_ends_first(held: list[int], first: int, small: int) -> None:
    """Brute force: in no order of ends does the first start later than it would have."""
    running = [active(gpus(f"job-{number}", size)) for number, size in enumerate(held)]
    found = look([*running, gpus("job-a", first), gpus("job-b", small)], {"CPU": 999.0, "GPU": 8.0})
    if "job-a" in found.starts or "job-b" not in found.starts:
        return
    for left in itertools.chain.from_iterable(itertools.combinations(held, n) for n in range(len(held) + 1)):
        assert (sum(left) + first <= 8) == (sum(left) + first + small <= 8)
