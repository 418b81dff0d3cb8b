"""The embedded Ray head: start, takeover after a service kill, replacement and clean stop."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from service.adapters.ray import head as ray_head
from service.adapters.ray.embedded import EmbeddedRay
from service.adapters.ray.environment import environment_of_jobs
from service.adapters.ray.head import FolderOpen, HeadSettings, RayHead, read_head
from service.adapters.ray.jobs import RayJobs
from service.domain.jobs.observation import SubmissionStatus
from service.errors import ClusterError
from service.ports import SubmitRequest
from tests.support.builders.specs import raw_spec
from tests.support.waiting import running, wait_for
from train_loop.system.private_folder import parent_folder

CPUS = 2
OBJECT_STORE_BYTES = 80_000_000
SECRETS = {
    "TRAINSHED_SECRET_KEY": "of-the-service-1",
    "TRAINSHED_DATABASE_URL": "postgresql://shed:of-the-service-2@db/jobs",
    "PGPASSWORD": "of-the-service-3",
    "AWS_SECRET_ACCESS_KEY": "of-the-service-4",
}
MEMORY_BYTES = 4 << 30
KILLED_SERVICE = """
import sys, time
from pathlib import Path
from service.adapters.ray.embedded import EmbeddedRay
from tests.e2e.test_embedded_ray import settings
ray = EmbeddedRay(Path(sys.argv[1]), settings())
ray.start()
while ray.address() is None:
    time.sleep(0.1)
# Use a file: another thread logs to standard output, and lines of two threads can mix.
Path(sys.argv[1], "up").touch()
time.sleep(600)
"""
REACHABLE = 'for path; do [ -e "$path" ] && echo "$path"; done; echo done'


@pytest.fixture
def driver(tmp_path: Path) -> str:
    """Return an executable that Ray runs instead of Python and that keeps running."""
    script = tmp_path / "driver"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[EmbeddedRay]:
    embedded = EmbeddedRay(tmp_path, settings())
    yield embedded
    embedded.stop()


def settings() -> HeadSettings:
    """Return settings of a service whose environment holds secrets; no storage root is on S3."""
    environment = environment_of_jobs({**os.environ, **SECRETS}, roots=["file:///runs"], sinks=["tensorboard"])
    return HeadSettings(
        cpus=CPUS, object_store_bytes=OBJECT_STORE_BYTES, memory_bytes=MEMORY_BYTES, environment=environment
    )


def recorded(home: Path) -> RayHead:
    head = read_head(home / "ray.json")
    assert head is not None
    return head


def processes(head: RayHead) -> list[psutil.Process]:
    """Return all processes of a head: its session and the descendants of those processes."""
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


def listeners(head: RayHead) -> set[tuple[str, int]]:
    """Return the addresses and ports at which processes of a head listen."""
    family = {process.pid for process in processes(head)}
    found = [c for c in psutil.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN and c.pid in family]
    return {(c.laddr[0].removeprefix("::ffff:"), c.laddr[1]) for c in found if c.laddr}


def speaks_grpc_without_tls(port: int) -> bool:
    """Return whether a port answers the start of HTTP/2 with its settings: then it would also send plain calls."""
    # The process may have ended meanwhile.
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        return connection.recv(9)[3:4] == b"\4"
    return False


def answer_to(url: str, headers: dict[str, str] | None) -> int:
    """Return the status code with which a dashboard answers a request with these headers."""
    return httpx.get(f"{url}/api/version", headers=headers, timeout=60).status_code


def holders_of_secrets(head: RayHead) -> list[str]:
    """Return the names of a head's processes whose environment holds a secret of the service."""
    found = []
    for process in processes(head):
        with suppress(psutil.NoSuchProcess, OSError):  # some of Ray's processes end soon
            if b"of-the-service" in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process.name())
    return found


