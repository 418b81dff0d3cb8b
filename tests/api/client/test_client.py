"""The Python client, sync and async, against a real service behind a faulty network."""

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from anyio.from_thread import start_blocking_portal

from service.adapters.helper_processes.checkpoints import HelperTools
from service.api.problems import problem
from service.api.schemas import ExportIn, KeyIn
from service.domain.access.roles import Role
from service.errors import DatabaseFull, KeyInFlight, ServiceError
from tests.support.builders.checkpoints import checkpoint
from tests.support.builders.searches import drawn
from tests.support.builders.tensors import digests_in_process, tensor_checkpoint
from tests.support.clients.blocking import Blocking
from tests.support.fakes.service import KEY, FakeService, a_spec, raw_spec, spec_body
from tests.support.servers.serving import Proxy, cut, drop, lose, say, serving
from train_loop.run_dir import ExportStatus, ExportWish, Outcome
from trainshed import (
    AmbiguousId,
    ApiError,
    AsyncClient,
    Client,
    ExportFailed,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobState,
    NoKeyError,
)
from trainshed.job_base import is_exported

BUSY = say("503 Service Unavailable")
NEW_KEY = KeyIn(name="alice", roles={"nlp": Role.EDITOR})


@pytest.fixture
def proxy(service: FakeService) -> Iterator[Proxy]:
    with serving(service.app()) as port:
        proxy = Proxy(port)
        yield proxy
        proxy.close()


@pytest.fixture(params=drawn(["sync", "async"], 1))
def client(request: pytest.FixtureRequest, proxy: Proxy) -> Iterator[Client]:
    """Provide the sync and the async client; tests call both in the same way."""
    with _client(request.param, proxy.url) as client:
        yield client


@contextmanager
def _client(kind: str, url: str, *, patience: float = 60.0) -> Iterator[Any]:
    if kind == "sync":
        with Client(url, KEY, patience=patience) as client:
            yield client
        return
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(AsyncClient(url, KEY, patience=patience)) as waiting,
    ):
        yield Blocking(portal, waiting)


def test_submit_with_lost_answer_returns_the_same_job(client: Client, proxy: Proxy, service: FakeService) -> None:
    proxy.faults.extend([lose, BUSY, drop])
    job = client.submit(spec_body())
    assert len(proxy.seen) == 4
    proxy.faults.extend([lose, lose])
    clone = job.clone(name="again", from_checkpoint=0)
    assert [found.id for found in client.jobs()] == [clone.id, job.id]
    assert (clone.name, service.get(clone.id).spec.run.training) == ("again", service.get(job.id).spec.run.training)


def start(service: FakeService, job_id: str) -> None:
    """Start the first attempt of a job."""
    service.reconciler().run_once()
    service.run_dir(job_id).attempt(1).logs.mkdir(parents=True)


def end(service: FakeService, job_id: str, outcome: Outcome, *, attempt: int = 1) -> None:
    service.reconciler().run_once()
    service.end(job_id, outcome, attempt=attempt)
    service.reconciler().run_once()


def test_delete_with_lost_answer_succeeds(client: Client, proxy: Proxy, service: FakeService) -> None:
    job = client.submit(spec_body())
    end(service, job.id, Outcome(result="succeeded"))
    proxy.faults.append(lose)
    job.delete()
    assert list(client.jobs()) == []
    key = client.api.create_key(NEW_KEY).key
    proxy.faults.append(lose)
    client.api.revoke_key(key.id)


def test_delete_of_unknown_job_raises_api_error(client: Client, proxy: Proxy) -> None:
    # A request that the rate limit rejects deletes nothing.
    proxy.faults.append(say("429 Too Many Requests", Retry_After="0"))
    with pytest.raises(ApiError, match="job job-none not found") as refused:
        client.api.delete("job-none")
    assert (refused.value.code, refused.value.status, len(proxy.seen)) == ("job_not_found", 404, 2)


def test_create_key_with_lost_answer_is_not_retried(client: Client, proxy: Proxy, service: FakeService) -> None:
    proxy.faults.append(lose)
    with pytest.raises(httpx.RemoteProtocolError):
        client.api.create_key(NEW_KEY)
    assert len(service.keys.all()) == 1
    proxy.faults.append(say("429 Too Many Requests", Retry_After="1"))
    began = time.monotonic()
    assert client.api.create_key(NEW_KEY).key.name == "alice"
    assert time.monotonic() - began >= 1
    assert len(service.keys.all()) == 2


