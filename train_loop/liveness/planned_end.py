"""`python -m train_loop.liveness.planned_end --seconds N [-- COMMAND]`: the planned end of a cluster's head.

Every driver of the head is asked to save and to end; then Ray's processes are ended, so that no driver starts any more.
Drivers that start meanwhile are asked too, until Ray has ended: an attempt that was asked does not count as failed.
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

from train_loop.liveness.leave import ask_to_leave
from train_loop.run_dir import RunDir
from train_loop.system.signals import SignalPipe

log = logging.getLogger("train_loop.liveness.planned_end")
REASON = "the head of Ray ends as planned: it is upgraded, restarted or stopped, or its node is drained"
_DRIVER = "train_loop.ray_train.driver"
_POLL_SECONDS = 0.2
_AGAIN_SECONDS = 1.0
"""Seconds between two requests to one driver."""
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


class Asker:
    """Asks the drivers of a head to leave, each in a separate thread: the storage of one job may hang."""

    def __init__(self, find: Callable[[], set[Driver]], ask: Callable[[Driver], None]) -> None:
        self._find, self._ask = find, ask
        self._left = set[Driver]()
        self._asked = set[Driver]()

    def look(self) -> set[Driver]:
        """Ask the drivers that are new, and return all that run."""
        self._left = self._find()
        for driver in self._left - self._asked:
            threading.Thread(target=self._keep_asking, args=(driver,), name="ask", daemon=True).start()
        self._asked |= self._left
        return self._left

    def _keep_asking(self, driver: Driver) -> None:
        """Ask until the driver has ended: a request of the service may replace this one, and storage may return."""
        while driver in self._left:
            try:
                self._ask(driver)
            except Exception as error:
                log.warning("attempt %d of %s could not be asked to save: %s", driver.attempt, driver.run_dir, error)
            time.sleep(_AGAIN_SECONDS)

    def wait(self, seconds: float) -> set[Driver]:
        """Wait until no driver is left or the time is over. Return the remaining drivers."""
        end = quiet = time.monotonic()
        end += seconds
        while True:
            left, now = self.look(), time.monotonic()
            quiet = now if left else quiet
            if now >= end or now - quiet >= _QUIET_SECONDS:
                return left
            time.sleep(_POLL_SECONDS)


def let_drivers_end(seconds: float, *, mark: bytes | None = None) -> Asker:
    """Let all drivers save and end, or those with a mark in their environment. Report those that did not in time."""
    deadline = time.time() + seconds

    def ask(driver: Driver) -> None:
        ask_to_leave(RunDir.at(driver.run_dir), driver.attempt, reason=REASON, deadline=deadline)

    asker = Asker(lambda: drivers_in(command_lines(mark=mark)), ask)
    for driver in asker.wait(seconds):
        log.warning("attempt %d of %s did not end within %g s", driver.attempt, driver.run_dir, seconds)
    return asker


def await_end(process: "subprocess.Popen[bytes]", asker: Asker) -> int:
    """Return the exit code of the process that ends Ray, or of Ray itself. Drivers that start meanwhile are asked."""
    while process.poll() is None:
        asker.look()
        time.sleep(_POLL_SECONDS)
    return process.returncode


def run_head(command: list[str], seconds: float) -> int:
    """Run the head's command until it ends; after a signal, once its drivers have saved. Return its exit code."""
    signals, mark = SignalPipe(), uuid.uuid4().hex
    # Drivers inherit the mark: this machine may run another head. The head's own drain would only wait for drivers.
    own = {_MARK_VARIABLE: mark, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    head = subprocess.Popen(command, env=os.environ | own)
    while head.poll() is None:
        if signals.wait(_HEAD_SECONDS) is not None:
            asker = let_drivers_end(seconds, mark=f"{_MARK_VARIABLE}={mark}".encode())
            head.terminate()
            return await_end(head, asker)
    return head.returncode


def main() -> int:
    """Let all drivers save and end, then end Ray. Return 1 if a driver did not end in time."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.liveness.planned_end", description=__doc__)
    parser.add_argument("--seconds", required=True, type=float, metavar="N")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="the head's command, which runs until SIGTERM")
    arguments = parser.parse_args()
    if arguments.command:
        return run_head(arguments.command, arguments.seconds)
    asker = let_drivers_end(arguments.seconds)
    left = asker.look()
    await_end(subprocess.Popen([str(Path(sys.executable).with_name("ray")), "stop", "--force"]), asker)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
