"""A real Postgres for the length of a test, from the binaries on this machine."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = "nobody"


@contextmanager
def postgres_server() -> Iterator[str]:
    """A server on a free loopback port; its SQLAlchemy URL."""
    # Short, because its socket lies in it.
    root = Path(tempfile.mkdtemp(prefix="pg-"))
    _give_away(root)
    data, port = root / "data", _free_port()
    _run("initdb", "-D", str(data), "-U", "shed", "--auth=trust", "--no-sync")
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {root} -c fsync=off"
    _run("pg_ctl", "-D", str(data), "-l", str(root / "log"), "-o", options, "-w", "start")
    try:
        yield f"postgresql+psycopg://shed@127.0.0.1:{port}/postgres"
    finally:
        _run("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(root)


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
