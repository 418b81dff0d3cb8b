"""Ray Jobs: the one place that talks to Ray."""

import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

import requests
import structlog
from pydantic import BaseModel
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from service.adapters.breaker import LONG, SHORT, Breaker
from service.adapters.ray_nodes import RayNode, read_nodes, read_ray_nodes
from service.domain.checkup import Greeting, Reach
from service.domain.decide import Submission
from service.errors import ClusterError
from service.ports import Launch, Node
from train_loop.plan import Capacity
from train_loop.run_dir import READ_POLICY_VARIABLE, ReadPolicy, storage_path

log = structlog.get_logger(__name__)
_VERSION = "/api/version"
_CAPACITY_SECONDS = 2.0
_RUNNING_SECONDS = 2.0
"""For so long a driver that ran is taken to run: each question costs Ray's dashboard what the training could use."""
# What Ray raises when it was not reached, or answered with something else than was asked for.
_FAULTS = (RuntimeError, OSError, ValueError, LookupError, TypeError, AuthenticationError)


@dataclass(frozen=True)
class RayAddress:
    """A cluster's dashboard, and the token that opens it (None: what Ray finds in the environment)."""

    url: str
    token: str | None


class _Client(JobSubmissionClient):  # type: ignore[misc] # Ray is not followed by mypy
    """Ray's client, which otherwise waits for an answer for ever."""

    def __init__(self, url: str, headers: dict[str, str] | None, breaker: Breaker) -> None:
        self._breaker = breaker
        super().__init__(url, headers=headers)

    def _do_request(self, method: str, endpoint: str, **arguments: Any) -> requests.Response:
        # What changes something is waited for: it may be done though nobody says so.
        seconds = None if method == "GET" else LONG
        return self._breaker.call(partial(self.ask, method, endpoint, **arguments), seconds=seconds)

    def ask(self, method: str, endpoint: str, seconds: float, **arguments: Any) -> requests.Response:
        """Send a request in any case."""
        timeout = (min(seconds, SHORT), seconds)
        answer: requests.Response = super()._do_request(method, endpoint, timeout=timeout, **arguments)
        return answer


def _headers(address: RayAddress) -> dict[str, str] | None:
    return {"Authorization": f"Bearer {address.token}"} if address.token else None


def _version(address: RayAddress, seconds: float) -> requests.Response:
    """Ask the dashboard for its version; a refusal is an answer, too."""
    return requests.get(f"{address.url}{_VERSION}", headers=_headers(address), timeout=(min(seconds, SHORT), seconds))


class _VersionAnswer(BaseModel):
    ray_version: str


