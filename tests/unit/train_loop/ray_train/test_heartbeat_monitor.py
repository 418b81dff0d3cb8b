"""The monitor of worker groups, with a simulated clock."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.waiting import wait_for
from train_loop.liveness.heartbeat import Beat, Phase
from train_loop.ray_train.heartbeat_monitor import GroupMonitor

HOSTS = {0: "node1", 1: "node1", 2: "node2", 3: "node2"}


@dataclass
class World:
    """A monitor, its reports, and the cluster that it queries."""

    now: float = 100.0
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.monitor = GroupMonitor(
            "127.0.0.1", self.report, self, own_host="head", storage="/srv/runs", clock=lambda: self.now
        )

    def report(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def declare_lost(self, host: str) -> None:
        self.lost.append(host)

    def answers(self, host: str) -> bool:
        return host not in self.dead

    def run(self, seconds: float, *silent: int, stopped: int | None = None) -> None:
        """Advance time in half seconds; all ranks but the silent ones send heartbeats."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for rank in HOSTS.keys() - set(silent):
                self.monitor.record(Beat(rank, 1, 7, Phase.TRAIN, 0.0, stopped=rank == stopped))
            self.monitor.tick()

    def run_without_storage(self, seconds: float, *ranks: int) -> None:
        """Advance time without progress while storage does not answer some ranks."""
        for number in range(int(seconds * 2)):
            self.now += 0.5
            for rank in HOSTS:
                away = number / 2 if rank in ranks else 0.0
                self.monitor.record(Beat(rank, 1, 7, Phase.SAVE, 0.0, storage_seconds=away, storage_errno=errno.EROFS))
            self.monitor.tick()

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.monitor.begin(1, HOSTS)
    made.run(2)
    yield made
    made.monitor.close()


def test_silent_host_is_reported_then_declared_lost(world: World) -> None:
    world.run(4, 2, 3)
    assert world.names() == []
    world.run(2, 2, 3)
    assert world.events == [("host_silent", {"host": "node2", "seconds": 5.5})]
    world.run(6, 2, 3)
    assert world.names() == ["host_silent", "host_lost"]
    assert wait_for(lambda: world.lost, "the host to be declared lost") == ["node2"]


def test_host_frozen_for_five_seconds_is_not_declared_lost(world: World) -> None:
    world.run(5, 2, 3)
    world.run(30)
    assert world.names() == []
    assert world.lost == []


def test_silence_ends_when_the_host_is_heard_again(world: World) -> None:
    world.run(7, 2, 3)
    world.run(1)
    assert world.names() == ["host_silent", "progressing"]
    assert world.lost == []


def test_simultaneous_silence_of_several_hosts_declares_none_lost(world: World) -> None:
    world.run(30, 0, 1, 2, 3)
    assert "host_lost" not in world.names()


def test_silence_of_the_only_other_host_counts(world: World) -> None:
    world.monitor.begin(1, {0: "head", 1: "node1"})
    world.run(1, 2, 3)
    world.run(12, 1, 2, 3)
    assert "host_lost" in world.names()


def test_time_in_which_the_monitor_did_not_run_declares_no_host_lost(world: World) -> None:
    world.now += 60
    world.monitor.tick()
    world.run(3)
    assert world.names() == []


def test_host_with_unanswered_storage_is_reported_instead_of_a_stall(world: World) -> None:
    world.run_without_storage(20, 2)
    ((name, fields),) = world.events
    assert (name, fields["hosts"], fields["root"]) == ("storage_unavailable", ["node2"], "/srv/runs")
    assert fields["error"] == "Read-only file system"
    assert world.monitor.hosts_without_storage() == {"node2"}
    world.run(1)
    assert world.names() == ["storage_unavailable", "storage_available"]


def test_failure_is_reported_once_with_the_silent_host(world: World) -> None:
    world.run(1, 2, 3)
    world.monitor.failed({0: "Connection reset", 1: "Connection reset"}, {}, stacks=["a"])
    world.run(6, 2, 3)
    world.monitor.failed({0: "again"}, {})
    world.run(2, 2, 3)
    (loss,) = [fields for name, fields in world.events if name == "workers_lost"]
    assert (loss["ranks"], loss["hosts"], loss["stacks"]) == ((2, 3), ("node2",), ["a"])
    assert loss["error"] == "host node2 was lost (ranks 2 and 3)"
    assert loss["survivors"] == "ranks 0 and 1 reported: Connection reset"


