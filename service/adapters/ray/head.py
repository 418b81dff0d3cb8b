"""A Ray head on loopback (`ray start --head`): its command, folder, record on disk, and processes."""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from train_loop.plan import WORKER_MEMORY_VARIABLE
from train_loop.run_dir import write_durably
from train_loop.system.private_folder import make_private_folder
from train_loop.system.ray_loopback import loopback_environment

_MARK = "TRAINSHED_EMBEDDED_RAY"
_KILL_SECONDS = 2.0
"""Timeout for the processes of a head to exit after SIGKILL."""
_POLL_SECONDS = 0.02
_DASHBOARD = "dashboard/dashboard.py"
"""End of the path of the dashboard's program."""
_ANNOUNCEMENT = re.compile(r"Dashboard head http address: (127\.0\.0\.1:\d+)")
"""The line in the dashboard's log with the port that the operating system has chosen."""
_RESERVED_BYTES = 2 << 30
"""Memory that a process of Ray reserves and hardly uses, for stacks and arenas: 1.5 GiB were measured."""


class FolderOpen(Exception):
    """The error of a Ray folder that other users can enter: they could intercept the token there."""


class RayHead(BaseModel):
    """The record of a started head, by which the service finds all its processes again after a crash."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int
    create_time: float
    temp_dir: str
    """A folder of mode 0700; Ray's own temporary folder, of mode 0777, is inside it, and the key for TLS."""
    dashboard_url: str | None = None
    """None until the dashboard has announced it."""

    def alive(self) -> bool:
        """Return whether the head's process runs. A reused pid does not count."""
        return self.process() is not None

    def process(self) -> psutil.Process | None:
        """Return the head's process; None if it does not run."""
        try:
            process = psutil.Process(self.pid)
            return process if abs(process.create_time() - self.create_time) < 1 and _runs(process) else None
        except psutil.NoSuchProcess:
            return None

    def find_dashboard(self) -> str | None:
        """Return the dashboard's URL, which it announces in its log; None until then. Others cannot write there."""
        try:
            log = Path(self.temp_dir, "r", "session_latest", "logs", "dashboard.log").read_text(errors="replace")
        except OSError:
            return None
        announced = _ANNOUNCEMENT.findall(log)
        return f"http://{announced[-1]}" if announced else None

    def dashboard(self) -> psutil.Process | None:
        """Return the process of the dashboard; None if it does not run. Only it may receive the token."""
        head = self.process()
        with suppress(psutil.Error):
            for child in head.children() if head is not None else ():
                if any(word.endswith(_DASHBOARD) for word in child.cmdline()):
                    return child
        return None

    def check_folder(self) -> None:
        """Raise FolderOpen if the folder is missing or another user can enter it."""
        try:
            found = os.lstat(self.temp_dir)
        except OSError as error:
            raise FolderOpen(f"Ray's folder {self.temp_dir} does not exist: {error.strerror}") from error
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
            raise FolderOpen(
                f"Ray's folder {self.temp_dir} has mode {mode:04o} and owner {found.st_uid}; it must be a folder of "
                f"mode 0700 and owner {os.geteuid()}, because other users could intercept Ray's token there"
            )

    def stop(self) -> None:
        """Kill all processes of the head and remove its folder."""
        # List the processes while the head lives: afterwards its daemons are no longer its descendants.
        family = _family(self, self.process())
        deadline = time.monotonic() + _KILL_SECONDS
        while family and time.monotonic() < deadline:
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            # Remove the folder before the wait, in case a process hangs in the kernel.
            shutil.rmtree(self.temp_dir, ignore_errors=True)
            while any(map(_runs, family)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            # A process may have started another one before it exited.
            family = {process for process in _family(self, None) if _runs(process)}
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def read_head(record: Path) -> RayHead | None:
    """Return the recorded head; None if the record is missing or invalid."""
    try:
        return RayHead.model_validate_json(record.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


class HeadSettings(BaseModel):
    """Settings of a head: its CPUs, its memory, and the environment of its processes."""

    model_config = ConfigDict(frozen=True)

    cpus: int
    object_store_bytes: int
    memory_bytes: int
    """Memory that all jobs may reserve together, beside the object store."""
    environment: dict[str, str]


def record_head(home: Path, head: RayHead) -> None:
    """Write home/ray.json."""
    write_durably(home / "ray.json", head.model_dump_json(indent=2))


def start_head(home: Path, settings: HeadSettings) -> tuple[RayHead, subprocess.Popen[bytes]]:
    """Start a head in a new session, so that it outlives the service. Record it in home/ray.json before it runs."""
    temp_dir = make_private_folder()
    try:
        return _start(home, temp_dir, settings)
    except BaseException:
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise


def _start(home: Path, temp_dir: str, settings: HeadSettings) -> tuple[RayHead, subprocess.Popen[bytes]]:
    command = _command(f"{temp_dir}/r", settings)
    # No process of Ray may allocate more than all jobs together. A soft limit, which a rank with a GPU raises.
    kilobytes = (settings.memory_bytes + _RESERVED_BYTES) // 1024
    memory = {WORKER_MEMORY_VARIABLE: str(settings.memory_bytes)}
    with (home / "ray.log").open("ab") as log:
        # The shell waits for a line before it executes Ray. If the service dies before the record is written, the shell
        # reads end of file and exits. So Ray never runs without a record.
        child = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                f'read -r go && {{ ulimit -S -d {kilobytes} || :; }} && exec "$@" </dev/null',
                "sh",
                *command,
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=settings.environment | _own_variables(home, temp_dir) | loopback_environment(temp_dir) | memory,
            start_new_session=True,
        )
    assert child.stdin is not None
    try:
        created = psutil.Process(child.pid).create_time()
        head = RayHead(pid=child.pid, create_time=created, temp_dir=temp_dir)
        record_head(home, head)
    except BaseException:
        child.stdin.close()
        child.kill()
        child.wait()
        raise
    with suppress(BrokenPipeError), child.stdin:
        child.stdin.write(b"go\n")
    return head, child


def _command(temp_dir: str, settings: HeadSettings) -> list[str]:
    # With port 0, each process binds a free port itself and announces it in Ray's private folder. A port that is chosen
    # before Ray binds it could be taken by another user, who would receive the token.
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", "--port=0", f"--num-cpus={settings.cpus}", f"--temp-dir={temp_dir}"),
        # Drivers write the logs of their ranks themselves, so that no process need send lines to drivers.
        *(
            "--include-log-monitor=false",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            "--dashboard-port=0",
        ),
        *("--dashboard-agent-listen-port=0", "--dashboard-agent-grpc-port=0", "--metrics-export-port=0"),
        *(f"--memory={settings.memory_bytes}", f"--object-store-memory={settings.object_store_bytes}"),
        # Ray rejects 0 here. No process of ours connects to this port.
        f"--ray-client-server-port={_free_port()}",
    ]


