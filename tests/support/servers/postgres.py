"""A real Postgres for the length of a test, from the binaries on this machine."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_NOBODY = "nobody"


class PostgresServer:
    """A server on a free loopback port, which keeps its data and its port when it is stopped."""

    def __init__(self, root: Path) -> None:
        self._root, self._data, self._port = root, root / "data", _free_port()
        self.url = f"postgresql+psycopg://shed@127.0.0.1:{self._port}/postgres"
        _run("initdb", "-D", str(self._data), "-U", "shed", "--auth=trust", "--no-sync")

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        options = f"-c listen_addresses=127.0.0.1 -p {self._port} -k {self._root} -c fsync=off"
        _run("pg_ctl", "-D", str(self._data), "-l", str(self._root / "log"), "-o", options, "-w", "start")

    def stop(self) -> None:
        """Stop the server at once, with its connections."""
        _run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze all its processes for a while: connections stay open, and requests get no answer."""
        main = psutil.Process(int((self._data / "postmaster.pid").read_text().split()[0]))
        frozen = [main, *main.children(recursive=True)]
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in frozen:
                process.send_signal(signal.SIGCONT)


@contextmanager
def own_postgres() -> Iterator[PostgresServer]:
    """Yield a running server that a test may stop and freeze; a test that stops it must restart it."""
    # The path is short because the server's socket is in it.
    root = Path(tempfile.mkdtemp(prefix="pg-"))
    _give_away(root)
    server = PostgresServer(root)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(root)


@contextmanager
def postgres_server() -> Iterator[str]:
    """Run a server on a free loopback port; yield its SQLAlchemy URL."""
    with own_postgres() as server:
        yield server.url


def _run(*command: str) -> None:
    # Postgres refuses to run as root.
    user = _NOBODY if os.geteuid() == 0 else None
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user, cwd="/")


def _give_away(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, pwd.getpwnam(_NOBODY).pw_uid, -1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
