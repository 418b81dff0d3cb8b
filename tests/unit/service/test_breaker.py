"""A cluster that does not answer: nobody waits for it, and who answers again is asked again."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from service.adapters.ray import breaker as module
from service.adapters.ray.breaker import LONG, SHORT, Breaker, ClusterSilentError
from service.adapters.ray.jobs import RayAddress, RayJobs
from service.domain.jobs.decide import Submission
from service.domain.jobs.job import JobState
from service.errors import ClusterError
from service.ports import Launch, Lease
from tests.support.fakes.stores import MemoryJobStore
from tests.support.service import FakeService
from tests.support.silent_servers import dropping_server, mute_server
from tests.support.waiting import wait_for


class Cluster:
    """Answers after `takes` seconds, or not at all within the time that it is given."""

    def __init__(self) -> None:
        self.takes: float | None = 0.0
        self.given: list[float] = []

    def ask(self, seconds: float) -> str:
        self.given.append(seconds)
        if self.takes is None or self.takes > seconds:
            time.sleep(seconds)
            raise TimeoutError("no answer")
        time.sleep(self.takes)
        return "yes"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of all times."""
    for name in ("SHORT", "LONG", "_WORTH_IT", "_PAUSE", "_SLOW_FOR"):
        monkeypatch.setattr(module, name, getattr(module, name) / 10)


@pytest.mark.usefixtures("quick")
def test_after_one_call_without_an_answer_all_fail_at_once_until_it_answers() -> None:
    cluster = Cluster()
    breaker = Breaker(cluster.ask)
    assert breaker.call(cluster.ask) == "yes"
    cluster.takes = None
    with pytest.raises(TimeoutError, match="no answer"):
        breaker.call(cluster.ask)
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(ClusterSilentError, match="it has not answered for 0 s"):
            breaker.call(cluster.ask)
    assert time.monotonic() - began < SHORT / 10
    cluster.takes = 0.0
    assert wait_for(lambda: answers(breaker, cluster), "an answer", seconds=5)


@pytest.mark.usefixtures("quick")
def test_probe_with_an_unexpected_answer_closes_the_breaker() -> None:
    cluster = Cluster()

    def answer_wrongly(seconds: float) -> str:
        cluster.ask(seconds)
        raise ValueError("no JSON")

    breaker = Breaker(answer_wrongly)
    cluster.takes = None
    with pytest.raises(TimeoutError):
        breaker.call(cluster.ask)
    cluster.takes = 0.0
    assert wait_for(lambda: answers(breaker, cluster), "an answer", seconds=5)


@pytest.mark.usefixtures("quick")
def test_slow_cluster_is_given_more_time_after_its_first_late_answer() -> None:
    cluster = Cluster()
    breaker = Breaker(cluster.ask)
    cluster.takes = 2 * SHORT / 10
    with pytest.raises(TimeoutError):
        breaker.call(cluster.ask)
    assert wait_for(lambda: answers(breaker, cluster), "an answer", seconds=5)
    assert (cluster.given[0], cluster.given[-1]) == (SHORT / 10, LONG / 10)


@pytest.mark.usefixtures("quick")
def test_quick_failure_does_not_open_it() -> None:
    def refuse(seconds: float) -> None:
        raise ConnectionRefusedError("nobody listens")

    breaker = Breaker(refuse)
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            breaker.call(refuse)


@pytest.mark.usefixtures("quick")
def test_its_thread_ends_if_nobody_asks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FORGOTTEN", 0.0)
    cluster = Cluster()
    cluster.takes = None
    breaker = Breaker(cluster.ask)
    with pytest.raises(TimeoutError):
        breaker.call(cluster.ask)
    wait_for(lambda: all(one.name != "cluster breaker" for one in threading.enumerate()), "the end of the thread")


def answers(breaker: Breaker, cluster: Cluster) -> bool:
    try:
        return breaker.call(cluster.ask) == "yes"
    except TimeoutError:
        return False


@pytest.mark.parametrize("server", [dropping_server, mute_server])
def test_pass_over_fifty_jobs_is_short_and_keeps_all_leases_while_the_cluster_is_silent(
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
        assert cluster.status("job-1-1") is Submission.UNKNOWN
        with pytest.raises(ClusterError):
            cluster.submit(Launch("job-1-1", "job-1", "tiny", attempt=1, run_dir="file:///nowhere"))
    assert isinstance(service.store, MemoryJobStore)
    now = time.time()
    assert [job for job in jobs if service.store.claim(job, Lease("other", now, now + 30)) is not None] == []
    assert {service.get(job).state for job in jobs} == {JobState.STARTING}