class RayJobs:
    """Drivers as Ray jobs. `address` says where the cluster is now; `limit`, what an autoscaler may grow it to.

    `environment` is what drivers are told by theirs, which whoever may look at the cluster can read. `read_policy` says
    what the jobs of a project may read. `shown_at` is the URL at which users open the dashboard, if it is another one.
    """

    def __init__(
        self,
        address: Callable[[], RayAddress | None],
        *,
        python: str,
        limit: Mapping[str, float] | None = None,
        shown_at: str | None = None,
        environment: Mapping[str, str] | None = None,
        read_policy: Callable[[str], ReadPolicy] | None = None,
    ) -> None:
        self._address = address
        self._python = python
        self._environment = dict(environment or {})
        self._read_policy = read_policy
        self._limit = limit or {}
        self._shown_at = shown_at
        self._lock = threading.Lock()
        self._ran: dict[str, float] = {}
        self._breaker: tuple[RayAddress, Breaker] | None = None
        self._client: _Client | None = None
        self._nodes_lock, self._hosts = threading.Lock(), dict[str, str]()
        self._nodes: tuple[float, list[Node] | None] = (-_CAPACITY_SECONDS, None)
        self._capacity: tuple[float, Capacity | None] = (-_CAPACITY_SECONDS, None)

    def submit(self, launch: Launch) -> None:
        """Start a driver; one that is there already under this id is fine if it is the same. Raises ClusterError."""
        entrypoint = self._entrypoint(launch)
        try:
            self._connect().submit_job(
                entrypoint=entrypoint,
                submission_id=launch.submission_id,
                metadata=_metadata(launch),
                runtime_env={"env_vars": _env_vars(self._environment | self._limits(launch.project))},
            )
        except _FAULTS as error:
            # Ray's word for "already exists" cannot be told from a fault: ask what is there instead.
            if self._entrypoint_of(launch.submission_id) != entrypoint:
                raise ClusterError(f"Ray did not take {launch.submission_id}: {_first_line(error)}") from error

    def _limits(self, project: str) -> dict[str, str]:
        """Return what tells the processes of a job which files they may read."""
        if self._read_policy is None:
            return {}
        return {READ_POLICY_VARIABLE: self._read_policy(project).without_users().model_dump_json()}

    def status(self, submission_id: str) -> Submission:
        """What became of a driver; UNKNOWN when the cluster does not answer. That it runs is up to two seconds old."""
        if time.monotonic() - self._ran.get(submission_id, -_RUNNING_SECONDS) < _RUNNING_SECONDS:
            return Submission.RUNNING
        found = self._ask_status(submission_id)
        if found is Submission.RUNNING:
            self._ran[submission_id] = time.monotonic()
        else:
            self._ran.pop(submission_id, None)
        return found

    def stop(self, submission_id: str) -> None:
        """End a driver now; one that is gone is fine. Raises ClusterError."""
        self._ran.pop(submission_id, None)
        try:
            self._connect().stop_job(submission_id)
        except _FAULTS as error:
            if not _does_not_exist(error):
                raise ClusterError(f"Ray did not stop {submission_id}: {_first_line(error)}") from error

    def capacity(self) -> Capacity | None:
        """What all nodes have, up to two seconds old, or may grow to; None when the cluster does not answer."""
        asked, known = self._capacity
        if time.monotonic() - asked >= _CAPACITY_SECONDS:
            known = self._ask_capacity()
            self._capacity = (time.monotonic(), known)
        return known

    def nodes(self) -> list[Node] | None:
        """Return all nodes that Ray remembers, up to two seconds old; None if the cluster does not answer."""
        with self._nodes_lock:
            asked, known = self._nodes
            if time.monotonic() - asked >= _CAPACITY_SECONDS:
                try:
                    known = read_nodes(self._get, self._hosts)
                except _FAULTS:
                    known = None
                self._nodes = (time.monotonic(), known)
            return known

    def dashboard(self, submission_id: str | None) -> str | None:
        """The page that shows a submission to users, or the address of the cluster."""
        address = self._address()
        if address is None:
            return None
        return f"{self._shown_at or address.url}/#/jobs/{submission_id}" if submission_id else address.url

    def greet(self) -> Greeting:
        """How the dashboard answers now."""
        address = self._address()
        if address is None:
            return Greeting(Reach.STARTING, "", "the embedded Ray is not up yet")
        try:
            client, before = self._connect(), time.time()
            answer = client.ask("GET", _VERSION, LONG)
            answer.raise_for_status()
            version = _VersionAnswer.model_validate_json(answer.text).ray_version
        except AuthenticationError as error:
            return Greeting(Reach.REFUSED, address.url, _first_line(error))
        except (RuntimeError, ValueError, LookupError, TypeError, requests.HTTPError) as error:
            return Greeting(Reach.STRANGE, address.url, _first_line(error))
        except OSError as error:
            return Greeting(Reach.NOBODY, address.url, _first_line(error))
        return Greeting(Reach.ANSWERS, address.url, f"Ray {version}", _ahead(answer, before, time.time()))

    def count_nodes(self) -> int:
        """How many nodes are alive. Raises ClusterError."""
        try:
            return len(self._alive_nodes())
        except _FAULTS as error:
            raise ClusterError(f"Ray does not tell its nodes: {_first_line(error)}") from error

    def run(self, submission_id: str, module: str, arguments: Sequence[str]) -> None:
        """Start a module of the loop's as a job that is nobody's attempt. Raises ClusterError."""
        entrypoint = shlex.join([self._python, "-m", module, *arguments])
        runtime_env = {"env_vars": _env_vars(self._environment)}
        try:
            self._connect().submit_job(entrypoint=entrypoint, submission_id=submission_id, runtime_env=runtime_env)
        except _FAULTS as error:
            raise ClusterError(f"Ray did not take {submission_id}: {_first_line(error)}") from error

    def output(self, submission_id: str) -> str:
        """What a job has written so far. Raises ClusterError."""
        try:
            return str(self._connect().get_job_logs(submission_id))
        except _FAULTS as error:
            raise ClusterError(f"Ray does not show the log of {submission_id}: {_first_line(error)}") from error

    def forget(self, submission_id: str) -> None:
        """End a job and strike it from Ray's list, as far as that can be done."""
        self._ran.pop(submission_id, None)
        with suppress(*_FAULTS):
            if self._ask_status(submission_id).alive:
                self._connect().stop_job(submission_id)
            else:
                self._connect().delete_job(submission_id)

    def _ask_status(self, submission_id: str) -> Submission:
        try:
            return _STATUS[self._connect().get_job_status(submission_id)]
        except _FAULTS as error:
            return Submission.MISSING if _does_not_exist(error) else Submission.UNKNOWN

    def _ask_capacity(self) -> Capacity | None:
        try:
            found = self._alive_nodes()
        except _FAULTS:
            return None
        nodes = tuple(node.resources for node in found)
        # A head that has just started has no node yet: not a cluster of nothing, but one that is not up.
        if not nodes and not self._limit:
            return None
        names = {*self._limit, *(name for node in nodes for name in node)}
        there = {name: sum(node.get(name, 0.0) for node in nodes) for name in names}
        total = {name: max(amount, self._limit.get(name, 0.0)) for name, amount in there.items()}
        return Capacity(total, () if self._limit else nodes)

    def _alive_nodes(self) -> list[RayNode]:
        """Raises what _FAULTS names."""
        return [node for node in read_ray_nodes(self._get) if node.state == "ALIVE"]

    def _get(self, path: str) -> str:
        """Return the dashboard's answer. Raises what _FAULTS names."""
        answer = self._connect()._do_request("GET", path)
        answer.raise_for_status()
        return str(answer.text)

    def _connect(self) -> _Client:
        """A client for where the cluster is now. Raises ConnectionError while there is none."""
        address = self._address()
        if address is None:
            raise ConnectionError("the cluster is not up yet")
        with self._lock:
            if self._breaker is None or self._breaker[0] != address:
                self._breaker, self._client = (address, Breaker(partial(_version, address))), None
            if self._client is None:
                self._client = _Client(address.url, _headers(address), self._breaker[1])
            return self._client

    def _entrypoint(self, launch: Launch) -> str:
        run_dir = str(storage_path(launch.run_dir))
        command = [self._python, "-m", "train_loop.driver", "--run-dir", run_dir, "--attempt", str(launch.attempt)]
        return shlex.join(command)

    def _entrypoint_of(self, submission_id: str) -> str | None:
        try:
            entrypoint: str | None = self._connect().get_job_info(submission_id).entrypoint
        except _FAULTS:
            return None
        return entrypoint


