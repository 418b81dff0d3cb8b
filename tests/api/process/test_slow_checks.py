"""Checks that hang: other requests do not wait for them."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from service.adapters.helper_processes.checkpoints import HelperTools
from service.ports import Cancellation, JobQuery, PreflightReport
from tests.support.fakes.service import KEY, FakeService, spec_body
from tests.support.fakes.stores import MemoryPreflight
from tests.support.servers.streams import Address
from tests.support.waiting import wait_for
from train_loop.run_dir import Parent
from train_loop.spec import AnyJobSpec

MANY = 60
"""More requests than the server has threads for sync handlers."""


@dataclass
class StuckPreflight(MemoryPreflight):
    """A preflight whose checks wait until `go` is set."""

    go: threading.Event = field(default_factory=threading.Event)
    begun: int = 0

    def check(
        self, spec: AnyJobSpec, parent: Parent | None = None, cancellation: Cancellation | None = None
    ) -> PreflightReport:
        """Wait for `go`, then check as MemoryPreflight does."""
        self.begun += 1
        self.go.wait(600)
        return super().check(spec, parent)


def test_jobs_are_listed_while_many_specs_are_checked(tmp_path: Path) -> None:
    stuck = StuckPreflight()
    with FakeService(tmp_path, preflight=stuck).client() as client, ThreadPoolExecutor(MANY + 1) as threads:
        try:
            answers = [
                threads.submit(client.post, path, content=spec_body())
                for path in ("/jobs", "/jobs/plan")
                for _ in range(MANY // 2)
            ]
            wait_for(lambda: stuck.begun >= 8, "specs that are being checked")
            assert threads.submit(client.get, "/jobs").result(timeout=60).json()["data"] == []
        finally:
            stuck.go.set()
        assert {answer.result().status_code for answer in answers} == {200, 201}


@dataclass
class PatientPreflight(MemoryPreflight):
    """A preflight whose checks of plans end only when they are cancelled, and whose other checks wait for `go`."""

    go: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def check(
        self, spec: AnyJobSpec, parent: Parent | None = None, cancellation: Cancellation | None = None
    ) -> PreflightReport:
        """Wait for the cancellation or for `go`."""
        self.begun.set()
        if cancellation is not None:
            with cancellation.ending(self.cancelled.set):
                self.cancelled.wait(60)
        self.go.wait(60)
        return super().check(spec, parent)


@pytest.mark.parametrize("path", ["/jobs/plan", "/jobs"])
def test_plan_ends_with_its_client_and_submission_does_not(tmp_path: Path, path: str) -> None:
    patient, body = PatientPreflight(), spec_body()
    service = FakeService(tmp_path, preflight=patient)
    address = Address(service)
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}")
    typed = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    with address.serving():
        parts = urlsplit(address.url or "")
        with socket.create_connection((parts.hostname, parts.port or 0), timeout=10) as connection:
            connection.sendall("\r\n".join((*lines, *typed, "", body)).encode())
            assert patient.begun.wait(10)
        if path == "/jobs/plan":
            assert patient.cancelled.wait(10)
        patient.go.set()
        if path == "/jobs":
            wait_for(lambda: service.store.page(JobQuery()), "the job")
    assert patient.cancelled.is_set() == (path == "/jobs/plan")


def test_jobs_are_listed_while_many_checkpoints_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, service = threading.Event(), list[int](), FakeService(tmp_path)

    def read(self: HelperTools, run_dir: str, step: int, cancellation: Cancellation) -> list[str]:
        begun.append(step)
        go.wait(600)
        return []

    monkeypatch.setattr(HelperTools, "verify", read)
    path = f"/jobs/{service.submit().id}/checkpoints/10/verify"
    with service.client() as client, ThreadPoolExecutor(MANY + 1) as threads:
        try:
            answers = [threads.submit(client.post, path) for _ in range(MANY)]
            wait_for(lambda: begun, "a checkpoint that is being read")
            assert len(threads.submit(client.get, "/jobs").result(timeout=60).json()["data"]) == 1
            assert len(begun) < MANY, "each verification is a process"
        finally:
            go.set()
        assert {answer.result().status_code for answer in answers} == {200, 429}
