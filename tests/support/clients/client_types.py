"""Typed uses of the client: mypy checks these functions; they are never called."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

from trainshed import Api, AsyncApi, AsyncClient, AsyncJob, Client, Job, JobState, Line
from trainshed.models import CloneIn, DeedOut, JobOut, KeyIn, Page, ResumeIn, Role, ScalingSpec, WebhookIn, WorkerRange


def calls(api: Api) -> None:
    assert_type(api.job("job-1"), JobOut)
    assert_type(api.jobs(project="nlp"), Page[JobOut])
    assert_type(api.audit(), Page[DeedOut])
    assert_type(api.follow_logs("job-1", rank=0), Iterator[str])
    assert_type(api.follow_events("job-1"), Iterator[Line])
    api.job(1)  # type: ignore[arg-type]
    assert_type(api.jobs(states="RUNNING"), Page[JobOut])
    api.jobs(states="running")  # type: ignore[arg-type]
    api.logs("job-1", page=2)  # type: ignore[call-arg]


async def calls_from_a_loop(api: AsyncApi) -> None:
    assert_type(await api.job("job-1"), JobOut)
    assert_type(await api.jobs(project="nlp"), Page[JobOut])
    assert_type(api.follow_logs("job-1", rank=0), AsyncIterator[str])
    assert_type(api.follow_events("job-1"), AsyncIterator[Line])
    await api.job(1)  # type: ignore[arg-type]


def jobs(client: Client) -> None:
    assert_type(client.submit({"name": "tiny"}), Job)
    assert_type(client.jobs(), Iterator[Job])
    assert_type(client.job("job-1").wait().logs(follow=True), Iterator[str])


def plain_values(client: Client) -> None:
    """Use names of states and roles, members of enums, and plain data in variables."""
    spec = {"name": "tiny", "labels": {"team": "nlp"}, "training": {"max_steps": 3}}
    job = client.submit(spec).wait("RUNNING").wait(["SUCCEEDED", JobState.FAILED])
    client.plan(spec)
    assert_type(client.jobs(state=["QUEUED", "RUNNING"]), Iterator[Job])
    job.wait("DONE")  # type: ignore[arg-type]
    training = {"max_steps": 4}
    client.api.clone(job.clone(training=training).id, overrides={"training": training})
    CloneIn(overrides={"training": training})
    assert_type([line["step"] + 1 for line in job.metrics()], list[Any])
    assert_type(job.info.times["QUEUED"] < job.info.times[JobState.RUNNING], bool)
    assert_type(job.state == "SUCCEEDED", bool)
    roles, states = {"nlp": Role.EDITOR}, [JobState.FAILED]
    KeyIn(name="ci", roles=roles)
    WebhookIn(project="nlp", url="https://example.com", states=states)
    ResumeIn(scaling=ScalingSpec(num_workers=WorkerRange(min=1, max=2)))


async def jobs_from_a_loop(client: AsyncClient) -> None:
    assert_type(await client.submit({"name": "tiny"}), AsyncJob)
    assert_type(client.jobs(), AsyncIterator[AsyncJob])
    assert_type((await client.job("job-1")).logs(follow=True), AsyncIterator[str])
