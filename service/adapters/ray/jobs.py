"""Drivers as Ray jobs: the client of Ray's dashboard."""

import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

import requests
import structlog
from pydantic import BaseModel
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient
from requests import codes

from service.adapters.ray.breaker import LONG, SHORT, Breaker
from service.adapters.ray.nodes import RayNode, read_nodes, read_ray_nodes
from service.adapters.ray.session import VERSION, RayAddress, open_session, request_version
from service.domain.doctor.measurements import ProbeReply, Reachability
from service.domain.jobs.observation import SubmissionStatus
from service.domain.jobs.reason import describe_exit
from service.errors import ClusterError
from service.ports import Node, SubmitRequest
from train_loop.plan import Capacity, NodeRoom
from train_loop.run_dir import READ_POLICY_VARIABLE, ReadPolicy, storage_path

log = structlog.get_logger(__name__)
_CAPACITY_SECONDS = 2.0
USABLE_MEMORY = 0.95
"""Part of a host's memory above which Ray kills workers, unless RAY_memory_usage_threshold differs there."""
_MOST_CHARACTERS = 300
"""Maximum length of Ray's explanation of an end."""
_ERROR_AT_START = re.compile(
    r"^(?:\w+\.)*("
    r"(?:(?:ModuleNotFound|Import|OS|FileNotFound|NotADirectory|Permission)Error|StorageUnavailable): .+"
    r"|\S.*: (?:command )?not found)$",
    re.MULTILINE,
)
"""Line of a driver's log with an error that ends it before it can report an outcome. Such errors hold no secrets."""
_RUNNING_SECONDS = 2.0
"""Seconds for which the status RUNNING is cached: each request to the dashboard takes CPU time from training."""
# Errors of Ray's client if Ray cannot be reached or gives an unexpected answer.
_FAULTS = (RuntimeError, OSError, ValueError, LookupError, TypeError, AuthenticationError)


class _Client(JobSubmissionClient):  # type: ignore[misc] # Ray is not followed by mypy
    """Ray's client with a timeout for each request, and a check of who receives it. The original waits forever."""

    def __init__(self, address: RayAddress, breaker: Breaker) -> None:
        self._breaker, self._server = breaker, address.server
        # Reused, because the check of a connection takes CPU time from training.
        self._reads = open_session(self._server) if self._server is not None else None
        super().__init__(address.url, headers=address.headers)

    def _do_request(self, method: str, endpoint: str, **arguments: Any) -> requests.Response:
        # Writes get the long timeout: after a timeout, Ray may still have executed them.
        seconds = None if method == "GET" else LONG
        return self._breaker.call(partial(self.send_request, method, endpoint, **arguments), seconds=seconds)

    def send_request(
        self, method: str, endpoint: str, seconds: float, *, json_data: Any = None, **arguments: Any
    ) -> requests.Response:
        """Send a request, even if the breaker is open. Raises AuthenticationError, requests.RequestException."""
        timeout = (min(seconds, SHORT), seconds)
        reused = self._reads if method == "GET" else None
        # A write must not fail because the server has just closed an idle connection.
        with open_session(self._server) if reused is None else nullcontext(reused) as session:
            answer = session.request(
                method, self._address + endpoint, json=json_data, headers=self._headers, timeout=timeout, **arguments
            )
        if answer.status_code in (codes.UNAUTHORIZED, codes.FORBIDDEN):
            raise AuthenticationError(answer.text)
        return answer


class _VersionAnswer(BaseModel):
    ray_version: str


