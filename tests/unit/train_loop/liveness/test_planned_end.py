"""The planned end of a head: each driver is asked once to save, and Ray ends when none is left."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.builders.specs import spec
from tests.support.waiting import wait_for
from train_loop.liveness.leave import ask_to_leave
from train_loop.liveness.planned_end import REASON, Asker, Driver, await_end, command_lines, drivers_in
from train_loop.run_dir import RunDir, Stop

ASKED = ["python", "-m", "train_loop.ray_train.driver", "--run-dir", "file:///r/a b", "--attempt", "2"]


def test_drivers_are_recognized_by_their_command_line() -> None:
    shell = ["/bin/sh", "-c", " ".join(ASKED)]
    others = [[], ["python"], ["python", "-m", "train_loop.ray_train.driver"], shell, ASKED[:-1], [*ASKED[:-1], "two"]]
    assert drivers_in([*others, ASKED]) == {Driver("file:///r/a b", 2)}


@pytest.mark.parametrize(
    "user", [None, pytest.param(65534, marks=pytest.mark.skipif(os.geteuid() != 0, reason="root"))]
)
def test_processes_of_this_user_or_of_one_head_are_found(user: int | None) -> None:
    wait, own = ["/bin/sh", "-c", "echo; read line", *ASKED[2:]], os.environ | {"HEAD": "a"}
    process = subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user, env=own)
    assert process.stdout is not None
    try:
        # Before its first line, the process may still have this process's command line.
        process.stdout.readline()
        for mark in (None, b"HEAD=a"):
            assert (Driver("file:///r/a b", 2) in drivers_in(command_lines(mark=mark))) == (user is None)
        assert Driver("file:///r/a b", 2) not in drivers_in(command_lines(mark=b"HEAD=b"))
    finally:
        process.kill()
        process.communicate()
    assert Driver("file:///r/a b", 2) not in drivers_in(command_lines())


def test_request_of_the_service_stays_and_gets_the_reason(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.write_spec(spec())
    ask_to_leave(run_dir, 2, reason=REASON, deadline=100.0)
    assert run_dir.stop(attempt=2) == Stop(mode="pause", deadline=100.0, attempt=2, reason=REASON)
    for own in (Stop(mode="cancel", deadline=50.0, attempt=2), Stop(mode="pause", checkpoint=False, attempt=2)):
        run_dir.write_stop(own)
        for _ in range(2):
            ask_to_leave(run_dir, 2, reason=REASON, deadline=100.0)
            assert run_dir.stop(attempt=2) == own.model_copy(update={"reason": REASON})
    # A request to an earlier attempt is over.
    ask_to_leave(run_dir, 3, reason=REASON)
    later = Stop(mode="pause", attempt=3, reason=REASON)
    assert run_dir.stop(attempt=3) == later
    ask_to_leave(run_dir, 2, reason="its host is shut down")
    assert run_dir.stop() == later


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_QUIET_SECONDS", "_AGAIN_SECONDS"):
        monkeypatch.setattr(f"train_loop.liveness.planned_end.{name}", 0.05)
    monkeypatch.setattr("train_loop.liveness.planned_end._POLL_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
def test_late_drivers_are_asked_too_and_a_hanging_request_delays_no_other() -> None:
    first, late = Driver("a", 1), Driver("b", 1)
    asked = list[Driver]()
    polls = iter([{first}, {first}, {first, late}, {late}, set(), set()])

    def ask(driver: Driver) -> None:
        asked.append(driver)
        if driver == first:
            time.sleep(60)

    assert Asker(lambda: next(polls, set()), ask).wait(30) == set()
    assert sorted(set(asked)) == [first, late]
    assert asked.count(first) == 1


@pytest.mark.usefixtures("quick")
def test_driver_is_asked_until_it_has_ended() -> None:
    """Storage may be away for a moment, and a request of the service may replace the head's."""
    asked = list[float]()

    def ask(_: Driver) -> None:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise TimeoutError("storage does not answer")

    left = {Driver("a", 1)}
    asker = Asker(lambda: left, ask)
    assert asker.wait(0.1) == left
    wait_for(lambda: len(asked) >= 3, "repeated requests")
    left = set()
    asker.look()
    time.sleep(0.1)
    count = len(asked)
    time.sleep(0.1)
    assert len(asked) == count


@pytest.mark.usefixtures("quick")
def test_driver_that_starts_while_ray_ends_is_asked(tmp_path: Path) -> None:
    asked = list[Driver]()
    polls = iter([set[Driver](), {Driver("late", 1)}])

    def ask(driver: Driver) -> None:
        asked.append(driver)
        (tmp_path / "asked").touch()

    asker = Asker(lambda: next(polls, set()), ask)
    asker.look()
    ray = subprocess.Popen(["sh", "-c", f"until [ -e {tmp_path}/asked ]; do sleep 0.02; done; exit 3"])
    assert await_end(ray, asker) == 3
    assert set(asked) == {Driver("late", 1)}


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_head_ends_after_its_drivers_or_by_itself(tmp_path: Path, number: signal.Signals | None) -> None:
    """The driver is a process that ends once it is asked; the head notes its own end, and what the driver found."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.write_spec(spec())
    stop = run_dir.stop_file
    driver = f"import os, time\nwhile not os.path.exists({str(stop)!r}): time.sleep(0.05)\nprint('asked')"
    line = [sys.executable, "-c", driver, *ASKED[1:3], "--run-dir", str(run_dir.root), "--attempt", "2"]
    ends = "exit 5" if number is None else "while sleep 0.1; do :; done"
    (tmp_path / "head").write_text(
        f"trap 'echo $RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S; exit 5' TERM; {shlex.join(line)} & echo up; {ends}"
    )
    command = [sys.executable, "-m", "train_loop.liveness.planned_end", "--seconds", "30", "--", "sh"]
    process = subprocess.Popen([*command, str(tmp_path / "head")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    if number is not None:
        # A second signal changes nothing.
        for _ in range(2):
            process.send_signal(number)
        assert process.stdout.read() == "asked\n0\n"
        found = run_dir.stop(attempt=2)
        assert found is not None
        assert found.reason == REASON
    else:
        run_dir.write_stop(Stop(mode="pause"))
    assert process.wait(timeout=30) == 5
    process.stdout.close()


def test_command_ends_ray_after_the_drivers(tmp_path: Path) -> None:
    """Ray's command stands next to the interpreter; here a script in its place."""
    (tmp_path / "ray").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n')
    (tmp_path / "ray").chmod(0o755)
    code = (
        f"import sys; sys.executable = {str(tmp_path / 'python')!r}; from train_loop.liveness import planned_end as p; "
    )
    code += "p.command_lines = lambda **_: []; sys.exit(p.main())"
    subprocess.run([sys.executable, "-c", code, "--seconds", "5"], check=True, env={**os.environ}, timeout=60)
    assert (tmp_path / "called").read_text() == "stop --force\n"