def _own_variables(home: Path, temp_dir: str) -> dict[str, str]:
    return {
        _MARK: temp_dir,
        "RAY_AUTH_TOKEN_PATH": str(home / "ray.token"),
        # A single node cannot move its work to another node, so a drain need not wait.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
    }


def _free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _runs(process: psutil.Process) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _family(record: RayHead, head: psutil.Process | None) -> set[psutil.Process]:
    """Return the head and all processes that belong to it, with their descendants. The head may have exited."""
    found = list(psutil.process_iter(["ppid"]))
    family = {process for process in found if process == head or _belongs(process, record)}
    newest = family
    # List all processes once: to query the children of each process takes seconds on a busy machine.
    while newest:
        parents = {process.pid for process in newest}
        newest = {process for process in found if process.info["ppid"] in parents} - family
        family = family | newest
    return family


def _belongs(process: psutil.Process, record: RayHead) -> bool:
    """Return whether a process has the head's mark, or is in its session and has a command line of Ray.

    The session alone is not proof, because the head's pid may have been reused. Ray's workers overwrite the
    environment that holds the mark, but keep their session and a name.
    """
    try:
        if process.environ().get(_MARK) == record.temp_dir:
            return True
        if os.getsid(process.pid) != record.pid:
            return False
        line = " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return False
    return record.temp_dir in line or line.startswith(("ray::", "ray-"))
