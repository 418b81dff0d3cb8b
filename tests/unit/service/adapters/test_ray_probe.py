"""Ray probe: classification of dashboard answers and parsing of a visit's log."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from service.adapters.ray import probe as ray_probe
from service.adapters.ray.jobs import RayJobs
from service.adapters.ray.probe import RayProbe
from service.adapters.ray.session import RayAddress
from service.domain.doctor.checks import min_distance
from service.domain.doctor.measurements import Reachability
from service.domain.jobs.observation import SubmissionStatus
from service.errors import ClusterError
from tests.support.fakes.doctor import a_visit
from train_loop.run_dir import VISIT_MARK


class Dashboard(ThreadingHTTPServer):
    """A server that gives every request the same answer."""

    status, body = 200, b'{"ray_version": "2.60.0"}'

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Dashboard)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        """Suppress log lines."""


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with Dashboard(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def probe(url: str | None) -> RayProbe:
    address = RayAddress(url, "a-token") if url else None
    return RayProbe(RayJobs(lambda: address, python="python"))


@pytest.mark.parametrize("body", [b"{}", b"[]", b"7", b'{"ray_version": 7}', b"<html>"])
def test_invalid_dashboard_answer_counts_as_no_answer(dashboard: Dashboard, body: bytes) -> None:
    dashboard.body = body
    jobs = RayJobs(lambda: RayAddress(dashboard.url, "a-token"), python="python")
    assert jobs.capacity() is None
    assert jobs.status("job-1-1") is SubmissionStatus.UNKNOWN
    with pytest.raises(ClusterError, match="did not stop job-1-1"):
        jobs.stop("job-1-1")


def test_greet_returns_version_and_clock_offset(dashboard: Dashboard) -> None:
    reply = probe(dashboard.url).greet()
    assert (reply.reach, reply.message) == (Reachability.ANSWERS, "Ray 2.60.0")
    assert reply.ahead is not None
    assert min_distance(reply.ahead) == 0.0


@pytest.mark.parametrize(
    ("status", "body", "reach"),
    [
        (401, b"Unauthorized", Reachability.REFUSED),
        (403, b"Forbidden", Reachability.REFUSED),
        (404, b"nothing here", Reachability.STRANGE),
        (200, b"<html>log in</html>", Reachability.STRANGE),
        (200, b"[]", Reachability.STRANGE),
        (502, b"bad gateway", Reachability.STRANGE),
    ],
)
def test_greet_classifies_other_answers(dashboard: Dashboard, status: int, body: bytes, reach: Reachability) -> None:
    dashboard.status, dashboard.body = status, body
    reply = probe(dashboard.url).greet()
    assert (reply.reach, reply.url) == (reach, dashboard.url)
    assert reply.message


def test_greet_distinguishes_refused_connection_from_starting_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_probe, "_RAY_SECONDS", 0.3)
    assert probe("http://127.0.0.1:9").greet().reach is Reachability.NOBODY
    assert probe(None).greet().reach is Reachability.STARTING


def test_greet_waits_for_the_address_of_a_starting_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    addresses = iter([None, None])
    starting = RayProbe(RayJobs(lambda: next(addresses, RayAddress("http://127.0.0.1:9", token=None)), python="python"))
    assert starting.greet().reach is Reachability.NOBODY


class FakeJobs(RayJobs):
    """Ray jobs that run nothing and return a fixed log and a list of states."""

    def __init__(self, output: str, *states: SubmissionStatus) -> None:
        super().__init__(lambda: None, python="python")
        self.log, self.states = output, list(states)
        self.arguments: list[str] = []
        self.forgotten = 0

    def run(self, submission_id: str, module: str, arguments: object) -> None:
        self.arguments = list(arguments) if isinstance(arguments, list) else []

    def status(self, submission_id: str) -> SubmissionStatus:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def output(self, submission_id: str) -> str:
        return self.log

    def forget(self, submission_id: str) -> None:
        self.forgotten += 1

    def count_nodes(self) -> int:
        return 1 if self.states.pop(0) is SubmissionStatus.RUNNING else 0


def test_visit_is_read_from_the_log_of_its_job() -> None:
    log = f"2026 INFO connecting\n{VISIT_MARK}{a_visit().model_dump_json()}\nbye\n"
    jobs = FakeJobs(
        log, SubmissionStatus.PENDING, SubmissionStatus.UNKNOWN, SubmissionStatus.RUNNING, SubmissionStatus.SUCCEEDED
    )
    assert RayProbe(jobs, roots=["file:///a"]).visit("file:///runs/x", seconds=30.0) == a_visit()
    assert jobs.arguments == ["--seconds", "22", "--folder", "file:///runs/x", "--root", "file:///a"]
    assert jobs.forgotten == 1


@pytest.mark.parametrize(
    ("state", "expected"),
    [(SubmissionStatus.FAILED, "ended as failed"), (SubmissionStatus.PENDING, "did not end within 0.1 s")],
)
def test_visit_without_result_reports_state_and_last_log_line(state: SubmissionStatus, expected: str) -> None:
    jobs = FakeJobs("Traceback\nModuleNotFoundError: No module named 'train_loop'\n\n", state)
    with pytest.raises(ClusterError, match=f"{expected}; last line of its log: ModuleNotFoundError"):
        RayProbe(jobs).visit(None, seconds=0.1)
    assert jobs.forgotten == 1


def test_nodes_waits_for_a_head_that_has_just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_probe, "_POLL_SECONDS", 0.0)
    assert (
        RayProbe(FakeJobs("", SubmissionStatus.PENDING, SubmissionStatus.PENDING, SubmissionStatus.RUNNING)).nodes()
        == 1
    )
