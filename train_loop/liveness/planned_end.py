"""`python -m train_loop.liveness.planned_end --seconds N [-- COMMAND]`: the planned end of a cluster's head.

Every driver of the head is asked to save and to end; then Ray's processes are ended, so that no driver starts any more.
The preStop hook of the head's pod runs this: Kubernetes ends a pod for an upgrade, or to drain its node. Under Docker
and systemd this process runs `ray start` as COMMAND, and ends it this way on SIGTERM.
"""

import argparse
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from train_loop.run_dir import RunDir, Stop
from train_loop.system.signals import SignalPipe

log = logging.getLogger(__name__)
REASON = "the head of Ray ends as planned: it is upgraded, restarted or stopped, or its node is drained"
_DRIVER = "train_loop.ray_train.driver"
_POLL_SECONDS = 0.2
_QUIET_SECONDS = 1.0
"""Seconds without a driver after which the head may end: one may be about to start."""
_MARK_VARIABLE = "TRAINSHED_HEAD"
_HEAD_SECONDS = 1.0
"""Seconds between two looks at the head's process."""


class Driver(NamedTuple):
    """A running driver: the run directory and the number of its attempt."""

    run_dir: str
    attempt: int


def drivers_in(command_lines: Iterable[list[str]]) -> set[Driver]:
    """Return the drivers among command lines."""
    found = set[Driver]()
    for words in command_lines:
        values = dict(itertools.pairwise(words))
        run_dir, attempt = values.get("--run-dir"), values.get("--attempt", "")
        if _DRIVER in words and run_dir and attempt.isdecimal():
            found.add(Driver(run_dir, int(attempt)))
    return found


def command_lines(proc: Path = Path("/proc"), *, mark: bytes | None = None) -> Iterator[list[str]]:
    """Yield the command line of every process of this user, or of those with a mark in their environment.

    Other users may imitate a driver, to have a file written.
    """
    for file in proc.glob("[0-9]*/cmdline"):
        try:
            own = file.stat().st_uid == os.geteuid()
            if own and (mark is None or mark in file.with_name("environ").read_bytes()):
                yield file.read_text(errors="replace").split("\0")
        except OSError:
            # The process has ended meanwhile.
            continue


def ask_to_leave(driver: Driver, deadline: float) -> None:
    """Ask an attempt to save and end, unless the service has asked it to stop."""
    run_dir = RunDir.at(driver.run_dir)
    if run_dir.stop(attempt=driver.attempt) is None:
        run_dir.write_stop(Stop(mode="pause", deadline=deadline, attempt=driver.attempt, reason=REASON))


def wait_for_drivers(find: Callable[[], set[Driver]], ask: Callable[[Driver], None], *, seconds: float) -> set[Driver]:
    """Ask each driver once, also new ones, until none is left or the time is over. Return those that are left."""
    asked = set[Driver]()
    end = quiet = time.monotonic()
    end += seconds
    while True:
        left = find()
        for driver in left - asked:
            # Storage of one job may hang.
            threading.Thread(target=_logged, args=(ask, driver), name="ask", daemon=True).start()
        asked |= left
        now = time.monotonic()
        quiet = now if left else quiet
        if now >= end or now - quiet >= _QUIET_SECONDS:
            return left
        time.sleep(_POLL_SECONDS)


def _logged(ask: Callable[[Driver], None], driver: Driver) -> None:
    try:
        ask(driver)
    except Exception as error:
        log.warning("attempt %d of %s could not be asked to save: %s", driver.attempt, driver.run_dir, error)


def let_drivers_end(seconds: float, *, mark: bytes | None = None) -> set[Driver]:
    """Let all drivers save and end, or those with a mark in their environment. Return those that did not in time."""
    deadline = time.time() + seconds
    left = wait_for_drivers(
        lambda: drivers_in(command_lines(mark=mark)), lambda driver: ask_to_leave(driver, deadline), seconds=seconds
    )
    for driver in left:
        log.warning("attempt %d of %s did not end within %g s", driver.attempt, driver.run_dir, seconds)
    return left


def run_head(command: list[str], seconds: float) -> int:
    """Run the head's command until it ends; after a signal, once its drivers have saved. Return its exit code."""
    signals, mark = SignalPipe(), uuid.uuid4().hex
    # Drivers inherit the mark: this machine may run another head. The head's own drain would only wait for drivers.
    own = {_MARK_VARIABLE: mark, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    head = subprocess.Popen(command, env=os.environ | own)
    while head.poll() is None:
        if signals.wait(_HEAD_SECONDS) is not None:
            let_drivers_end(seconds, mark=f"{_MARK_VARIABLE}={mark}".encode())
            head.terminate()
            return head.wait()
    return head.returncode


def main() -> int:
    """Let all drivers save and end, then end Ray. Return 1 if a driver did not end in time."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.liveness.planned_end", description=__doc__)
    parser.add_argument("--seconds", required=True, type=float, metavar="N")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="the head's command, which runs until SIGTERM")
    arguments = parser.parse_args()
    if arguments.command:
        return run_head(arguments.command, arguments.seconds)
    left = let_drivers_end(arguments.seconds)
    subprocess.run([str(Path(sys.executable).with_name("ray")), "stop", "--force"], check=False)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
