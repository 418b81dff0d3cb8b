"""`trainshed up`, `down` and `serve`: the service on this machine."""

import os
import subprocess
import sys
import time
from typing import Annotated

import psutil
import typer
from pydantic import BaseModel

from service.config.settings import Settings
from train_loop.code.cleanup import remove_unused
from train_loop.code.package import code_home
from trainshed.cli.connect import load_settings
from trainshed.cli.exit_codes import fail
from trainshed.cli.options import AsJson
from trainshed.cli.output.printing import notes, show_json, show_next, show_note, show_text
from trainshed.cli.process import Log, Running, find_running, require_service, start

_POLL_SECONDS = 0.1
_DOWN_SECONDS = 15.0
"""Time limit for the service to exit, in addition to the time that its jobs may take to save."""


class Up(BaseModel):
    """Result of `up`: the service in the background."""

    url: str
    pid: int
    home: str
    log: str
    started: bool
    """False if the service was already running."""


class Down(BaseModel):
    """Result of `down` for the service of a home."""

    home: str
    pid: int | None
    stopped: bool
    """False if no service was running."""


def serve() -> None:
    """Run the service in the foreground until SIGTERM or SIGINT."""
    require_service()
    # Replaces this process, so that signals reach the service. Other commands need not load Ray.
    os.execv(sys.executable, [sys.executable, "-m", "service.serve"])


def up(
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="seconds to wait until the service accepts jobs")
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Start the service in the background unless it is already running.

    Exits with 1 if the running service has other settings than this command, and names them.
    """
    config = load_settings()
    found = find_running(config)
    if found is None:
        require_service()
    running = found or _start(config, wait)
    _check_settings(running, config)
    answer = Up(
        url=running.address.url,
        pid=running.address.pid,
        home=str(config.home),
        log=str(Log(config).path),
        started=found is None,
    )
    if as_json:
        show_json(answer)
        return
    show_text(answer.url)
    show_note(f"the service {'listens' if answer.started else 'runs already'} (pid {answer.pid}); log: {answer.log}")
    show_next("doctor" if answer.started else "ps")


def down(as_json: AsJson = False) -> None:
    """Stop the service and its embedded Ray. Jobs resume when the service is started again."""
    config = load_settings()
    running = find_running(config)
    answer = Down(home=str(config.home), pid=running.address.pid if running else None, stopped=running is not None)
    if running is not None:
        _stop(running, _DOWN_SECONDS + config.stop_seconds)
        remove_unused(code_home(), keep=0)
    if as_json:
        show_json(answer)
        return
    show_text(f"the service (pid {answer.pid}) has ended" if running else f"no service runs on {config.home}")
    show_next("up")


def _check_settings(running: Running, config: Settings) -> None:
    """Exit with a line per setting that differs between the running service and the environment of this command."""
    different = running.address.settings.differences(config)
    if different:
        rule = f"the service (pid {running.address.pid}) already runs, with other settings"
        remedy = "restart it with `trainshed down` and `trainshed up`, or set these variables to its values"
        fail(f"{rule}; {remedy}:", different)


def _start(config: Settings, wait: float) -> Running:
    """Start a service and wait until it accepts jobs. Exits with a one-line error if it does not."""
    try:
        config.make_home()
        log = Log(config)
        child = start(log)
    except OSError as error:
        fail(f"{config.home}: {error.strerror}; set TRAINSHED_HOME to a folder that you may write to")
    deadline = time.monotonic() + wait
    with notes.status("starting the service"):
        while (running := find_running(config)) is None or not running.ready():
            if child.poll() is not None:
                return _another(config) or _give_up(child, log)
            if time.monotonic() > deadline:
                fail(
                    f"the service (pid {child.pid}) is not ready after {wait:g} s and is still starting; see {log.path}"
                )
            time.sleep(_POLL_SECONDS)
    return running


def _another(config: Settings) -> Running | None:
    """Return a ready service that another process has started in the meantime, or None."""
    running = find_running(config)
    return running if running is not None and running.ready() else None


def _give_up(child: "subprocess.Popen[bytes]", log: Log) -> Running:
    fail(f"the service ended with {child.returncode}; {log.path} ends with", log.last_lines())


def _stop(running: Running, seconds: float) -> None:
    try:
        running.process.terminate()
        with notes.status("stopping the service"):
            running.process.wait(timeout=seconds)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        fail(
            f"the service (pid {running.address.pid}) is still ending after {seconds:g} s; wait for it, or end "
            f"it by force, which leaves its Ray to the next one: kill -9 {running.address.pid}"
        )
