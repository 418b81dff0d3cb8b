"""Circuit breaker of cluster calls: a timeout opens it, an answer to its probe closes it."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from service.adapters.ray import breaker as module
from service.adapters.ray.breaker import LONG, SHORT, Breaker, ClusterSilentError
from service.adapters.ray.jobs import RayJobs
from service.adapters.ray.session import RayAddress
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from service.errors import ClusterError
from service.ports import Lease, SubmitRequest
from tests.support.fakes.service import FakeService
from tests.support.fakes.stores import MemoryJobStore
from tests.support.servers.silent_servers import dropping_server, mute_server
from tests.support.waiting import wait_for


class Cluster:
    """A cluster that answers after `takes` seconds, or raises TimeoutError if the caller's timeout is shorter."""

    def __init__(self) -> None:
        self.takes: float | None = 0.0
        self.timeouts: list[float] = []

    def request(self, seconds: float) -> str:
        self.timeouts.append(seconds)
        if self.takes is None or self.takes > seconds:
            time.sleep(seconds)
            raise TimeoutError("no answer")
        time.sleep(self.takes)
        return "yes"


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide all times of the breaker by ten."""
    for name in ("SHORT", "LONG", "_WORTH_IT", "_PAUSE", "_SLOW_FOR"):
        monkeypatch.setattr(module, name, getattr(module, name) / 10)


@pytest.mark.usefixtures("short_times")
def test_breaker_after_a_timeout_fails_fast_until_the_cluster_answers() -> None:
    cluster = Cluster()
    breaker = Breaker(cluster.request)
    assert breaker.call(cluster.request) == "yes"
    cluster.takes = None
    with pytest.raises(TimeoutError, match="no answer"):
        breaker.call(cluster.request)
    before = len(cluster.timeouts)
    for _ in range(100):
        with pytest.raises(ClusterSilentError, match=r"it has not answered for \d+ s"):
            breaker.call(cluster.request)
    assert len(cluster.timeouts) - before < 10, "expected no requests but those of the probe"
    cluster.takes = 0.0
    assert wait_for(lambda: is_answering(breaker, cluster), "an answer")


@pytest.mark.usefixtures("short_times")
def test_probe_with_an_unexpected_answer_closes_the_breaker() -> None:
    cluster = Cluster()

    def answer_wrongly(seconds: float) -> str:
        cluster.request(seconds)
        raise ValueError("no JSON")

    breaker = Breaker(answer_wrongly)
    cluster.takes = None
    with pytest.raises(TimeoutError):
        breaker.call(cluster.request)
    cluster.takes = 0.0
    assert wait_for(lambda: is_answering(breaker, cluster), "an answer")


@pytest.mark.usefixtures("short_times")
def test_breaker_after_a_late_answer_uses_the_long_timeout() -> None:
    cluster = Cluster()
    breaker = Breaker(cluster.request)
    cluster.takes = 2 * SHORT / 10
    with pytest.raises(TimeoutError):
        breaker.call(cluster.request)
    assert wait_for(lambda: is_answering(breaker, cluster), "an answer")
    assert (cluster.timeouts[0], cluster.timeouts[-1]) == (SHORT / 10, LONG / 10)


@pytest.mark.usefixtures("short_times")
def test_quick_failure_does_not_open_breaker() -> None:
    def refuse(seconds: float) -> None:
        raise ConnectionRefusedError("connection refused")

    breaker = Breaker(refuse)
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            breaker.call(refuse)


@pytest.mark.usefixtures("short_times")
def test_breaker_thread_ends_without_further_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FORGOTTEN", 0.0)
    cluster = Cluster()
    cluster.takes = None
    breaker = Breaker(cluster.request)
    with pytest.raises(TimeoutError):
        breaker.call(cluster.request)
    wait_for(lambda: all(one.name != "cluster breaker" for one in threading.enumerate()), "the end of the thread")


def is_answering(breaker: Breaker, cluster: Cluster) -> bool:
    try:
        return breaker.call(cluster.request) == "yes"
    except TimeoutError:
        return False


@pytest.mark.parametrize("server", [dropping_server, mute_server])
def test_reconcile_pass_with_silent_cluster_is_short_and_keeps_leases(
    tmp_path: Path, server: Callable[[], AbstractContextManager[str]]
) -> None:
    service = FakeService(tmp_path)
    service.clock.now = time.time()
    service.cluster.total = {"CPU": 200.0}
    jobs = [service.submit(name=f"job-{number}").id for number in range(50)]
    service.reconciler().run_once()
    assert {service.get(job).state for job in jobs} == {JobState.STARTING}
    with server() as url:
        cluster = RayJobs(lambda: RayAddress(url, "token"), python="python")
        reconciler, passes = service.reconciler(cluster=cluster), list[float]()
        for _ in range(4):
            service.clock.now = time.time()
            began = time.monotonic()
            reconciler.run_once()
            passes.append(time.monotonic() - began)
        assert max(passes) <= 2.0, passes
        assert cluster.status("job-1-1") is SubmissionStatus.UNKNOWN
        with pytest.raises(ClusterError):
            cluster.submit(SubmitRequest("job-1-1", "job-1", "tiny", attempt=1, run_dir="file:///nowhere"))
    assert isinstance(service.store, MemoryJobStore)
    now = time.time()
    assert [job for job in jobs if service.store.claim(job, Lease("other", now, now + 30)) is not None] == []
    assert {service.get(job).state for job in jobs} == {JobState.STARTING}
