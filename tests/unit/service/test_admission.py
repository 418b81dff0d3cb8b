"""Who may start, and what the others are told."""

from dataclasses import replace

from service.domain.admission import view_queue, why_wait
from service.domain.job import Job, JobState
from tests.support.service import a_job


def active(job: Job) -> Job:
    return replace(job.begin_attempt(now=0.0), state=JobState.RUNNING)


def wait(job: Job, others: list[Job], total: dict[str, float] | None) -> str | None:
    return why_wait(job.spec.scaling, view_queue(job, [job, *others], total))


def test_job_that_fits_with_a_cpu_for_data_starts() -> None:
    assert wait(a_job(), [], {"CPU": 3.0}) is None


def test_unreachable_cluster_is_waited_for() -> None:
    assert wait(a_job(), [], None) == "the cluster is not reachable yet; the job starts once it answers"


def test_too_many_workers_are_told_so_for_ever() -> None:
    assert wait(a_job(scaling={"num_workers": 9}), [], {"CPU": 4.0}) == (
        "9 workers need 9 CPU where the cluster has 4; add nodes, or cancel and submit fewer or smaller workers"
    )


def test_missing_gpus_are_named() -> None:
    big = a_job(scaling={"num_workers": 2, "resources_per_worker": {"CPU": 1, "GPU": 1}})
    assert "2 GPU where the cluster has 0" in str(wait(big, [], {"CPU": 8.0}))


def test_no_cpu_left_for_data_is_told_where_the_submit_could_not_know() -> None:
    assert "leave less than the 1 that Ray Data needs" in str(wait(a_job(), [], {"CPU": 2.0}))


def test_what_active_jobs_hold_is_not_given_twice() -> None:
    assert wait(a_job("job-2"), [active(a_job("job-1"))], {"CPU": 5.0}) == (
        "next in the queue; waits for 3 CPU (3 of the cluster's 5 are taken)"
    )
    assert wait(a_job("job-2"), [active(a_job("job-1"))], {"CPU": 6.0}) is None


def test_cancelling_job_holds_until_it_is_gone() -> None:
    cancelling = replace(active(a_job("job-1")), state=JobState.CANCELLING)
    assert wait(a_job("job-2"), [cancelling], {"CPU": 5.0}) is not None


def test_older_goes_first_even_where_the_younger_would_fit() -> None:
    big = a_job("job-1", scaling={"num_workers": 4})
    assert wait(a_job("job-2"), [big], {"CPU": 5.0}) == "number 2 in the queue; jobs start by priority, then by age"


def test_priority_goes_before_age() -> None:
    urgent = a_job("job-2", priority=1)
    assert wait(urgent, [a_job("job-1")], {"CPU": 3.0}) is None
    assert str(wait(a_job("job-1"), [urgent], {"CPU": 3.0})).startswith("number 2 in the queue")


def test_job_that_can_never_start_blocks_nobody() -> None:
    assert wait(a_job("job-2"), [a_job("job-1", scaling={"num_workers": 99})], {"CPU": 3.0}) is None