class RayJobs:
    """A Cluster that runs drivers as Ray jobs.

    `address` returns the current address of the cluster; None while it is not up. `limit` holds the resources up to
    which an autoscaler may grow it. `room` is the only node of a cluster that the service starts, with the memory that
    its workers may use. `environment` holds variables for the drivers; every user of the cluster can read
    them. `read_policy` returns the policy of a project's jobs. `shown_at` is the URL at which users open the dashboard,
    if it differs.
    """

    def __init__(
        self,
        address: Callable[[], RayAddress | None],
        *,
        python: str,
        limit: Mapping[str, float] | None = None,
        room: NodeRoom | None = None,
        shown_at: str | None = None,
        environment: Mapping[str, str] | None = None,
        read_policy: Callable[[str], ReadPolicy] | None = None,
    ) -> None:
        self._address = address
        self._python = python
        self._environment = dict(environment or {})
        self._read_policy = read_policy
        self._limit = limit or {}
        self._room = room
        self._shown_at = shown_at
        self._lock = threading.Lock()
        self._ran: dict[str, float] = {}
        self._breaker: tuple[RayAddress, Breaker] | None = None
        self._client: _Client | None = None
        self._nodes_lock, self._hosts = threading.Lock(), dict[str, str]()
        self._nodes: tuple[float, list[Node] | None] = (-_CAPACITY_SECONDS, None)
        self._capacity: tuple[float, Capacity | None] = (-_CAPACITY_SECONDS, None)

    def submit(self, launch: SubmitRequest) -> None:
        """Start a driver. Do nothing if the same driver already exists under this id. Raises ClusterError."""
        entrypoint = self._entrypoint(launch)
        try:
            self._connect().submit_job(
                entrypoint=entrypoint,
                submission_id=launch.submission_id,
                metadata=_metadata(launch),
                runtime_env={"env_vars": _env_vars(self._environment | self._limits(launch.project))},
            )
        except _FAULTS as error:
            # Ray's error for "already exists" looks like a failure, so ask which job has this id.
            if self._entrypoint_of(launch.submission_id) != entrypoint:
                raise ClusterError(f"Ray did not accept {launch.submission_id}: {_first_line(error)}") from error

    def _limits(self, project: str) -> dict[str, str]:
        """Return the environment variable with the read policy of a job's processes."""
        if self._read_policy is None:
            return {}
        return {READ_POLICY_VARIABLE: self._read_policy(project).without_users().model_dump_json()}

    def status(self, submission_id: str) -> SubmissionStatus:
        """Return the status of a driver; UNKNOWN if the cluster does not answer. RUNNING may be two seconds old."""
        if time.monotonic() - self._ran.get(submission_id, -_RUNNING_SECONDS) < _RUNNING_SECONDS:
            return SubmissionStatus.RUNNING
        found = self._request_status(submission_id)
        if found is SubmissionStatus.RUNNING:
            self._ran[submission_id] = time.monotonic()
        else:
            self._ran.pop(submission_id, None)
        return found

    def end_of(self, submission_id: str) -> str | None:
        """Return how a driver ended, as a clause; None if it is unknown."""
        try:
            info = self._connect().get_job_info(submission_id)
        except _FAULTS:
            return None
        if info.driver_exit_code is not None:
            end, errors = describe_exit(info.driver_exit_code), _ERROR_AT_START.findall(info.message or "")
            # Ray appends the end of the log. What precedes a signal is not its cause.
            return f"{end} ({errors[-1][:_MOST_CHARACTERS]})" if errors and "signal" not in end else end
        # Ray appends tracebacks and lines of the log.
        line = (info.message or "").strip().partition("\n")[0]
        return f"Ray reports: {line[:_MOST_CHARACTERS]}" if line else None

    def stop(self, submission_id: str) -> None:
        """Stop a driver now. Do nothing if it does not exist. Raises ClusterError."""
        self._ran.pop(submission_id, None)
        try:
            self._connect().stop_job(submission_id)
        except _FAULTS as error:
            if not _does_not_exist(error):
                raise ClusterError(f"Ray did not stop {submission_id}: {_first_line(error)}") from error

    def capacity(self) -> Capacity | None:
        """Return the resources of all nodes, also of nodes that an autoscaler may add.

        Returns None if the cluster does not answer. The result may be two seconds old.
        """
        requested_at, known = self._capacity
        if time.monotonic() - requested_at >= _CAPACITY_SECONDS:
            known = self._request_capacity()
            self._capacity = (time.monotonic(), known)
        return known

    def nodes(self) -> list[Node] | None:
        """Return all nodes that Ray remembers, up to two seconds old; None if the cluster does not answer."""
        with self._nodes_lock:
            requested_at, known = self._nodes
            if time.monotonic() - requested_at >= _CAPACITY_SECONDS:
                try:
                    known = read_nodes(self._get, self._hosts)
                except _FAULTS:
                    known = None
                self._nodes = (time.monotonic(), known)
            return known

    def rooms(self) -> tuple[NodeRoom, ...]:
        """Return resources and memory of the live nodes, also of a head that is not up yet.

        Empty if the cluster does not answer, or if nodes of unknown size may join.
        """
        if self._limit:
            return ()
        found = tuple(_room(node) for node in self.nodes() or () if node.alive)
        if self._room is None:
            return found
        # Its ranks have a lower limit than the host.
        return tuple(replace(node, host=self._room.host, object_store=0, limited=True) for node in found) or (
            self._room,
        )

    def dashboard(self, submission_id: str | None) -> str | None:
        """Return a submission's dashboard URL for users, or the cluster's address if `submission_id` is None.

        Returns None while the cluster is not up.
        """
        address = self._address()
        if address is None:
            return None
        return f"{self._shown_at or address.url}/#/jobs/{submission_id}" if submission_id else address.url

    def greet(self) -> ProbeReply:
        """Return how the dashboard answers now."""
        address = self._address()
        if address is None:
            return ProbeReply(Reachability.STARTING, "", "the embedded Ray is not up yet")
        try:
            client, before = self._connect(), time.time()
            answer = client.send_request("GET", VERSION, LONG)
            answer.raise_for_status()
            version = _VersionAnswer.model_validate_json(answer.text).ray_version
        except AuthenticationError as error:
            return ProbeReply(Reachability.REFUSED, address.url, _first_line(error))
        except (RuntimeError, ValueError, LookupError, TypeError, requests.HTTPError) as error:
            return ProbeReply(Reachability.STRANGE, address.url, _first_line(error))
        except OSError as error:
            return ProbeReply(Reachability.NOBODY, address.url, _first_line(error))
        return ProbeReply(Reachability.ANSWERS, address.url, f"Ray {version}", _ahead(answer, before, time.time()))

    def count_nodes(self) -> int:
        """Return the number of live nodes. Raises ClusterError."""
        try:
            return len(self._alive_nodes())
        except _FAULTS as error:
            raise ClusterError(f"Ray does not list its nodes: {_first_line(error)}") from error

    def run(self, submission_id: str, module: str, arguments: Sequence[str]) -> None:
        """Start a module of train_loop as a Ray job that belongs to no attempt. Raises ClusterError."""
        entrypoint = shlex.join([self._python, "-m", module, *arguments])
        runtime_env = {"env_vars": _env_vars(self._environment)}
        try:
            self._connect().submit_job(entrypoint=entrypoint, submission_id=submission_id, runtime_env=runtime_env)
        except _FAULTS as error:
            raise ClusterError(f"Ray did not accept {submission_id}: {_first_line(error)}") from error

    def output(self, submission_id: str) -> str:
        """Return the output of a Ray job so far. Raises ClusterError."""
        try:
            return str(self._connect().get_job_logs(submission_id))
        except _FAULTS as error:
            raise ClusterError(f"Ray does not return the log of {submission_id}: {_first_line(error)}") from error

    def forget(self, submission_id: str) -> None:
        """Stop a Ray job that runs, or delete it from Ray's list if it has ended. Ignore errors."""
        self._ran.pop(submission_id, None)
        with suppress(*_FAULTS):
            if self._request_status(submission_id).alive:
                self._connect().stop_job(submission_id)
            else:
                self._connect().delete_job(submission_id)

    def _request_status(self, submission_id: str) -> SubmissionStatus:
        try:
            return _STATUS[self._connect().get_job_status(submission_id)]
        except _FAULTS as error:
            return SubmissionStatus.MISSING if _does_not_exist(error) else SubmissionStatus.UNKNOWN

    def _request_capacity(self) -> Capacity | None:
        try:
            found = self._alive_nodes()
        except _FAULTS:
            return None
        nodes = tuple(node.resources for node in found)
        # A head that has just started has no nodes yet: the cluster is not up, rather than empty.
        if not nodes and not self._limit:
            return None
        names = {*self._limit, *(name for node in nodes for name in node)}
        there = {name: sum(node.get(name, 0.0) for node in nodes) for name in names}
        total = {name: max(amount, self._limit.get(name, 0.0)) for name, amount in there.items()}
        return Capacity(total, () if self._limit else nodes)

    def _alive_nodes(self) -> list[RayNode]:
        """Return the live nodes. Raises the errors in _FAULTS."""
        return [node for node in read_ray_nodes(self._get) if node.state == "ALIVE"]

    def _get(self, path: str) -> str:
        """Return the dashboard's answer. Raises the errors in _FAULTS."""
        answer = self._connect()._do_request("GET", path)
        answer.raise_for_status()
        return str(answer.text)

    def _connect(self) -> _Client:
        """Return a client for the cluster's current address. Raises ConnectionError while the cluster is not up."""
        address = self._address()
        if address is None:
            raise ConnectionError("the cluster is not up yet")
        with self._lock:
            if self._breaker is None or self._breaker[0] != address:
                self._breaker, self._client = (address, Breaker(partial(request_version, address))), None
            if self._client is None:
                self._client = _Client(address, self._breaker[1])
            return self._client

    def _entrypoint(self, launch: SubmitRequest) -> str:
        run_dir = str(storage_path(launch.run_dir))
        command = [self._python, "-m", "train_loop.ray_train.driver"]
        command += ["--run-dir", run_dir, "--attempt", str(launch.attempt)]
        return shlex.join(command)

    def _entrypoint_of(self, submission_id: str) -> str | None:
        try:
            entrypoint: str | None = self._connect().get_job_info(submission_id).entrypoint
        except _FAULTS:
            return None
        return entrypoint


