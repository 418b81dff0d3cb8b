"""The service of a home as a process: lookup, start in the background, log."""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil

from service.config.address import ServiceAddress, find_process
from service.config.settings import Settings
from train_loop.extras import install
from trainshed.cli.exit_codes import fail

_COMMAND = ("-m", "service.serve")
_SERVER = "uvicorn"
"""A library that only the extra `service` installs."""
_LAST_LINES = 15


def require_service() -> None:
    """Exit with a one-line error if this installation has the command but not the service."""
    if find_spec(_SERVER) is None:
        fail(f"the service is not installed here; run {install(_SERVER)}, or set TRAINSHED_URL to one")


@dataclass(frozen=True)
class Running:
    """A running service."""

    address: ServiceAddress
    process: psutil.Process

    def ready(self) -> bool:
        """Return True if the service accepts jobs."""
        try:
            return httpx.get(f"{self.address.url}/readyz", timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


def find_running(settings: Settings) -> Running | None:
    """Return the running service of this home, or None. service.json must name the service process that wrote it."""
    found = find_process(settings.address_file)
    try:
        return Running(*found) if found is not None and _serves(found[1].cmdline()) else None
    except psutil.Error:
        return None


def _serves(command: list[str]) -> bool:
    return any(command[place : place + len(_COMMAND)] == [*_COMMAND] for place in range(len(command)))


class Log:
    """home/service.log: output of services that were started in the background."""

    def __init__(self, settings: Settings) -> None:
        self.path: Path = settings.home / "service.log"
        self._begin = self.path.stat().st_size if self.path.exists() else 0

    def last_lines(self) -> list[str]:
        """Return the last lines written since this object was created."""
        with self.path.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]


def start(log: Log) -> "subprocess.Popen[bytes]":
    """Start a service in a new session, so that it outlives the terminal."""
    descriptor = os.open(log.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, *_COMMAND],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
