"""Warnings about the placement of ranks on hosts."""

from pathlib import Path

import pytest

from train_loop.loop.coordination import warn_of_hosts
from train_loop.plan import groups_across_hosts, plan_mesh
from train_loop.run_dir import AttemptDir, read_lines
from train_loop.telemetry.event_log import EventLog

MESH = plan_mesh(world=8, fsdp_size=4, ulysses_size=2)


@pytest.mark.parametrize(
    ("hosts", "split"),
    [
        ("aaaaaaaa", {}),
        ("aaaabbbb", {}),
        ("aaabbbbb", {range(2, 4): ("a", "b")}),
        ("abababab", {range(n, n + 2): ("a", "b") for n in (0, 2, 4, 6)}),
    ],
)
def test_ulysses_groups_across_hosts_are_found(hosts: str, split: dict[range, tuple[str, ...]]) -> None:
    assert groups_across_hosts(MESH, hosts) == split


def test_no_group_spans_hosts_without_ulysses() -> None:
    assert groups_across_hosts(plan_mesh(world=4, fsdp_size=0, ulysses_size=1), "abcd") == {}


@pytest.mark.parametrize(("hosts", "warnings"), [("aaaabbbb", 0), ("aaabbbba", 1)])
def test_warning_names_ranks_hosts_and_remedy(tmp_path: Path, hosts: str, warnings: int) -> None:
    attempt = AttemptDir(tmp_path, 1)
    warn_of_hosts(MESH, [{"rank": rank, "host": host} for rank, host in enumerate(hosts)], EventLog(attempt))
    messages = [line["message"] for line in read_lines(attempt.events) if line["event"] == "warning"]
    assert messages == warnings * [
        "Ulysses groups span several hosts, where their all-to-all is slow: ranks 2 and 3 on a, b; "
        "ranks 6 and 7 on b, a; give each host a multiple of ulysses_size=2 workers, or choose a smaller ulysses_size",
        "FSDP groups span several hosts, where their gathers of each layer are slow: ranks 0-3 on a, b; ranks 4-7 on "
        "b, a; fsdp_size: node shards inside hosts, if a worker has memory for larger shards",
    ]


def test_replicas_on_several_hosts_are_no_warning(tmp_path: Path) -> None:
    attempt, hosts = AttemptDir(tmp_path, 1), [f"host-{rank}" for rank in range(12)]
    mesh = plan_mesh(world=12, fsdp_size=0, ulysses_size=1, sharded=False)
    warn_of_hosts(mesh, [{"rank": rank, "host": host} for rank, host in enumerate(hosts)], EventLog(attempt))
    assert not attempt.events.exists()
    sharded = plan_mesh(world=12, fsdp_size=0, ulysses_size=1)
    warn_of_hosts(sharded, [{"rank": rank, "host": host} for rank, host in enumerate(hosts)], EventLog(attempt))
    (message,) = (line["message"] for line in read_lines(attempt.events))
    assert f"ranks 0-11 on {', '.join(hosts[:8])} and 4 more; " in message


def test_warnings_name_the_ranks_that_share_layers_and_sequences(tmp_path: Path) -> None:
    attempt, mesh = AttemptDir(tmp_path, 1), plan_mesh(world=4, fsdp_size=0, ulysses_size=2, tp_size=2)
    warn_of_hosts(mesh, [{"rank": rank, "host": host} for rank, host in enumerate("aabb")], EventLog(attempt))
    message, gathers = (line["message"] for line in read_lines(attempt.events) if line["event"] == "warning")
    assert "FSDP groups span several hosts" in gathers
    assert "Ulysses groups span several hosts, where their all-to-all is slow: ranks 0 and 2 on a, b; " in message
    assert "give each host a multiple of tp_size x ulysses_size=4 workers" in message