def assert_closed_to_others(head: RayHead) -> None:
    """Check that another user cannot access any of Ray's files; if run as root, try it as such a user."""
    folder = Path(head.temp_dir)
    wait_for(lambda: list(folder.glob("*/*/sockets/dash_JobHead")), "the socket of the jobs")
    # Unlike rglob, os.walk ignores folders that vanish.
    paths = [os.path.join(root, name) for root, folders, files in os.walk(folder) for name in folders + files]
    assert stat.S_IMODE(Path(head.temp_dir).stat().st_mode) == 0o700
    if os.geteuid() == 0:
        command = ["/bin/sh", "-c", REACHABLE, "sh", *paths]
        result = subprocess.run(command, user=65534, group=65534, extra_groups=[], capture_output=True, check=True)
        assert result.stdout == b"done\n"


def assert_limited(head: RayHead) -> None:
    """Check that every process of Ray has a memory limit, and that the kernel kills workers before all others."""
    scores, drivers = dict[int, int](), set[int]()
    for process in processes(head):
        with suppress(psutil.NoSuchProcess, OSError):  # some of Ray's processes end soon
            command, (soft, hard) = process.cmdline(), process.rlimit(psutil.RLIMIT_DATA)
            score = int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())
            # The driver and its supervisor; Ray starts them as it starts ranks and tasks.
            if process.name() == "sleep" or "JobSupervisor" in " ".join(command):
                drivers.add(process.pid)
            scores[process.pid] = score
            assert MEMORY_BYTES < soft < MEMORY_BYTES + (4 << 30) < hard % 2**64, command
    assert {scores[pid] for pid in drivers} == {1000}
    assert scores[head.pid] == int(Path("/proc/self/oom_score_adj").read_text())


def assert_stop_leaves_nothing(ray: EmbeddedRay, jobs: RayJobs, home: Path) -> None:
    """Stop Ray while a job has been stopped, and check that no process and no file is left."""
    jobs.submit(launch(2))
    wait_for(lambda: jobs.status("job-1-2") is SubmissionStatus.RUNNING)
    jobs.stop("job-1-2")
    head = recorded(home)
    family = processes(head)
    ray.stop()
    assert len(family) > 5
    assert running(family) == []
    assert not Path(head.temp_dir).exists()
    assert read_head(home / "ray.json") is None
    assert jobs.status("job-1-1") is SubmissionStatus.UNKNOWN


def assert_takes_over(ray: EmbeddedRay, jobs: RayJobs, left: RayHead) -> None:
    """Check that jobs of a head that another service has left keep running, closed to other users."""
    assert holders_of_secrets(left) == []
    assert wait_for(jobs.capacity).total["CPU"] == CPUS
    wait_for(lambda: jobs.status("job-1-1") is SubmissionStatus.MISSING, "a Ray that has no such job")
    jobs.submit(launch(1))
    jobs.submit(launch(1))
    with pytest.raises(ClusterError, match="Ray did not accept job-1-1"):
        RayJobs(ray.address, python="other").submit(launch(1))
    wait_for(lambda: jobs.status("job-1-1") is SubmissionStatus.RUNNING)
    assert_limited(left)
    # Among them are workers: their ports become free whenever one ends.
    assert {address for address, _ in listeners(left)} == {"127.0.0.1"}
    assert [port for _, port in listeners(left) if speaks_grpc_without_tls(port)] == []
    jobs.stop("job-1-none")
    assert_closed_to_others(left)


def launch(attempt: int) -> SubmitRequest:
    return SubmitRequest(f"job-1-{attempt}", "job-1", "tiny", attempt=attempt, run_dir="file:///nowhere")


