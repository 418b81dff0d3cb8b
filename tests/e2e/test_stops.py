"""Pause, cancel and resize of a job end within five seconds in every phase of an attempt, on real Ray.

So do planned ends of its head (`leave`) or of its driver (`terminate`), which do not count as failures. What is lost
meanwhile is named, with the newest checkpoint. The service is started with SIGINT ignored, as by `nohup` or a script
in the background. All its processes inherit that.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobSubmissionClient

from service.adapters.ray.head import read_head
from service.adapters.ray.jobs import RayJobs
from service.adapters.ray.session import RayAddress
from service.api.schemas import JobOut
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from service.ports import SubmitRequest
from tests.support.builders.searches import drawn
from tests.support.builders.specs import TINY
from tests.support.ranks.torchrun import write_tokens
from tests.support.servers.live import LiveService
from tests.support.servers.worker_forks import EVALUATING, LOADING, SAVING, SLOW
from tests.support.waiting import wait_for
from train_loop.liveness.leave import ask_to_leave
from train_loop.liveness.planned_end import REASON
from train_loop.liveness.stops import NOTICE

pytestmark = pytest.mark.timeout(300)
LIMIT_SECONDS = 5.0
CPUS = 3
LONG = {"max_steps": 100_000}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    service = LiveService(tmp_path_factory.mktemp("home"), quick=True, step_seconds=0.05)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        service.start()
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield service
    finally:
        service.stop()


def cluster_of(service: LiveService) -> RayAddress:
    """Return the address of the service's Ray, once it runs jobs."""
    head = wait_for(lambda: read_head(service.home / "ray.json"), "the head")
    url = wait_for(head.find_dashboard, "the dashboard")
    address = RayAddress(url, (service.home / "ray.token").read_text().strip())
    wait_for(RayJobs(lambda: address, python="python").capacity, "the cluster")
    return address


@contextmanager
def full_cluster(service: LiveService) -> Iterator[None]:
    """Hold all CPUs of the cluster, unknown to the service."""
    address = cluster_of(service)
    client = JobSubmissionClient(address.url, headers={"Authorization": f"Bearer {address.token}"})
    holder = client.submit_job(entrypoint="sleep 600", entrypoint_num_cpus=CPUS)
    wait_for(lambda: client.get_job_status(holder) == "RUNNING", "the holder of all CPUs")
    try:
        yield
    finally:
        client.stop_job(holder)


def event(service: LiveService, job_id: str, *names: str) -> dict[str, Any]:
    """Wait for the first of these events and return it."""
    found = wait_for(
        lambda: [one for one in service.events(job_id) if one["event"] in names], " or ".join(names), seconds=90
    )
    return found[0]


def starting(service: LiveService) -> Iterator[str]:
    job_id = service.submit()
    service.wait_for_state(job_id, JobState.STARTING)
    yield job_id


def preparing(service: LiveService) -> Iterator[str]:
    data = {"train": {"path": "stdlib://*.py"}, "sequence_length": 128, "columns": {"text": "text"}, "packing": True}
    job_id = service.submit(data=data)
    event(service, job_id, "training_tokenizer", "preparing")
    yield job_id


def waiting_for_capacity(service: LiveService) -> Iterator[str]:
    with full_cluster(service):
        job_id = service.submit()
        event(service, job_id, "waiting_for_capacity")
        yield job_id


def loading(service: LiveService) -> Iterator[str]:
    job_id = service.submit(labels={SLOW: LOADING})
    event(service, job_id, "workers_ready")
    yield job_id


def evaluating(service: LiveService) -> Iterator[str]:
    path = service.home / "data" / "eval.parquet"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        write_tokens(path, rows=64, length=32, vocab=TINY["vocab_size"])
    job_id = service.submit(
        labels={SLOW: EVALUATING}, data={"eval": {"path": path.as_uri()}}, training=LONG | {"eval_steps": 1}
    )
    wait_for((service.run_dir(job_id).root / EVALUATING).exists, "an evaluation")
    yield job_id


