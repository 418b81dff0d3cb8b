"""`python -m tests.support.servers.worker_forks`: forks Ray's workers and drivers, which need no imports then.

Each of these imports for four CPU seconds. `forks/sitecustomize.py` hands it over before its first import. A process
of a test host is forked into the namespaces of that host. The server ends with its standard input.
"""

import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.forks.sitecustomize import FORKS_VARIABLE
from tests.support.hosts.namespaces import enter_namespaces_of
from train_loop.system.gc import keep_what_is_there

FORKS = Path(__file__).parents[1] / "forks"
MODULES = (
    "jsonschema",
    "pandas",
    "psutil",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "requests",
    "torch.distributed.fsdp",
    "train_loop.checkpoint.restore",
    "train_loop.data.prepare.cache",
    "train_loop.sinks.forward",
    "train_loop.train",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What workers and drivers import except Ray, which reads a process's own variables when it is imported."""
_STEP_VARIABLE, _READING_VARIABLE = "TEST_STEP_SECONDS", "TEST_RANKS_READ"
SLOW, LOADING, TRAINING, EVALUATING, SAVING = "slow", "loading", "training", "evaluating", "saving"
"""Label of a job with a slow phase, and its values."""


def worker_forks(*, link: Path | None = None, step_seconds: float = 0.0, ranks_read: bool = False) -> dict[str, str]:
    """Return the variables with which a Ray has its workers forked by this process's server.

    `link` becomes another path of the socket, for test hosts, which see only some folders. Each training step takes
    `step_seconds` more, as that of a larger model would, but without the processor. With `ranks_read`, ranks read
    their own rows to the end, as in a run too short to start Ray Data, which takes eight CPU seconds.
    """
    _, path = _server()
    if link is not None:
        os.link(path, link)
    found = os.pathsep.join(filter(None, [str(FORKS), os.environ.get("PYTHONPATH")]))
    reading = {_READING_VARIABLE: "1"} if ranks_read else {}
    return {FORKS_VARIABLE: str(link or path), _STEP_VARIABLE: str(step_seconds), "PYTHONPATH": found} | reading


@cache
def _server() -> tuple[subprocess.Popen[bytes], str]:
    """Start the server; return it and the path of its socket.

    The cache keeps its standard input open, so that it serves until this process ends.
    """
    foreign = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINSHED_", "RAY_"))}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.servers.worker_forks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**foreign, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert server.stdout is not None
    return server, server.stdout.readline().decode().rstrip()


class Forks:
    """A server of one thread: it forks a process for each connection and writes its exit code to it."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._ready = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        """Connections by the ids of their processes."""
        self._wakes = os.pipe2(os.O_NONBLOCK)

    def serve(self) -> dict[str, Any] | None:
        """Fork until standard input ends. Return a request in the process that was forked for it."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes[1])
        for source in (self._listener, sys.stdin, self._wakes[0]):
            self._ready.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif key.fileobj == self._wakes[0]:
                    os.read(self._wakes[0], 512)
                    self._reap()
                elif key.data in self._connections:
                    self._pass_on(self._connections[key.data], key.data)

    def _pass_on(self, connection: socket.socket, process: int) -> None:
        """Send a forked process the signal of the one that handed itself over, or SIGKILL if that one was killed."""
        received = connection.recv(1)
        with suppress(ProcessLookupError):
            os.kill(process, received[0] if received else signal.SIGKILL)
        if not received:
            self._ready.unregister(connection)

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        connection.settimeout(10)
        try:
            size, files, _, _ = socket.recv_fds(connection, 4, 3)
            with connection.makefile("rb") as reader:
                request: dict[str, Any] = json.loads(reader.read(int.from_bytes(size, "big")))
        except (TimeoutError, json.JSONDecodeError):
            # The requester was frozen or killed while it sent this.
            connection.close()
            return None
        assert threading.active_count() == 1
        requester, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        process = os.fork()
        if process:
            for file in files:
                os.close(file)
            self._connections[process] = connection
            self._ready.register(connection, selectors.EVENT_READ, process)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._ready.close()
        self._listener.close()
        for other in self._connections.values():
            other.close()
        connection.close()
        enter_namespaces_of(requester)
        # Ray kills the whole group of a lost worker.
        os.setpgid(0, 0)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return request

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                process, status = found
                connection = self._connections.pop(process)
                with suppress(KeyError):
                    self._ready.unregister(connection)
                with suppress(OSError):
                    connection.sendall(str(os.waitstatus_to_exitcode(status) & 0xFF).encode())
                connection.close()


def _slow_down_phases(step_seconds: float) -> None:
    """Make all steps longer, and a phase slow in jobs with the label SLOW."""
    train, evaluate = import_module("train_loop.train"), import_module("train_loop.loop.evaluate")
    saver = import_module("train_loop.checkpoint.save").Saver
    build_run, train_step, batches, write = train.build_run, train.train_step, evaluate._batches, saver._write
    phase = ""

    def sleep_if(slow: str, seconds: float) -> None:
        time.sleep(seconds if phase == slow else 0.0)

    def build(spec: Any, *arguments: Any) -> Any:
        nonlocal phase
        phase = spec.labels.get(SLOW, "")
        sleep_if(LOADING, 60.0)
        return build_run(spec, *arguments)

    def slow_step(*arguments: Any, **named: Any) -> Any:
        time.sleep(step_seconds)
        sleep_if(TRAINING, 0.05)
        return train_step(*arguments, **named)

    def slow_batches(*arguments: Any) -> Any:
        for batch in batches(*arguments):
            sleep_if(EVALUATING, 0.5)
            yield batch

    def slow_write(*arguments: Any) -> Any:
        sleep_if(SAVING, 1.0)
        return write(*arguments)

    train.build_run, train.train_step = build, slow_step  # type: ignore[attr-defined]
    evaluate._batches, saver._write = slow_batches, slow_write  # type: ignore[attr-defined]


def _let_ranks_read() -> None:
    """Never start Ray Data for the rows of ranks."""
    import_module("train_loop.data.stream.ray_data").ray_stream.__kwdefaults__["after"] = float(2**20)


def main() -> None:
    """Serve, and run the requested program in each forked process."""
    folder = tempfile.mkdtemp(prefix="forks-")
    forks = Forks(f"{folder}/socket")
    # Workers that start before the imports are done wait here.
    print(f"{folder}/socket", flush=True)  # noqa: T201
    for module in MODULES:
        import_module(module)
    assert "ray" not in sys.modules
    keep_what_is_there()
    request = forks.serve()
    if request is None:
        shutil.rmtree(folder)
        return
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # The forks would all have the same state.
    np.random.seed()
    _slow_down_phases(float(os.environ[_STEP_VARIABLE]))
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.argv = request["argv"]
    if sys.argv[0] == "-m":
        sys.argv.pop(0)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        if _READING_VARIABLE in os.environ:
            _let_ranks_read()
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
