"""Calls that read whole checkpoints: shares of keys and projects, and clients that hang up."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from service.adapters.helper_processes.checkpoints import HelperTools
from service.domain.access.roles import OPERATOR, Role
from service.domain.webhooks.delivery import Answer, Webhook
from service.errors import Busy
from service.ports import CallCancelled, Cancellation
from tests.support.builders.checkpoints import checkpoint
from tests.support.fakes.service import KEY, FakeService
from tests.support.fakes.webhooks import MemorySender
from tests.support.servers.streams import Address
from tests.support.waiting import wait_for
from train_loop.run_dir import READ_POLICY_VARIABLE, ExportWish, ReadPolicy

WISH = ExportWish(dtype="bf16")


class Slow:
    """A service whose tools run until `go` exists, and what they wrote."""

    def __init__(self, root: Path) -> None:
        self.root, self.service = root, FakeService(root)
        script = f"echo $$ >> {root}/pids; while [ ! -e {root}/go ]; do sleep 0.05; done; echo null"
        self.tools = HelperTools(timeout=60.0, python=("/bin/sh", "-c", script))
        self.address = Address(self.service)

    def pids(self) -> list[int]:
        """Return the ids of the processes that were started."""
        file = self.root / "pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def running(self) -> list[int]:
        """Return the ids of those that run."""
        return [pid for pid in self.pids() if psutil.pid_exists(pid)]

    def go(self) -> None:
        """Let the tools end."""
        (self.root / "go").touch()

    def send(self, path: str, key: str, method: str = "GET") -> socket.socket:
        """Send a request, and return its connection without reading the answer."""
        parts = urlsplit(self.address.url or "")
        connection = socket.create_connection((parts.hostname, parts.port or 0), timeout=10)
        connection.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
        )
        return connection


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    made = Slow(tmp_path)
    with made.address.serving():
        state = made.address._app.state
        state.checkpoints = replace(state.checkpoints, tools=made.tools)
        try:
            yield made
        finally:
            made.go()


def _path(slow: Slow, project: str, call: str) -> str:
    job = slow.service.submit(project=project)
    slow.service.run_dirs.prepare(job.run_dir, job.spec, job.size, attempt=1)
    checkpoint(slow.service.run_dir(job.id), 10, weights=b"1")
    return f"/jobs/{job.id}/checkpoints/10/{call}"


@pytest.mark.parametrize(("method", "call"), [("GET", "digests"), ("POST", "verify")])
def test_calls_of_a_client_that_hung_up_are_ended(slow: Slow, method: str, call: str) -> None:
    viewer = slow.service.access.create(OPERATOR, "alice", {"nlp": Role.EDITOR}, None)[1]
    path, other = _path(slow, "nlp", call), _path(slow, "vision", call)
    connections = [slow.send(path, viewer, method) for _ in range(12)]
    wait_for(slow.running, "a process")
    assert len(slow.running()) == 1, "a key has one at a time"
    for connection in connections:
        connection.close()
    wait_for(lambda: not slow.running(), "the end of the process")
    slow.go()
    # The tool answers that the checkpoint does not exist.
    answer = httpx.request(method, f"{slow.address.url}{other}", headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    assert answer.status_code == 404
    assert len(slow.pids()) <= 3, "waiting calls start no process"


def test_webhook_tests_of_one_project_leave_places_to_others(slow: Slow) -> None:
    go, begun = threading.Event(), list[str]()

    def send(webhook: Webhook, *_: object, **__: object) -> Answer:
        begun.append(webhook.project)
        go.wait(60)
        return Answer(200)

    hooks, paths, keys = slow.service.webhooks, dict[str, str](), dict[str, str]()
    for name in ("nlp", "vision"):
        paths[name] = f"/webhooks/{hooks.create(OPERATOR, name, 'https://1.1.1.1/', []).id}/test"
        keys[name] = slow.service.access.create(OPERATOR, name, {name: Role.ADMIN}, None)[1]
    with patch.object(MemorySender, "send", side_effect=send), ExitStack() as stack:
        stack.callback(go.set)
        for name in (*["nlp"] * 9, "vision"):
            stack.enter_context(closing(slow.send(paths[name], keys[name], "POST")))
        wait_for(lambda: len(begun) >= 3, "three tests")
        assert sorted(begun) == ["nlp", "nlp", "vision"]


@pytest.mark.parametrize("early", [True, False])
def test_cancellation_ends_a_process_at_any_time(early: bool) -> None:
    cancellation, ended = Cancellation(), threading.Event()

    def call() -> None:
        if early:
            cancellation.cancel()
        with cancellation.ending(ended.set):
            if not early:
                cancellation.cancel()

    with pytest.raises(CallCancelled):
        call()
    assert ended.is_set()


def test_cancellation_after_the_end_of_a_process_does_nothing() -> None:
    finished = Cancellation()
    with finished.ending(lambda: pytest.fail("it had ended")):
        pass
    finished.cancel()


def test_project_gets_half_of_the_exports_and_another_starts_at_once(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    jobs = {name: slow.service.submit(project=name) for name in ("nlp", "vision", "audio")}
    try:
        for _ in range(2):
            slow.tools.export(jobs["nlp"], 10, WISH)
        with pytest.raises(Busy, match="2 exports of project nlp are running"):
            slow.tools.export(jobs["nlp"], 10, WISH)
        slow.tools.export(jobs["vision"], 10, WISH)
        with pytest.raises(Busy, match="3 exports are running"):
            slow.tools.export(jobs["vision"], 10, WISH)
        slow.tools.export(jobs["audio"], 10, WISH)
        wait_for(lambda: len(slow.running()) == 4, "four exports")
    finally:
        slow.go()
    wait_for(lambda: not slow.running(), "the end of the exports")
    wait_for(lambda: not slow.tools._exports.total(), "free shares")
    slow.tools.export(jobs["nlp"], 10, WISH)


def test_export_runs_under_the_read_policy_of_its_project(tmp_path: Path) -> None:
    """A link in a tokenizer's folder may have changed since the submission."""
    script = f'echo "${READ_POLICY_VARIABLE}" > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/seen'
    tools = HelperTools(
        timeout=60.0,
        python=("/bin/sh", "-c", script),
        read_policy=lambda project: ReadPolicy(project=project, roots=("file:///data",)),
    )
    tools.export(FakeService(tmp_path).submit(project="nlp"), 10, WISH)
    seen = tmp_path / "seen"
    wait_for(seen.exists, "the policy")
    policy = ReadPolicy.model_validate_json(seen.read_text())
    assert (policy.project, policy.roots) == ("nlp", ("file:///data",))