_STATUS: Mapping[JobStatus, Submission] = {
    JobStatus.PENDING: Submission.PENDING,
    JobStatus.RUNNING: Submission.RUNNING,
    JobStatus.SUCCEEDED: Submission.SUCCEEDED,
    JobStatus.FAILED: Submission.FAILED,
    JobStatus.STOPPED: Submission.STOPPED,
}


def _metadata(launch: Launch) -> dict[str, str]:
    """What Ray's dashboard shows of a job."""
    name = f"{launch.name} ({launch.job_id})"
    labels = {f"label.{key}": value for key, value in launch.labels.items()}
    job = {"job_id": launch.job_id, "attempt": str(launch.attempt), "project": launch.project}
    return {"name": name, "job_name": name, **job, **labels}


def _env_vars(told: Mapping[str, str]) -> dict[str, str]:
    return {
        **told,
        # A driver handles SIGINT, and Ray sends SIGTERM and three seconds later SIGKILL unless it is told otherwise.
        "RAY_JOB_STOP_SIGNAL": "SIGINT",
        "RAY_JOB_STOP_WAIT_TIME_S": "30",
        # The Train page of the dashboard, and a log of the same that outlives the driver.
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
        "RAY_enable_export_api_write_config": "EXPORT_TRAIN_RUN,EXPORT_TRAIN_RUN_ATTEMPT",
    }


def _ahead(answer: requests.Response, before: float, after: float) -> tuple[float, float] | None:
    """Seconds by which the clock of who answered is ahead of ours, at least and at most; it tells whole seconds."""
    try:
        told = parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (KeyError, ValueError):
        return None
    return told - after, told + 1 - before


def _does_not_exist(error: Exception) -> bool:
    """Whether Ray said for certain that it has no such job."""
    return "status code 404" in str(error) and "does not exist" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