@pytest.mark.parametrize("seconds", [4, 12], ids=["before a stall is reported", "after"])
def test_timeout_is_a_hang_of_the_rank_that_was_waited_for(world: World, seconds: float) -> None:
    world.run(seconds, stopped=3)
    world.monitor.failed({0: "RuntimeError: Timed out waiting 10000ms for send operation to complete"}, {})
    world.run(5, stopped=3)
    (loss,) = [fields for name, fields in world.events if name == "workers_lost"]
    assert (loss["cause"], loss["ranks"], loss["hosts"]) == ("hung", (3,), ("node2",))
    assert loss["error"].endswith("waited for rank 3 until the timeout; rank 3 on node2 is stopped (SIGSTOP)")


def test_unresponsive_host_is_the_cause_if_ray_loses_its_ranks(world: World) -> None:
    world.dead.add("node2")
    world.run(1, 2, 3)
    world.monitor.failed({}, {2: "the actor is unavailable", 3: "the actor is unavailable"})
    world.run(1, 2, 3)
    assert "workers_lost" not in world.names()
    world.monitor.closing()
    world.monitor.lost_hosts()
    world.run(1, 2, 3)
    (loss,) = [fields for name, fields in world.events if name == "workers_lost"]
    assert (loss["cause"], loss["hosts"]) == ("host_lost", ("node2",))


def test_controller_that_hears_no_host_is_the_disconnected_one(world: World) -> None:
    world.run(12, 0, 1, 2, 3)
    world.monitor.failed({}, dict.fromkeys(HOSTS, "the actor died"))
    world.run(1, 0, 1, 2, 3)
    (loss,) = [fields for name, fields in world.events if name == "workers_lost"]
    assert (loss["error"], loss["cause"]) == ("host head was disconnected from node1, node2", "host_lost")
    assert world.lost == []


def test_own_host_is_never_declared_lost() -> None:
    made = World()
    made.monitor.begin(1, {0: "head", 1: "node1"})
    for rank in (0, 1):
        made.monitor.record(Beat(rank, 1, 7, Phase.TRAIN, 0.0))
    for _ in range(40):
        made.now += 0.5
        made.monitor.record(Beat(1, 1, 7, Phase.TRAIN, 0.0))
        made.monitor.tick()
    made.monitor.close()
    assert (made.lost, made.names()) == ([], ["stalled"])


def test_rank_death_is_reported_at_once(world: World) -> None:
    world.monitor.record(Beat(2, 1, 7, Phase.START, 0.0, ended=True, status=9))
    assert world.monitor.died(0.0)


def test_failure_names_the_rank_that_ended_before_the_group_closed(world: World) -> None:
    world.monitor.record(Beat(2, 1, 7, Phase.TRAIN, 0.0, ended=True, status=9))
    world.monitor.failed({0: "Connection reset"}, {2: "the actor died"})
    world.monitor.closing()
    # Ray terminates the survivors, which is not reported.
    world.monitor.record(Beat(0, 1, 7, Phase.TRAIN, 0.0, ended=True, status=9))
    world.run(1, 0, 2)
    (loss,) = [fields for name, fields in world.events if name == "workers_lost"]
    assert (loss["ranks"], loss["error"]) == ((2,), "rank 2 on node2 was killed by signal 9 (SIGKILL)")


def test_cause_is_known_if_ray_finds_a_dead_rank_before_its_last_heartbeat(world: World) -> None:
    world.monitor.failed({0: "Connection reset"}, {2: "the actor died"})
    world.monitor.closing()
    world.monitor.record(Beat(2, 1, 7, Phase.TRAIN, 0.0, ended=True, status=9, out_of_memory=True))
    world.monitor.await_cause(0.0)
    world.monitor.begin(2, HOSTS)
    assert world.names() == ["out_of_memory", "workers_lost"]
    assert world.events[1][1]["error"].startswith("rank 2 on node2 was killed by the kernel")