def saving(service: LiveService) -> Iterator[str]:
    job_id = service.submit(labels={SLOW: SAVING}, training=LONG, checkpoint={"every_steps": 1})
    event(service, job_id, "checkpoint_committed")
    yield job_id


def recovering(service: LiveService) -> Iterator[str]:
    job_id = service.submit(training=LONG)
    os.kill(event(service, job_id, "training_started")["workers"][1]["pid"], signal.SIGKILL)
    event(service, job_id, "workers_lost")
    yield job_id


Phase = Callable[[LiveService], Iterator[str]]
PHASES: tuple[Phase, ...] = (starting, preparing, waiting_for_capacity, loading, evaluating, saving, recovering)
REQUESTS = {"pause": "paused", "cancel": "cancelled", "resize": "resized", "leave": "moved", "terminate": "moved"}
CELLS = [
    (phase, request)
    for place, phase in enumerate(PHASES)
    for other, request in enumerate(REQUESTS)
    # Without MORE a fifth of the cells, each phase and each request among them; a commit draws five of these.
    if "MORE" in os.environ or place % 5 == other
]


def send(service: LiveService, job_id: str, request: str) -> float:
    """Send a request, and return the time at which it was sent. Signals and notices need a driver, and come twice."""
    if request in ("leave", "terminate"):
        event(service, job_id, "attempt_started")
    began = time.monotonic()
    if request == "pause":
        service.client.pause(job_id)
    elif request == "cancel":
        service.client.cancel(job_id)
    elif request == "resize":
        scaling = service.client.job(job_id).scaling
        service.client.resume(job_id, scaling=scaling.model_copy(update={"num_workers": 4}))
    elif request == "leave":
        for _ in range(2):
            ask_to_leave(service.run_dir(job_id), 1, reason=REASON)
    else:
        driver = service.driver(job_id)
        for _ in range(2):
            driver.terminate()
    return began


@pytest.mark.parametrize(("phase", "request_"), drawn(CELLS, 3))
def test_request_ends_the_attempt_within_five_seconds(service: LiveService, phase: Phase, request_: str) -> None:
    with contextmanager(phase)(service) as job_id:
        began = send(service, job_id, request_)

        def ended() -> JobOut | None:
            job = service.client.job(job_id)
            return job if job.attempts[0].result is not None else None

        job = wait_for(ended, "the end of the attempt", seconds=60)
        seconds = time.monotonic() - began
    if not job.state.terminal:
        service.client.cancel(job_id)
        service.wait_for_state(job_id, JobState.CANCELLED)
    assert job.attempts[0].result == REQUESTS[request_]
    assert seconds < LIMIT_SECONDS, service.debug_report(job_id)
    if REQUESTS[request_] == "moved":
        assert job.reason is not None
        notice = REASON if request_ == "leave" else NOTICE
        newest = max(service.run_dir(job_id).manifests(), default=None)
        resumes = "there is no checkpoint" if newest is None else f"the run resumes from step {newest}"
        assert job.reason.message == f"{notice}; {resumes}"
        assert (newest is not None) == (phase in (evaluating, saving))


