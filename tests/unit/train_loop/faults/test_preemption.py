"""Saves and moves of a run after a preemption notice."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from train_loop.data.stream.local import local_stream
from train_loop.faults.preemption import PreemptionWatch
from train_loop.loop.session import Preemption, Session
from train_loop.run_dir import RunDir, read_lines

DEADLINE = 1030.0


@dataclass
class World:
    """A session of one rank, its clocks, and a simulated Ray cluster."""

    session: Session
    now: float = 0.0
    notice: Preemption | None = None
    room: bool = False

    def watch(self) -> PreemptionWatch:
        session = replace(self.session, preemption=lambda: self.notice, may_move=lambda: self.room)
        return PreemptionWatch(session, clock=lambda: self.now, wall_clock=lambda: 1000.0 + self.now)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Session(rank=0, world=1, local_rank=0, attempt=1, run_dir=RunDir(tmp_path), open_stream=local_stream))


def noticed(world: World) -> PreemptionWatch:
    watch = world.watch()
    world.notice = Preemption((2, 3), DEADLINE)
    assert watch.sees_news()
    return watch


def test_notice_is_reported_once_as_an_event(world: World) -> None:
    assert not noticed(world).sees_news()
    (event,) = read_lines(world.session.run_dir.attempt(1).events)
    assert (event["event"], event["ranks"], event["deadline"]) == ("preemption_notice", [2, 3], DEADLINE)


def test_run_without_a_notice_neither_moves_nor_saves(world: World) -> None:
    watch, world.room, world.now = world.watch(), True, 100.0
    assert not watch.wants_to_move()
    assert not watch.wants_last_save()


def test_run_moves_once_other_hosts_have_capacity(world: World) -> None:
    watch = noticed(world)
    world.now = 3.0
    assert not watch.wants_to_move()
    world.room = True
    assert not watch.wants_to_move(), "expected one query every two seconds"
    world.now = 6.0
    assert watch.wants_to_move()


@pytest.mark.parametrize(
    ("step", "left"), [(0.25, 3.0), (1.0, 3.0), (2.0, 2.0), (4.0, 2.0), (5.0, 5.0), (7.0, 2.0), (20.0, 10.0)]
)
def test_run_without_capacity_saves_once_before_the_deadline(world: World, step: float, left: float) -> None:
    """`left`: seconds before the deadline of 30 s at which the save begins, after a step since the last check."""
    watch = noticed(world)
    saves = []
    for number in range(-3, int(40 / step)):
        world.now = number * step
        if watch.wants_last_save():
            saves.append(30.0 - (world.now + step))
    assert saves == [left]


def test_run_with_a_notice_without_a_deadline_saves_once(world: World) -> None:
    watch = world.watch()
    world.notice = Preemption((2,), None)
    watch.sees_news()
    world.now = 500.0
    assert not watch.wants_last_save()
