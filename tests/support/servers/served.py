"""The service as a separate process on a separate home, with a cluster that never answers: no Ray is started."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

import httpx

from tests.support.forks.service_forks import ForkedService
from tests.support.waiting import wait_for

NOBODY = "http://127.0.0.1:9"
SAID = re.compile(r"Trainshed listens on http://(127\.0\.0\.1|0\.0\.0\.0):(\d+) \(docs: /docs\)\n")


def environment_of(home: Path, **settings: str) -> dict[str, str]:
    """Return the environment of such a process."""
    own = {"TRAINSHED_HOME": str(home), "TRAINSHED_PORT": "0", "TRAINSHED_RAY_ADDRESS": NOBODY}
    return {**os.environ, **own, **settings}


@dataclass(frozen=True)
class Served:
    """A running process, and a client with its key."""

    process: subprocess.Popen[str] | ForkedService
    client: httpx.Client
    log: Path

    def ready(self) -> None:
        """Wait until its database is open; its preflight helper may still import its libraries."""
        wait_for(lambda: self.trouble() in (None, "preflight_starting"), "an open database", seconds=90)

    def takes_jobs(self) -> None:
        """Wait until the service is ready."""
        wait_for(lambda: self.trouble() is None, "a service that is ready", seconds=90)

    def trouble(self) -> str | None:
        """Return the reason why the service is not ready."""
        answer = self.client.get("/readyz")
        return None if answer.status_code == 200 else str(answer.json()["code"])


@contextmanager
def served(home: Path, *, files: int = 0, real: bool = False, **settings: Any) -> Iterator[Served]:
    """Start a service and kill it at the end. It may open `files` files; 0: as many as this process.

    With `real`, run `trainshed serve`; otherwise the service with a preflight helper that starts at once.
    """
    home.mkdir(exist_ok=True)
    log = home / "service.log"
    with log.open("a") as errors, _start(environment_of(home, **settings), errors, files, real) as process:
        try:
            assert process.stdout is not None
            line = SAID.fullmatch(process.stdout.readline())
            assert line is not None, log.read_text()
            key = Path(settings.get("TRAINSHED_ADMIN_KEY_FILE", home / "admin.key")).read_text().strip()
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=f"http://127.0.0.1:{line[2]}", headers=headers, timeout=60) as client:
                yield Served(process, client, log)
        finally:
            process.kill()


def ended(environment: dict[str, str]) -> tuple[int, str]:
    """Start a service that ends at once; return its exit code and its errors."""
    with TemporaryFile("w+") as errors, ForkedService(environment, errors) as process:
        code = process.wait(timeout=120.0)
        errors.seek(0)
        return code, errors.read()


def _start(
    environment: dict[str, str], errors: TextIO, files: int, real: bool
) -> "subprocess.Popen[str] | ForkedService":
    if not files and not real:
        return ForkedService(environment, errors)
    words = ["trainshed.cli.main", "serve"] if real else ["tests.support.servers.quick_service"]
    command = [sys.executable, "-m", *words]
    if files:
        command = ["/bin/sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
