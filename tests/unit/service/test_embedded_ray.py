"""A real Ray head: started, left behind by a SIGKILL, taken over, replaced, and gone without a trace."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from service.adapters.embedded_ray import EmbeddedRay
from service.adapters.ray_head import RayHead, read_head
from service.adapters.ray_jobs import RayJobs
from service.domain.decide import Submission
from service.errors import ClusterError
from service.ports import Launch
from tests.support.waiting import wait_for

CPUS = 2
OBJECT_STORE_BYTES = 80_000_000
LEFT_BEHIND = """
import sys, time
from pathlib import Path
from service.adapters.embedded_ray import EmbeddedRay
ray = EmbeddedRay(Path(sys.argv[1]), cpus=2, object_store_bytes=80_000_000)
ray.start()
while ray.address() is None:
    time.sleep(0.1)
# In a file: on standard output another thread logs, and lines of two threads can run into each other.
Path(sys.argv[1], "up").touch()
time.sleep(600)
"""


@pytest.fixture
def driver(tmp_path: Path) -> str:
    """Something that Ray can run in Python's place, and that stays."""
    script = tmp_path / "driver"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[EmbeddedRay]:
    embedded = EmbeddedRay(tmp_path, cpus=CPUS, object_store_bytes=OBJECT_STORE_BYTES)
    yield embedded
    embedded.stop()


def recorded(home: Path) -> RayHead:
    head = read_head(home / "ray.json")
    assert head is not None
    return head


def processes(head: RayHead) -> list[psutil.Process]:
    """All processes of a head, by its session and what they descend from."""
    session = [p for p in psutil.process_iter() if _session(p) == head.pid]
    return list({*session, *(child for p in session for child in _children(p))})


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def listens_on(head: RayHead) -> set[str]:
    """The addresses on which any process of a head listens."""
    family = {process.pid for process in processes(head)}
    connections = psutil.net_connections(kind="tcp")
    return {c.laddr[0] for c in connections if c.status == psutil.CONN_LISTEN and c.pid in family and c.laddr}


def launch(attempt: int) -> Launch:
    return Launch(f"job-1-{attempt}", "job-1", "tiny", attempt=attempt, run_dir="file:///nowhere")


def test_head_outlives_a_killed_service_and_not_a_stopped_one(tmp_path: Path, driver: str, ray: EmbeddedRay) -> None:
    with subprocess.Popen([sys.executable, "-c", LEFT_BEHIND, str(tmp_path)]) as service:
        try:
            wait_for((tmp_path / "up").exists, what="the first head", seconds=120)
        finally:
            service.send_signal(signal.SIGKILL)
    left = recorded(tmp_path)

    # Taken over: the same head, and what runs there goes on.
    ray.start()
    address = wait_for(ray.address, what="the head that was left behind")
    assert (recorded(tmp_path), address.url) == (left, left.dashboard_url)
    assert httpx.get(f"{address.url}/api/version").status_code == 401
    jobs = RayJobs(ray.address, python=driver)
    assert wait_for(jobs.capacity).total["CPU"] == CPUS
    assert jobs.status("job-1-1") is Submission.MISSING
    jobs.submit(launch(1))
    jobs.submit(launch(1))
    with pytest.raises(ClusterError, match="Ray did not take job-1-1"):
        RayJobs(ray.address, python="other").submit(launch(1))
    wait_for(lambda: jobs.status("job-1-1") is Submission.RUNNING)
    assert {ip.removeprefix("::ffff:") for ip in listens_on(left)} == {"127.0.0.1"}
    jobs.stop("job-1-none")

    # Replaced when it dies: what it ran is gone, and that is known, not guessed.
    family = processes(left)
    os.kill(left.pid, signal.SIGKILL)
    wait_for(lambda: ray.address() not in (None, address), what="another head")
    assert jobs.status("job-1-1") is Submission.MISSING
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []

    # Stopped: no process, no file.
    jobs.submit(launch(2))
    wait_for(lambda: jobs.status("job-1-2") is Submission.RUNNING)
    jobs.stop("job-1-2")
    new, family = recorded(tmp_path), processes(recorded(tmp_path))
    ray.stop()
    assert len(family) > 5
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert not Path(new.temp_dir).exists()
    assert not Path(left.temp_dir).exists()
    assert read_head(tmp_path / "ray.json") is None
    assert jobs.status("job-1-1") is Submission.UNKNOWN
