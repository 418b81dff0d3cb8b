"""Doctor: independent checks of cluster and storage, each with a timeout."""

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from service.domain.doctor.checks import check_up
from service.domain.doctor.finding import Finding, Verdict
from service.domain.doctor.measurements import Measured, ProbeFailure, ProbeReply, RayPods, Reachability
from service.ports import ClusterProbe, StorageProbe
from train_loop.run_dir import ClusterVisit

T = TypeVar("T")
_START, _QUESTION, _TOKEN, _VISIT, _ENDING, _ARRIVAL = 30.0, 8.0, 3.0, 38.0, 2.0, 5.0
"""Timeouts in seconds: Ray's start, a request to it, writing or removing the token, the node visit, the end of the
visit's job, and the arrival of the nodes' files. Together one minute, or two if Ray is starting."""
_TRIAL = 20.0
"""Timeout of each storage check in seconds; these run concurrently with the others."""
_NO_PODS = RayPods()
_NOT_CHECKED = ProbeFailure("not checked")


@dataclass(frozen=True)
class DoctorReport:
    """All findings, and the duration in seconds."""

    findings: tuple[Finding, ...]
    seconds: float

    @property
    def healthy(self) -> bool:
        """Return whether no check failed."""
        return all(finding.verdict is not Verdict.FAILED for finding in self.findings)


class Doctor:
    """Runner of all checks, in at most two minutes. Concurrent callers share one run. `limit` scales the timeouts."""

    def __init__(
        self,
        cluster: ClusterProbe,
        storage: StorageProbe,
        versions: Mapping[str, str],
        *,
        connections: tuple[int, int] = (0, 0),
        pods: RayPods = _NO_PODS,
        limit: float = 1.0,
    ) -> None:
        self._cluster = cluster
        self._storage = storage
        self._versions = versions
        self._connections = connections
        self._pods = pods
        self._limit = limit
        self._lock = threading.Lock()
        self._running: Future[DoctorReport] | None = None

    def examine(self) -> DoctorReport:
        """Run all checks, or wait for the run in progress."""
        mine = Future[DoctorReport]()
        with self._lock:
            running = self._running = self._running or mine
        if running is mine:
            self._examine(mine)
        return running.result()

    def _examine(self, answer: "Future[DoctorReport]") -> None:
        begun = time.monotonic()
        try:
            findings = check_up(self._measure())
            answer.set_result(DoctorReport(findings, round(time.monotonic() - begun, 3)))
        except BaseException as error:
            answer.set_exception(error)
        finally:
            with self._lock:
                self._running = None

    def _measure(self) -> Measured:
        storage, begun = self._storage, time.monotonic()
        trials = [_in_thread(trial) for trial in (storage.read, storage.write, storage.replace)]
        reply = self._result_of(_in_thread(self._cluster.greet), _START + _QUESTION)
        nodes: int | ProbeFailure = _NOT_CHECKED
        visited = _Visited()
        if isinstance(reply, ProbeReply) and reply.reach is Reachability.ANSWERS:
            nodes = self._result_of(_in_thread(self._cluster.nodes), _START)
            visited = _Visited() if nodes == 0 else self._visit()
        read, write, replace = [self._result_of(trial, _TRIAL, since=begun) for trial in trials]
        return Measured(
            reply,
            nodes,
            visited.visit,
            visited.token,
            visited.arrived,
            read=read,
            write=write,
            replace=replace,
            runs=storage.runs,
            versions=self._versions,
            pods=self._pods,
            uid=os.getuid(),
            connections=self._connections,
        )

    def _visit(self) -> "_Visited":
        """Write a token, let the nodes read it and answer on the storage, read their answers, and clean up."""
        folder = f"{self._storage.runs.rstrip('/')}/_doctor-{secrets.token_hex(8)}"
        token = self._result_of(_in_thread(lambda: self._storage.leave_token(folder)), _TOKEN)
        left = None if isinstance(token, ProbeFailure) else folder
        visiting = _in_thread(lambda: self._cluster.visit(left, seconds=_VISIT * self._limit))
        visit = self._result_of(visiting, _VISIT + _ENDING)
        arrived: frozenset[str] | ProbeFailure = _NOT_CHECKED
        if isinstance(token, str) and not isinstance(visit, ProbeFailure):
            nodes = [node.node for node in visit.nodes if node.sight is not None and node.sight.token == token]
            arrived = self._result_of(_in_thread(lambda: self._storage.answers(folder, token, nodes)), _ARRIVAL)
        self._result_of(_in_thread(lambda: self._storage.remove(folder)), _TOKEN)
        return _Visited(visit, token, arrived)

    def _result_of(self, answer: "Future[T]", seconds: float, *, since: float | None = None) -> T | ProbeFailure:
        """Wait for a result until `seconds` after `since` (default: now); return a ProbeFailure on a timeout."""
        limit, now = seconds * self._limit, time.monotonic()
        try:
            return answer.result(timeout=max(0.0, (now if since is None else since) + limit - now))
        except TimeoutError:
            return ProbeFailure(f"no answer within {limit:g} s")


@dataclass(frozen=True)
class _Visited:
    visit: ClusterVisit | ProbeFailure = _NOT_CHECKED
    token: str | ProbeFailure = _NOT_CHECKED
    arrived: frozenset[str] | ProbeFailure = _NOT_CHECKED


def _in_thread(call: Callable[[], T]) -> "Future[T | ProbeFailure]":
    """Call in a daemon thread, because storage may hang forever. An exception becomes a ProbeFailure."""
    answer = Future[T | ProbeFailure]()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_result(ProbeFailure(_first_line(error)))

    threading.Thread(target=run, name="doctor", daemon=True).start()
    return answer


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__