def _room(node: Node) -> NodeRoom:
    usable = None if node.memory is None else int(node.memory * USABLE_MEMORY)
    return NodeRoom(node.total, usable, node.gpu_memory, node.object_store, gpu=node.gpu)


_STATUS: Mapping[JobStatus, SubmissionStatus] = {
    JobStatus.PENDING: SubmissionStatus.PENDING,
    JobStatus.RUNNING: SubmissionStatus.RUNNING,
    JobStatus.SUCCEEDED: SubmissionStatus.SUCCEEDED,
    JobStatus.FAILED: SubmissionStatus.FAILED,
    JobStatus.STOPPED: SubmissionStatus.STOPPED,
}


def _metadata(launch: SubmitRequest) -> dict[str, str]:
    """Return the fields of a job that Ray's dashboard shows."""
    name = f"{launch.name} ({launch.job_id})"
    labels = {f"label.{key}": value for key, value in launch.labels.items()}
    job = {"job_id": launch.job_id, "attempt": str(launch.attempt), "project": launch.project}
    return {"name": name, "job_name": name, **job, **labels}


def _env_vars(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        **environment,
        # Drivers handle SIGINT. By default, Ray sends SIGTERM, and SIGKILL three seconds later.
        "RAY_JOB_STOP_SIGNAL": "SIGINT",
        "RAY_JOB_STOP_WAIT_TIME_S": "30",
        # Enable the Train page of the dashboard, and a log of its data that outlives the driver.
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
        "RAY_enable_export_api_write_config": "EXPORT_TRAIN_RUN,EXPORT_TRAIN_RUN_ATTEMPT",
    }


def _ahead(answer: requests.Response, before: float, after: float) -> tuple[float, float] | None:
    """Return the minimum and maximum seconds by which the server's clock is ahead of the service's.

    The Date header has whole seconds. Returns None if it is missing or invalid.
    """
    try:
        server_time = parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (KeyError, ValueError):
        return None
    return server_time - after, server_time + 1 - before


def _does_not_exist(error: Exception) -> bool:
    """Return whether Ray reports that the job does not exist."""
    return "status code 404" in str(error) and "does not exist" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
