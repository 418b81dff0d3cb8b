"""Checks that hang: other requests do not wait for them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from service.adapters.helper_processes.checkpoints import HelperTools
from service.ports import Cancellation, PreflightReport
from tests.support.fakes.service import FakeService, spec_body
from tests.support.fakes.stores import MemoryPreflight
from tests.support.waiting import wait_for
from train_loop.run_dir import Parent
from train_loop.spec import JobSpec

MANY = 60
"""More requests than the server has threads for sync handlers."""


@dataclass
class StuckPreflight(MemoryPreflight):
    """A preflight whose checks wait until `go` is set."""

    go: threading.Event = field(default_factory=threading.Event)
    begun: int = 0

    def check(self, spec: JobSpec, parent: Parent | None = None) -> PreflightReport:
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