def test_head_survives_killed_service_and_ends_with_stopped_service(
    tmp_path: Path, driver: str, ray: EmbeddedRay
) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED_SERVICE, str(tmp_path)]) as service:
        try:
            wait_for((tmp_path / "up").exists, what="the first head", seconds=120)
        finally:
            service.send_signal(signal.SIGKILL)
    left = recorded(tmp_path)

    # Takeover: the head stays the same and its jobs keep running.
    ray.start()
    address = wait_for(ray.address, what="the head of the killed service")
    assert (recorded(tmp_path), address.url) == (left, left.dashboard_url)
    assert answer_to(address.url, None) == 401
    jobs = RayJobs(ray.address, python=driver)
    assert_takes_over(ray, jobs, left)

    # Replacement after the head dies: its jobs are reported as missing.
    family = processes(left)
    os.kill(left.pid, signal.SIGKILL)
    wait_for(lambda: ray.address() not in (None, address), what="another head")
    wait_for(lambda: jobs.status("job-1-1") is SubmissionStatus.MISSING, "a Ray that has no such job")
    assert running(family) == []

    # The token of the dead head is useless.
    before = ray.address()
    assert before is not None
    assert answer_to(before.url, address.headers) == 403
    assert answer_to(before.url, before.headers) == 200

    # Replacement if other users can enter its folder.
    Path(recorded(tmp_path).temp_dir).chmod(0o711)
    wait_for(lambda: ray.address() not in (None, before), what="a head with a private folder")
    assert_closed_to_others(recorded(tmp_path))

    assert_stop_leaves_nothing(ray, jobs, tmp_path)
    assert not Path(left.temp_dir).exists()


@pytest.mark.skipif("MORE" not in os.environ, reason="starts another Ray: `make more` runs it")
def test_ray_of_the_prepare_command_listens_on_loopback_with_tls(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(raw_spec()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "train_loop.prepare", str(tmp_path / "spec.yaml"), "--cache", str(tmp_path)]
    before, plain = set(Path(parent_folder()).glob("shed-*/tls.key")), dict[tuple[str, int, str], bool]()
    with subprocess.Popen(command, env=environment) as process:
        while process.poll() is None:
            for one in [psutil.Process(process.pid), *_children(psutil.Process(process.pid))]:
                with suppress(psutil.Error, OSError):  # it has ended
                    for found in one.net_connections("tcp"):
                        place = (found.laddr.ip.removeprefix("::ffff:"), found.laddr.port, one.name())
                        if found.status == psutil.CONN_LISTEN and place not in plain:
                            plain[place] = speaks_grpc_without_tls(found.laddr.port)
            time.sleep(0.2)
    assert process.returncode == 0
    assert {"gcs_server", "raylet"} <= {name for _, _, name in plain}
    assert {address for address, _, _ in plain} == {"127.0.0.1"}
    assert not any(plain.values()), plain
    assert not set(Path(parent_folder()).glob("shed-*/tls.key")) - before


def test_failed_start_leaves_no_folder_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Earlier tests of this run may have processes that serve several modules.
    before = psutil.Process().children()
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setattr(ray_head, "write_durably", _full_disk)
        with pytest.raises(OSError, match="No space left"):
            ray_head.start_head(tmp_path, settings())
        assert list(Path(folder).iterdir()) == []
    assert psutil.Process().children() == before


def _full_disk(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_ray_parent_folder_is_short_enough_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, chosen in (("/var/tmp", "/var/tmp"), (f"/{'x' * 60}", "/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        assert parent_folder() == chosen


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702, 0o1777])
def test_check_folder_accessible_to_others_raises_folder_open(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shed"
    folder.mkdir(mode=0o700)
    head = RayHead(pid=1, create_time=0, temp_dir=str(folder))
    head.check_folder()
    folder.chmod(mode)
    with pytest.raises(FolderOpen, match=f"has mode {mode:04o} and owner {os.geteuid()}; it must be"):
        head.check_folder()
    folder.rmdir()
    with pytest.raises(FolderOpen, match="does not exist"):
        head.check_folder()
    folder.symlink_to(tmp_path)
    with pytest.raises(FolderOpen, match="it must be a folder"):
        head.check_folder()
