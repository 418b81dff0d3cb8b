"""Conclusions from heartbeats about hosts and ranks."""

import pytest

from train_loop.faults.ray_reports import TERMINATED
from train_loop.liveness.group import Liveness, how_ended
from train_loop.liveness.heartbeat import Beat, Phase
from train_loop.ray_train.group_failure import Evidence, explain

HOSTS = {0: "node1", 1: "node1", 2: "node2", 3: "node2"}


def beat(rank: int, *, step: int = 1, phase: Phase = Phase.TRAIN, epoch: int = 1, stopped: bool = False) -> Beat:
    return Beat(rank, epoch, step, phase, 0.0, stopped=stopped)


def group(*, at: float = 0.0, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Liveness:
    found = Liveness(1, HOSTS)
    for rank in ranks:
        found.record(beat(rank), at)
    return found


def test_host_silence_is_that_of_its_last_rank() -> None:
    found = group()
    found.record(beat(2), 6.0)
    assert found.silence(10.0) == {"node1": 10.0, "node2": 4.0}
    assert found.late_hosts(10.0, seconds=3.0) == {"node1", "node2"}


def test_host_silence_is_unknown_if_a_rank_sent_no_heartbeat() -> None:
    assert group(ranks=(0, 1, 2)).silence(10.0) == {"node1": 10.0}


def test_heartbeats_of_another_group_are_ignored() -> None:
    found = group()
    found.record(beat(0, epoch=2), 9.0)
    assert found.silence(10.0)["node1"] == 10.0


def test_time_without_a_running_listener_is_not_silence() -> None:
    found = group()
    found.skip(8.0, 10.0)
    assert found.silence(10.0) == {"node1": 2.0, "node2": 2.0}


def test_stall_names_the_stopped_rank_that_blocks_others() -> None:
    found = group()
    for second in range(1, 13):
        for rank in HOSTS:
            found.record(beat(rank, stopped=rank == 3), float(second))
    stall = found.stall(12.0, seconds=10.0)
    assert stall is not None
    assert (stall.waiting, stall.behind, stall.step, stall.phase) == ((0, 1, 2), (3,), 1, Phase.TRAIN)
    assert stall.reason == "rank 3 on node2 is stopped (SIGSTOP)"
    for rank in HOSTS:
        found.record(beat(rank, stopped=True), 13.0)
    everywhere = found.stall(13.0, seconds=10.0)
    assert everywhere is not None
    assert (everywhere.waiting, everywhere.behind) == ((), (0, 1, 2, 3))


def test_stall_names_the_rank_that_still_reads_data() -> None:
    found = group()
    for second in range(1, 13):
        for rank in HOSTS:
            phase = Phase.DATA if rank == 0 else Phase.AGREE
            found.record(beat(rank, step=2, phase=phase), float(second))
    stall = found.stall(12.0, seconds=10.0)
    assert stall is not None
    assert (stall.behind, stall.reason) == ((0,), "rank 0 on node1 is reading data")


def test_stall_names_the_silent_host() -> None:
    found = group()
    for second in range(1, 13):
        for rank in (0, 1):
            found.record(beat(rank), float(second))
    stall = found.stall(12.0, seconds=10.0)
    assert stall is not None
    assert stall.behind == (2, 3)
    assert "rank 2 on node2 has sent no heartbeat for 12 s" in stall.reason


def test_ranks_that_all_compute_are_not_stalled() -> None:
    found = group()
    for second in range(1, 60):
        for rank in HOSTS:
            found.record(beat(rank), float(second))
    assert found.stall(59.0, seconds=10.0) is None


def test_ranks_are_not_stalled_if_one_makes_progress() -> None:
    found = group()
    for second in range(1, 13):
        for rank in HOSTS:
            found.record(beat(rank, step=second if rank == 0 else 1), float(second))
    assert found.stall(12.0, seconds=10.0) is None


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (9, "was killed by signal 9 (SIGKILL)"),
        (11 | 0x80, "was killed by signal 11 (SIGSEGV)"),
        (3 << 8, "exited with code 3"),
        (None, "ended without an error, as after SIGKILL"),
    ],
)
def test_how_ended_reads_a_wait_status(status: int | None, text: str) -> None:
    assert how_ended(ended(status)) == text


def ended(status: int | None, *, out_of_memory: bool = False) -> Beat:
    return Beat(2, 1, 7, Phase.TRAIN, 0.0, ended=True, status=status, out_of_memory=out_of_memory)


def test_explain_distinguishes_an_oom_kill() -> None:
    how = how_ended(ended(9, out_of_memory=True))
    loss = explain(Evidence(HOSTS, ended={2: how}, out_of_memory={2}, errors={0: "Connection reset"}))
    assert (loss.kind, loss.ranks) == ("out_of_memory", (2,))
    assert loss.cause == (
        "rank 2 on node2 was killed by the kernel because its host or container ran out of memory (SIGKILL)"
    )


def test_explain_names_the_lost_host_and_what_survivors_reported() -> None:
    loss = explain(
        Evidence(HOSTS, lost_hosts={"node2": "no heartbeat for 10 s"}, errors={0: "Connection reset", 1: "x"})
    )
    assert (loss.ranks, loss.hosts) == ((2, 3), ("node2",))
    assert loss.cause == "host node2 was lost (ranks 2 and 3, no heartbeat for 10 s)"
    assert loss.survivors == "ranks 0 and 1 reported: Connection reset"


def test_explain_names_the_killed_rank_and_its_signal() -> None:
    loss = explain(
        Evidence(HOSTS, ended={2: how_ended(ended(9))}, errors={0: "Connection reset"}, unreachable={2: "actor died"})
    )
    assert (loss.ranks, loss.hosts) == ((2,), ("node2",))
    assert loss.cause == "rank 2 on node2 was killed by signal 9 (SIGKILL)"


def test_explain_names_the_signal_that_a_worker_of_ray_turns_into_an_exit_code() -> None:
    loss = explain(Evidence(HOSTS, ended={2: "exited with code 1"}, unreachable={2: TERMINATED}))
    assert loss.cause == "rank 2 on node2 was terminated by signal 15 (SIGTERM)"


def test_explain_uses_the_report_of_ray_without_heartbeats() -> None:
    loss = explain(Evidence(HOSTS, unreachable={1: "died: its node has died"}))
    assert loss.cause == "rank 1 on node1 died: its node has died"
    assert loss.survivors is None


def test_explain_without_a_death_returns_the_error() -> None:
    loss = explain(Evidence(HOSTS, errors={3: "ValueError: no", 2: "ValueError: no"}))
    assert (loss.ranks, loss.cause) == ((2, 3), "rank 2: ValueError: no")


def test_repeated_and_late_datagrams_do_not_hide_a_silent_host() -> None:
    group = Liveness(1, {0: "a"})
    first, second = (beat(0)._replace(sent=sent) for sent in (5.0, 6.0))
    group.record(first, 100.0)
    group.record(second, 101.0)
    for now, again in ((110.0, first), (111.0, second)):
        group.record(again, now)
    assert group.silence(111.0) == {"a": 10.0}
    group.record(second._replace(sent=6.1), 112.0)
    assert group.silence(112.0) == {"a": 0.0}
