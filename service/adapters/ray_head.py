"""One `ray start --head` on loopback: its command, its folder, its record on disk, and all of its processes."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
from pydantic import BaseModel, ConfigDict

from train_loop.ray_folder import make_private_folder
from train_loop.run_dir import write_durably

_MARK = "TRAINSHED_EMBEDDED_RAY"
_KILL_SECONDS = 2.0
"""Timeout for the processes of a head to exit after SIGKILL."""
_POLL_SECONDS = 0.02


class FolderOpen(Exception):
    """Other users can enter Ray's folder, where they could intercept the token."""


class RayHead(BaseModel):
    """A head that was started: enough to find it, and all that it started, again after any crash of ours."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int
    create_time: float
    dashboard_url: str
    address: str
    temp_dir: str
    """A folder of mode 0700; Ray's own temporary folder, of mode 0777, is inside it."""

    def alive(self) -> bool:
        """Whether the process is there, and is the same one."""
        return self.process() is not None

    def process(self) -> psutil.Process | None:
        """The head's process, if it lives."""
        try:
            process = psutil.Process(self.pid)
            return process if abs(process.create_time() - self.create_time) < 1 and _runs(process) else None
        except psutil.NoSuchProcess:
            return None

    def answers(self, token: str) -> bool:
        """Whether the dashboard answers to the token."""
        try:
            headers = {"Authorization": f"Bearer {token}"}
            return httpx.get(f"{self.dashboard_url}/api/version", headers=headers, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def check_folder(self) -> None:
        """Check that no other user can enter the folder. Raises FolderOpen."""
        try:
            found = os.lstat(self.temp_dir)
        except OSError as error:
            raise FolderOpen(f"Ray's folder {self.temp_dir} is not there: {error.strerror}") from error
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
            raise FolderOpen(
                f"Ray's folder {self.temp_dir} has mode {mode:04o} and owner {found.st_uid}; it must be a folder of "
                f"mode 0700 and owner {os.geteuid()}, because other users could intercept Ray's token there"
            )

    def stop(self) -> None:
        """Kill all processes of the head and remove its folder."""
        # Listed before the head goes: afterwards its daemons are nobody's children.
        family = _family(self, self.process())
        deadline = time.monotonic() + _KILL_SECONDS
        while family and time.monotonic() < deadline:
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            # Before waiting, so that it is removed even if a process hangs in the kernel.
            shutil.rmtree(self.temp_dir, ignore_errors=True)
            while any(map(_runs, family)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            # A process may have started another one before it exited.
            family = {process for process in _family(self, None) if _runs(process)}
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def read_head(record: Path) -> RayHead | None:
    """The head that was recorded, if any."""
    try:
        return RayHead.model_validate_json(record.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def start_head(home: Path, *, cpus: int, object_store_bytes: int) -> tuple[RayHead, subprocess.Popen[bytes]]:
    """Start a head in a session of its own, so that it outlives us; recorded in home/ray.json before it runs."""
    temp_dir = make_private_folder()
    try:
        return _start(home, temp_dir, cpus=cpus, object_store_bytes=object_store_bytes)
    except BaseException:
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise


def _start(home: Path, temp_dir: str, *, cpus: int, object_store_bytes: int) -> tuple[RayHead, subprocess.Popen[bytes]]:
    ports = _free_ports(8)
    command = _command(ports[:6], f"{temp_dir}/r", cpus=cpus, object_store_bytes=object_store_bytes)
    with (home / "ray.log").open("ab") as log:
        # It waits for a line before it becomes Ray. If we die before the record is written, it reads an end of file and
        # goes; there is no instant with a Ray that nobody knows of.
        child = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=_environment(home, temp_dir, metric_ports=ports[6:]),
            start_new_session=True,
        )
    assert child.stdin is not None
    try:
        head = RayHead(
            pid=child.pid,
            create_time=psutil.Process(child.pid).create_time(),
            dashboard_url=f"http://127.0.0.1:{ports[1]}",
            address=f"127.0.0.1:{ports[0]}",
            temp_dir=temp_dir,
        )
        write_durably(home / "ray.json", head.model_dump_json(indent=2))
    except BaseException:
        child.stdin.close()
        child.kill()
        child.wait()
        raise
    with suppress(BrokenPipeError), child.stdin:
        child.stdin.write(b"go\n")
    return head, child


def _command(ports: list[int], temp_dir: str, *, cpus: int, object_store_bytes: int) -> list[str]:
    gcs, dashboard, agent_http, agent_grpc, metrics, client = ports
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", f"--port={gcs}", f"--num-cpus={cpus}", f"--temp-dir={temp_dir}"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        *(f"--dashboard-agent-listen-port={agent_http}", f"--dashboard-agent-grpc-port={agent_grpc}"),
        *(f"--metrics-export-port={metrics}", f"--object-store-memory={object_store_bytes}"),
        f"--ray-client-server-port={client}",
    ]


def _environment(home: Path, temp_dir: str, *, metric_ports: list[int]) -> dict[str, str]:
    autoscaler, dashboard = map(str, metric_ports)
    return {
        **os.environ,
        _MARK: temp_dir,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home / "ray.token"),
        # On Linux, Ray otherwise replaces 127.0.0.1 by the machine's outer address, and listens on all of them.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # A lone head has no other node to move its work to, so there is nothing to wait for.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "AUTOSCALER_METRIC_PORT": autoscaler,
        "DASHBOARD_METRIC_PORT": dashboard,
    }


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _runs(process: psutil.Process) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _family(record: RayHead, head: psutil.Process | None) -> set[psutil.Process]:
    """The head's descendants, and what is left in its session, with their descendants, where the head is gone."""
    found = list(psutil.process_iter(["ppid"]))
    family = {process for process in found if process == head or _belongs(process, record)}
    newest = family
    # One look at all processes: asking each of them for its children takes seconds on a busy machine.
    while newest:
        parents = {process.pid for process in newest}
        newest = {process for process in found if process.info["ppid"] in parents} - family
        family = family | newest
    return family


def _belongs(process: psutil.Process, record: RayHead) -> bool:
    """Whether a process carries the head's mark, or is in its session and is called after it.

    The session alone does not prove it, because a pid may have been given out again; Ray's workers overwrite the
    environment that would show the mark, but keep their session and a name.
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
