"""Typed uses of the client: mypy checks these functions; they are never called."""

from collections.abc import AsyncIterator, Iterator
from typing import assert_type

from service.api.schemas import DeedOut, JobOut, Page
from trainshed import Api, AsyncApi, AsyncClient, AsyncJob, Client, Job, Line


def calls(api: Api) -> None:
    assert_type(api.job("job-1"), JobOut)
    assert_type(api.jobs(project="nlp"), Page[JobOut])
    assert_type(api.audit(), Page[DeedOut])
    assert_type(api.follow_logs("job-1", rank=0), Iterator[str])
    assert_type(api.follow_events("job-1"), Iterator[Line])
    api.job(1)  # type: ignore[arg-type]
    api.jobs(states="RUNNING")  # type: ignore[arg-type]
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


async def jobs_from_a_loop(client: AsyncClient) -> None:
    assert_type(await client.submit({"name": "tiny"}), AsyncJob)
    assert_type(client.jobs(), AsyncIterator[AsyncJob])
    assert_type((await client.job("job-1")).logs(follow=True), AsyncIterator[str])