def test_oom_killed_rank_is_reported_at_once_and_once(world: World) -> None:
    for _ in range(3):
        world.monitor.record(Beat(2, 1, 7, Phase.TRAIN, 0.0, ended=True, status=9, out_of_memory=True))
    (event,) = world.events
    assert event[0] == "out_of_memory"
    assert (event[1]["rank"], event[1]["host"], event[1]["memory"]) == (2, "node2", "host")
    world.monitor.failed({0: "Connection reset"}, {2: "the actor died"})
    world.monitor.closing()
    world.monitor.record(Beat(0, 1, 7, Phase.TRAIN, 0.0, ended=True, status=9, out_of_memory=True))
    world.run(1, 0, 2)
    (loss,) = [fields for name, fields in world.events if name == "workers_lost"]
    assert (loss["ranks"], loss["cause"]) == ((2,), "out_of_memory")
    assert world.names().count("out_of_memory") == 1


def test_unexplained_failure_is_reported_before_the_next_group_starts(world: World) -> None:
    world.monitor.failed({3: "ValueError: no"}, {})
    world.monitor.begin(2, HOSTS)
    assert [fields["error"] for name, fields in world.events if name == "workers_lost"] == ["rank 3: ValueError: no"]


def test_stalled_ranks_are_reported_once_and_cleared(world: World) -> None:
    world.run(14, stopped=3)
    (stalled,) = [fields for name, fields in world.events if name == "stalled"]
    assert (stalled["waiting"], stalled["for"], stalled["hosts"], stalled["step"]) == ((0, 1, 2), (3,), ["node2"], 7)
    assert stalled["phase"] == "train"
    world.run(2)
    assert world.names()[-1] == "progressing"


def test_stall_is_reported_again_if_other_ranks_block(world: World) -> None:
    # Rank 2's heartbeat is late as well when the stall is found.
    world.run(9, 2, stopped=3)
    world.run(10, stopped=3)
    assert [fields["for"] for name, fields in world.events if name == "stalled"] == [(2, 3), (3,)]
    assert world.names() == ["stalled", "stalled"]


def test_group_without_capacity_is_reported_once_after_five_seconds(world: World) -> None:
    world.monitor.placing()
    for _ in range(3):
        world.run(4)
        world.monitor.lacking("2 CPU", left=["node2"])
        # Ray Train retries.
        world.monitor.placing()
    assert world.names() == ["waiting_for_capacity"]
    assert (world.events[0][1]["missing"], world.events[0][1]["left"]) == ("2 CPU", ["node2"])


def test_changed_lack_of_capacity_is_reported_again_after_thirty_seconds(world: World) -> None:
    world.monitor.placing()
    for seconds, missing in ((6, "room for 0"), (10, "room for 2"), (25, "room for 2"), (60, "room for 2")):
        world.run(seconds)
        world.monitor.lacking(missing, left=[])
    assert [fields["missing"] for _, fields in world.events] == ["room for 0", "room for 2"]
    assert world.events[0][1]["since"] == world.events[1][1]["since"]
    world.monitor.begin(2, HOSTS)
    world.monitor.placing()
    world.run(6)
    world.monitor.lacking("room for 2", left=[])
    assert world.names() == 3 * ["waiting_for_capacity"]


def test_group_with_starting_processes_has_capacity(world: World) -> None:
    world.monitor.placing()
    world.run(30)
    assert world.names() == []


def test_hosts_of_a_closed_group_are_not_declared_lost(world: World) -> None:
    world.monitor.closing()
    world.run(30, 0, 1, 2, 3)
    assert world.names() == []


def test_host_that_does_not_answer_after_a_failure_is_lost(world: World) -> None:
    world.dead = {"node2"}
    world.monitor.failed({0: "Connection reset"}, {})
    world.monitor.closing()
    assert world.monitor.lost_hosts() == {"node2"}
    world.run(1, 0, 1, 2, 3)
    (loss,) = [fields for name, fields in world.events if name == "workers_lost"]
    assert loss["error"] == "host node2 was lost (ranks 2 and 3, it does not answer)"
    assert wait_for(lambda: world.lost, "the host to be declared lost") == ["node2"]


def test_hosts_are_not_lost_if_none_answers_after_a_failure(world: World) -> None:
    world.dead = {"node1", "node2"}
    world.monitor.failed({0: "Connection reset"}, {})
    world.monitor.closing()
    assert world.monitor.lost_hosts() == set()