@pytest.mark.parametrize("error", [KeyInFlight("k"), DatabaseFull()], ids=["in_flight", "full"])
def test_submit_retries_while_the_key_is_in_flight_or_the_disk_is_full(
    client: Client, proxy: Proxy, error: ServiceError
) -> None:
    error.retry_after = None
    answer = problem(error)
    head = f"HTTP/1.1 {answer.status_code} Later\r\nconnection: close\r\ncontent-length: {len(answer.body)}\r\n\r\n"
    proxy.faults.append(lambda caller, _: caller.sendall(head.encode() + bytes(answer.body)))
    assert client.submit(spec_body(), idempotency_key="k").id == "job-0001"
    assert len(proxy.seen) == 2


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_retries_end_after_the_timeout(kind: str, proxy: Proxy) -> None:
    with _client(kind, proxy.url, patience=0.5) as client:
        proxy.faults.append(say("429 Too Many Requests", Retry_After="3600"))
        with pytest.raises(httpx.HTTPStatusError, match="does not answer like Trainshed"):
            client.api.me()
        assert len(proxy.seen) == 1
        proxy.faults.extend([BUSY] * 100)
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            client.api.me()
    with _client(kind, "http://127.0.0.1:9", patience=0.5) as client, pytest.raises(httpx.ConnectError):
        client.api.follow_logs("job-none").__next__()
    with _client(kind, "127.0.0.1:9") as client, pytest.raises(httpx.UnsupportedProtocol):
        client.api.me()


def write(service: FakeService, job_id: str, attempt: int) -> list[str]:
    """Write events, metrics and the log of an attempt; return the lines of the log."""
    lines = [f"attempt {attempt} line {number} {'ü' * (number % 7)}\u2028 tab\t" for number in range(60)]
    for number in range(60):
        service.event(job_id, "note", attempt=attempt, number=number)
        service.metric(job_id, attempt=attempt, step=number)
    log = service.run_dir(job_id).attempt(attempt).driver_log
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"{line}\n" for line in lines))
    return lines


@pytest.mark.slow
def test_followed_lines_come_once_despite_disconnects(client: Client, proxy: Proxy, service: FakeService) -> None:
    job = client.submit(spec_body())
    start(service, job.id)
    chance = random.Random(7)
    faults = [cut(0), BUSY, drop, *(cut(chance.randint(200, 2500)) for _ in range(7))]
    proxy.faults.extend(faults)
    followed = job.logs(follow=True)
    got, log = [], write(service, job.id, 1)
    got += [next(followed) for _ in range(30)]
    log += write(service, job.id, 2)
    end(service, job.id, Outcome(result="succeeded"), attempt=2)
    service.end(job.id, Outcome(result="succeeded"), attempt=1)
    service.reconciler().run_once()
    assert [*got, *followed] == log
    for lines, name in ((job.events, "number"), (job.metrics, "step")):
        proxy.faults.extend(faults)
        found = [(line["attempt"], line[name]) for line in lines(follow=True)]
        assert found == [(attempt, number) for attempt in (1, 2) for number in range(60)]
        assert [(line["attempt"], line[name]) for line in lines()] == found
    assert list(job.logs(attempt=1)) == log[:60]
    assert list(job.logs(attempt=1, contains="line 7 ")) == log[7:8]


def test_stream_disconnected_before_its_first_line_stays_with_its_attempt(
    client: Client, proxy: Proxy, service: FakeService
) -> None:
    job = client.submit(spec_body())
    start(service, job.id)
    log: list[str] = []

    def cut_then_write(caller: socket.socket, answer: Iterator[bytes]) -> None:
        begin = b""
        while b"id: 1.0" not in begin:
            begin += next(answer)
        caller.sendall(begin)
        log.extend(write(service, job.id, 1) + write(service, job.id, 2))
        service.end(job.id, Outcome(result="succeeded"))
        service.reconciler().run_once()

    proxy.faults.append(cut_then_write)
    assert list(job.logs(follow=True)) == log
    assert (len(log), len(proxy.seen)) == (120, 3)


def test_jobs_are_requested_page_by_page(client: Client, proxy: Proxy, service: FakeService) -> None:
    ids = [service.submit(name=f"n{number % 2}", labels={"half": str(number % 2)}).id for number in range(110)][::-1]
    found = client.jobs()
    assert proxy.seen == []
    assert next(found).id == ids[0]
    assert len(proxy.seen) == 1
    assert [job.id for job in found] == ids[1:]
    assert len(proxy.seen) == 2
    assert [job.id for job in client.jobs(labels={"half": "1"}, state=JobState.QUEUED)] == ids[::2]
    assert [job.id for job in client.jobs(name="n0", project="default")] == ids[1::2]
    assert list(client.jobs(state=[JobState.FAILED, JobState.PAUSED])) == []


def test_metrics_of_many_steps_are_complete(client: Client, service: FakeService) -> None:
    job = client.submit(spec_body())
    start(service, job.id)
    metrics = service.run_dir(job.id).attempt(1).metrics
    metrics.write_text("".join(f'{{"seq": {n}, "time": 1.0, "attempt": 1, "step": {n}}}\n' for n in range(1, 2106)))
    assert [line["step"] for line in job.metrics()] == list(range(1, 2106))


SPECS: list[Callable[[Path], object]] = [
    lambda root: raw_spec(),
    lambda root: a_spec(),
    lambda root: spec_body().encode(),
    lambda root: root / "spec.json",
]