@dataclass(frozen=True)
class Attempt:
    """A training attempt of a job with a checkpoint; rank 1 is its victim."""

    service: LiveService
    job_id: str
    number: int

    def begin(self) -> None:
        """Wait until it trains and a checkpoint is there, then stop rank 1, so that no rank can save."""
        wait_for(lambda: any(line["attempt"] == self.number for line in self.service.metrics(self.job_id)), "a step")
        event(self.service, self.job_id, "checkpoint_committed")
        self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to rank 1."""
        started = self.wait_for_event("training_started")
        os.kill(started["workers"][1]["pid"], number)

    def wait_for_event(self, name: str) -> dict[str, Any]:
        """Wait for an event of this attempt and return it."""
        return wait_for(
            lambda: next(
                (one for one in self.service.events(self.job_id, name) if one["attempt"] == self.number), None
            ),
            name,
            seconds=90,
        )


def lose_a_rank_before(attempt: Attempt) -> None:
    attempt.signal(signal.SIGKILL)
    attempt.wait_for_event("workers_lost")
    attempt.service.client.pause(attempt.job_id)


def lose_a_rank(attempt: Attempt) -> None:
    attempt.service.client.pause(attempt.job_id)
    attempt.wait_for_event("stopping")
    attempt.signal(signal.SIGSEGV)
    # A stopped process gets the signal before it runs on.
    attempt.signal(signal.SIGCONT)


def lose_the_driver(attempt: Attempt) -> None:
    attempt.service.client.pause(attempt.job_id)
    attempt.wait_for_event("stopping")
    attempt.service.driver(attempt.job_id).kill()


def cancel_a_hanging_rank(attempt: Attempt) -> None:
    attempt.wait_for_event("stalled")
    attempt.service.client.pause(attempt.job_id)
    remedy = "to stop without a new checkpoint: trainshed pause JOB --grace 0"

    def waits() -> bool:
        reason = attempt.service.client.job(attempt.job_id).reason
        return reason is not None and (reason.code, reason.remedy) == ("stalled", remedy)

    wait_for(waits, "the hang as reason of the pause")
    attempt.service.client.cancel(attempt.job_id)


LOSSES = (
    (lose_a_rank_before, "stopped while its workers were restarted: RANK was killed by signal 9 (SIGKILL)"),
    (lose_a_rank, "RANK was killed by signal 11 (SIGSEGV) before it saved"),
    (lose_the_driver, "the driver was lost: it was killed by signal 9 (SIGKILL), exit code 137 before it saved"),
    (cancel_a_hanging_rank, "the workers did not save (RANK is stopped (SIGSTOP))"),
)
"""Losses before or during a stop, and their reasons, one attempt of a job after the other."""


@pytest.mark.skipif("MORE" not in os.environ, reason="four attempts of a job: `make more` runs it")
def test_losses_before_and_during_a_stop_are_named_with_the_newest_checkpoint(service: LiveService) -> None:
    job_id = service.submit(training=LONG, checkpoint={"every_steps": 10})
    rank = f"rank 1 on {socket.gethostname()}"
    for number, (lose, cause) in enumerate(LOSSES, start=1):
        attempt = Attempt(service, job_id, number)
        attempt.begin()
        lose(attempt)
        began = time.monotonic()
        job = service.wait_for_state(job_id, JobState.CANCELLED if number == len(LOSSES) else JobState.PAUSED)
        assert time.monotonic() - began < LIMIT_SECONDS, service.debug_report(job_id)
        newest = max(service.run_dir(job_id).manifests())
        assert job.reason is not None
        expected = f"({cause.replace('RANK', rank)}; the newest checkpoint is of step {newest})"
        # A shell reports a signal as 128 + its number, unless the driver has replaced it.
        assert job.reason.message.replace("exit code -9", "exit code 137").endswith(expected), job.reason.message
        if job.state is JobState.PAUSED:
            service.client.resume(job_id)
    assert [attempt.result for attempt in job.attempts] == ["paused", "paused", "failed", "cancelled"]
    # The ends of the first two were faults: a rank was lost.
    assert job.restarts == 2


@pytest.mark.parametrize(
    ("script", "end"),
    [
        (
            "echo \"ModuleNotFoundError: No module named 'train_loop'\"; exit 1",
            "it ended with exit code 1 (ModuleNotFoundError: No module named 'train_loop')",
        ),
        ("kill -KILL $$", "it was killed by signal 9 (SIGKILL), exit code "),
        ("kill -TERM $$", "it was killed by signal 15 (SIGTERM), exit code "),
    ],
)
def test_end_of_a_driver_on_ray_names_its_exit_code_or_signal(
    service: LiveService, tmp_path: Path, script: str, end: str
) -> None:
    address, python = cluster_of(service), tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    jobs, name = RayJobs(lambda: address, python=str(python)), tmp_path.name
    jobs.submit(SubmitRequest(name, name, "dies", attempt=1, run_dir="file:///nowhere"))
    wait_for(lambda: jobs.status(name) is SubmissionStatus.FAILED, "the end of the driver")
    assert str(jobs.end_of(name)).startswith(end)