@pytest.mark.parametrize("spec", SPECS, ids=["mapping", "model", "bytes", "file"])
def test_submit_and_plan_accept_a_spec_in_any_form(
    client: Client, service: FakeService, tmp_path: Path, spec: Any
) -> None:
    (tmp_path / "spec.json").write_text(spec_body())
    assert service.get(client.submit(spec(tmp_path)).id).spec == a_spec()
    assert client.plan(spec(tmp_path)).world == 2


def test_job_is_found_by_unique_id_prefix(client: Client, service: FakeService) -> None:
    for _ in range(12):
        service.submit()
    assert client.job("job-0012").id == client.job("0012").id == "job-0012"
    with pytest.raises(AmbiguousId, match="3 or more ids begin with job-001, such as job-0012, job-0011"):
        client.job("job-001")
    with pytest.raises(ApiError, match="job job-9 not found"):
        client.job("job-9")


def test_wait_returns_or_raises_when_the_job_ends(client: Client, service: FakeService) -> None:
    failed, cancelled, done = (client.submit(spec_body(name=name)) for name in ("a", "b", "c"))
    with pytest.raises(TimeoutError, match=f"0 s were not enough for {failed.id} to be SUCCEEDED"):
        failed.wait(timeout=0)
    assert cancelled.cancel().state is JobState.CANCELLING
    service.reconciler().run_once()
    assert cancelled.wait(JobState.CANCELLED).ended
    with pytest.raises(JobCancelled, match=f"{cancelled.id} is CANCELLED: cancelled by a user"):
        cancelled.wait()
    end(service, done.id, Outcome(result="succeeded"))
    assert done.wait().refresh().state is JobState.SUCCEEDED
    with pytest.raises(JobEnded, match=f"{done.id} is SUCCEEDED"):
        done.wait([JobState.RUNNING, JobState.PAUSED])
    end(service, failed.id, Outcome(result="failed", code="data_error", reason="no such column"))
    with pytest.raises(JobFailed, match="no such column") as error:
        failed.wait()
    assert error.value.job.state is JobState.FAILED


def test_job_is_paused_and_resumed_at_another_size(client: Client, service: FakeService) -> None:
    job = client.submit(spec_body(training={"global_batch_size": 4}))
    assert repr(job).endswith(f"Job({job.id!r}, QUEUED)") or isinstance(job, Blocking)
    job.pause()
    service.reconciler().run_once()
    reason = job.wait(JobState.PAUSED).reason
    assert reason is not None
    assert reason.message == "paused by a user"
    assert job.resume(workers=1).state is JobState.QUEUED
    assert (job.info.scaling.num_workers, job.name, job.progress.step) == (1, "tiny", 0)


def test_newest_checkpoint_is_exported(client: Client, service: FakeService) -> None:
    job = client.submit(spec_body())
    with pytest.raises(LookupError, match=f"{job.id} has no checkpoint yet"):
        job.export()
    stored = service.get(job.id)
    service.run_dirs.prepare(stored.run_dir, stored.spec, stored.size, attempt=1)
    for step in (10, 20):
        checkpoint(service.run_dir(job.id), step, weights=b"abc")
    wish = ExportWish(dtype="bf16")
    service.run_dir(job.id).exports.folder(20, wish).mkdir(parents=True)
    service.run_dir(job.id).exports.write(ExportStatus(step=20, wish=wish, state="done", time=service.clock()))
    assert [found.step for found in job.checkpoints()] == [10, 20]
    assert job.export(dtype="bf16").path.endswith("/export/step-00000020-model-bf16")
    failed = client.api.exported(job.id, 20, ExportIn(dtype="bf16")).model_copy(
        update={"state": "failed", "reason": "no room"}
    )
    with pytest.raises(ExportFailed, match="the export of step 20 failed: no room"):
        is_exported(failed)


def test_digests_are_those_of_the_newest_checkpoint(
    client: Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HelperTools, "digests", digests_in_process)
    job = client.submit(spec_body())
    with pytest.raises(LookupError, match=f"{job.id} has no checkpoint yet"):
        job.digests()
    for step in (10, 20):
        tensor_checkpoint(service.run_dir(job.id), step, {"w": torch.full((2, 3), float(step))})
    newest = job.digests()
    assert (newest.step, newest.tensors["w"].shape) == (20, [2, 3])
    assert job.digests(10).sha256 != newest.sha256


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_client_of_loopback_url_ignores_proxy(kind: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for host in ("127.0.0.1", "localhost"):
        with _client(kind, proxy.url.replace("127.0.0.1", host)) as client:
            assert list(client.jobs()) == []


def test_client_finds_service_and_key_as_the_cli_does(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRAINSHED_URL", "TRAINSHED_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path))
    with pytest.raises(NoKeyError, match="key not found"):
        Client()
    (tmp_path / "admin.key").write_text(f"{KEY}\n")
    (tmp_path / "service.json").write_text(f'{{"url": "{proxy.url}", "pid": {os.getpid()}}}')
    with Client() as client:
        assert client.api.me().id == "operator"
