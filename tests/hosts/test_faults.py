"""One job on several hosts, through one fault after another.

The hosts have different /etc/hosts files: with the real address of their name, with 127.0.1.1 as Debian has it, or
without the name.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from service.api.schemas import FindingOut, JobOut
from service.domain.doctor.finding import Verdict
from service.domain.jobs.job import JobState
from tests.support.hosts.host_cluster import HostCluster, host_cluster
from tests.support.hosts.hosts import Host
from tests.support.hosts.jobs import host_job
from tests.support.turns import turns
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(600)
_LINE = re.compile(r"(\d{4}-\d\d-\d\d[T ][\d:]{8})(?:[.,]\d+Z?)? (.*)")
"""A log line: its time and text."""
in_turn = turns(["frozen", "unresponsive head", "drained", "planned hosts"], 2)


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[HostCluster]:
    with host_cluster(shared, 3, hosts_files=("real", "debian", "none")) as made:
        yield made


@pytest.fixture(scope="module")
def job_id(cluster: HostCluster) -> str:
    """Return a long job of four ranks on two of the three hosts."""
    return cluster.start_long_job()


def lost_after(cluster: HostCluster, job_id: str, epoch: int) -> dict[str, object]:
    """Return the event that reports the loss of this epoch's group."""
    found = wait_for(
        lambda: [one for one in cluster.events(job_id, "workers_lost") if one["epoch"] == epoch], "a loss", seconds=60
    )
    assert len(found) == 1, found
    return found[0]


def test_doctor_names_two_hosts_that_cannot_communicate(cluster: HostCluster) -> None:
    one, other = cluster.nodes[1:]
    one.block(other)
    try:
        network = wait_for(lambda: checked_network(cluster), "a check of the network")
    finally:
        one.unblock(other)
    assert network.verdict is Verdict.FAILED
    assert f"{one.address} and {other.address}" in network.seen
    assert cluster.nodes[0].address not in network.seen


def checked_network(cluster: HostCluster) -> FindingOut | None:
    """Return the doctor's finding on the network; None if too little time was left for it."""
    (network,) = [found for found in cluster.client.doctor().findings if found.check == "network"]
    return None if network.verdict is Verdict.SKIPPED else network


def test_job_starts_on_hosts_with_any_name_resolution(cluster: HostCluster, job_id: str) -> None:
    assert len(set(cluster.hosts_of(job_id).values())) == 2
    groups = [{cluster.hosts_of(job_id)[rank].name for rank in ranks} for ranks in ((0, 1), (2, 3))]
    assert all(len(names) == 1 for names in groups), "a Ulysses group crosses hosts"


def test_killed_rank_is_reported_with_host_and_signal(cluster: HostCluster, job_id: str) -> None:
    epoch, host = cluster.epoch_of(job_id), cluster.hosts_of(job_id)[2]
    error = f"rank 2 on {host.name} was killed by signal 9 (SIGKILL)"
    cluster.kill_rank(job_id, 2)
    # First, because the reason clears once the next group trains.
    wait_for(lambda: error in reason_of(cluster, job_id), "the loss as the job's reason")
    loss = lost_after(cluster, job_id, epoch)
    assert (loss["ranks"], loss["hosts"], loss["cause"]) == ([2], [host.name], "killed")
    assert loss["error"] == error
    assert "survivors" not in loss or " reported: " in str(loss["survivors"])
    cluster.wait_for_newer_group(job_id, epoch)
    assert wait_for(lambda: cluster.client.job(job_id).reason is None, "the reason to clear")


def test_stopped_rank_is_reported_by_waiting_ranks(cluster: HostCluster, job_id: str) -> None:
    epoch = cluster.epoch_of(job_id)
    cluster.kill_rank(job_id, 3, "STOP")
    stopped = time.monotonic()
    try:
        wait_for(lambda: "ranks 0-2 wait for rank 3" in cluster.waits_for(job_id, "stalled"), "a reason", seconds=20)
        assert time.monotonic() - stopped < 15
        assert cluster.client.job(job_id).state is JobState.RUNNING
    finally:
        cluster.kill_rank(job_id, 3, "CONT")
    wait_for(lambda: cluster.client.job(job_id).progress.waits_for is None, "the reason to clear")
    assert cluster.epoch_of(job_id) == epoch


def test_host_frozen_for_five_seconds_is_not_lost(cluster: HostCluster, job_id: str) -> None:
    epoch, host = cluster.epoch_of(job_id), cluster.hosts_of(job_id)[3]
    host.freeze_for(5)
    newest = cluster.newest_step(job_id)
    cluster.wait_for_step(job_id, newest + 5)
    assert cluster.epoch_of(job_id) == epoch
    assert cluster.events(job_id, "host_lost") == []


@pytest.mark.more
def test_disconnected_host_is_lost_within_fifteen_seconds_and_its_ranks_exit(cluster: HostCluster, job_id: str) -> None:
    epoch, host = cluster.epoch_of(job_id), cluster.hosts_of(job_id)[3]
    pids = [one["pid"] for one in cluster.events(job_id, "training_started")[-1]["workers"] if one["host"] == host.name]
    cut = time.time()
    host.cut()
    assert lost_at(cluster, job_id, host) - cut <= 15
    cluster.wait_for_newer_group(job_id, epoch)
    assert host not in cluster.hosts_of(job_id).values()
    # Storage stays connected: the ranks there see the newer group within five seconds.
    wait_for(lambda: not any(alive(host, pid) for pid in pids), "the end of the superseded ranks", seconds=20)
    host.heal()
    # Its unit may be about to connect: TCP tries again after up to half a minute, and the node then starts.
    cluster.wait_for_nodes(3)
    (loss,) = [one for one in cluster.events(job_id, "workers_lost") if one["epoch"] == epoch]
    assert loss["cause"] == "host_lost"
    assert str(loss["error"]).startswith(f"host {host.name} was lost (ranks ")


def lost_at(cluster: HostCluster, job_id: str, host: Host) -> float:
    """Return the Unix time of the job's newest host loss, which must be of this host."""
    (*_, lost) = wait_for(lambda: cluster.events(job_id, "host_lost"), "the loss of the host")
    assert lost["host"] == host.name
    return float(lost["time"])


def reason_of(cluster: HostCluster, job_id: str) -> str:
    """Return the message of the job's reason, or an empty string."""
    reason = cluster.client.job(job_id).reason
    return "" if reason is None else reason.message


def alive(host: Host, pid: int) -> bool:
    return bool(host.run("sh", "-c", f"kill -0 {pid} 2>/dev/null && echo yes || true").strip())


@in_turn("frozen")
def test_frozen_host_is_lost_within_fifteen_seconds_and_commits_nothing_once_resumed(
    cluster: HostCluster, job_id: str
) -> None:
    host, frozen = cluster.hosts_of(job_id)[0], time.time()
    assert cluster.late_saves_of_thawed_host(job_id) == []
    assert lost_at(cluster, job_id, host) - frozen <= 15


def test_unmounted_storage_is_retried_and_nothing_is_written_to_its_mount_point(
    cluster: HostCluster, job_id: str
) -> None:
    host, epoch = cluster.hosts_of(job_id)[0], cluster.epoch_of(job_id)
    before = cluster.newest_step(job_id)
    host.unmount()
    message = wait_for(lambda: cluster.waits_for(job_id, "storage_unavailable"), "a reason")
    assert f"is unavailable on {host.name} since" in message
    assert host.run("ls", "-A", "/srv/trainshed").strip() == ""
    host.mount()
    cluster.wait_for_step(job_id, before + 15)
    wait_for(lambda: cluster.client.job(job_id).progress.waits_for is None, "the reason to clear")
    assert cluster.epoch_of(job_id) == epoch
    steps = [line["step"] for line in cluster.metrics(job_id) if line["epoch"] == epoch]
    assert steps == list(range(steps[0], steps[-1] + 1)), "lines are missing"
    away = cluster.events(job_id, "storage_unavailable")
    assert away, cluster.events(job_id)[-5:]
    assert away[-1]["root"].startswith("/srv/trainshed")


def test_storage_outage_of_service_and_driver_causes_no_restart(cluster: HostCluster, job_id: str) -> None:
    epoch, before = cluster.epoch_of(job_id), cluster.newest_step(job_id)

    def job_without_storage() -> JobOut | None:
        job = cluster.client.job(job_id)
        return job if job.reason is not None and job.reason.code == "storage_unavailable" else None

    cluster.head.unmount()
    job = wait_for(job_without_storage, "a reason")
    assert job.state is JobState.RUNNING
    assert job.progress.age_seconds is not None, "expected an answer from the database"
    assert cluster.head.run("ls", "-A", "/srv/trainshed").strip() == ""
    cluster.head.mount()
    wait_for(lambda: cluster.client.job(job_id).reason is None, "the reason to clear")
    cluster.wait_for_step(job_id, before + 15)
    assert cluster.epoch_of(job_id) == epoch
    assert len(cluster.client.job(job_id).attempts) == 1


@in_turn("unresponsive head")
def test_unresponsive_head_is_reported_while_training_continues(cluster: HostCluster, job_id: str) -> None:
    epoch, before = cluster.epoch_of(job_id), cluster.newest_step(job_id)
    cluster.head.run("pkill", "-STOP", "-x", "gcs_server")
    stopped = time.time()
    try:
        message = wait_for(lambda: cluster.waits_for(job_id, "cluster_unreachable"), "a reason", seconds=20)
        assert time.time() - stopped < 15
        assert re.search(r"Ray at http://\S+ has not answered since \d\d:\d\d:\d\d UTC", message)
        assert cluster.client.job(job_id).state is JobState.RUNNING
        assert cluster.newest_step(job_id) > before
    finally:
        cluster.head.run("pkill", "-CONT", "-x", "gcs_server")
    wait_for(lambda: cluster.client.job(job_id).progress.waits_for is None, "the reason to clear")
    cluster.wait_for_step(job_id, cluster.newest_step(job_id) + 5)
    assert cluster.epoch_of(job_id) == epoch


@in_turn("drained")
def test_job_leaves_a_drained_host_before_its_deadline(cluster: HostCluster, job_id: str) -> None:
    cluster.wait_for_nodes(3)
    epoch, host = cluster.epoch_of(job_id), cluster.hosts_of(job_id)[3]
    cluster.drain(host, seconds=180)
    cluster.wait_for_newer_group(job_id, epoch)
    assert host not in cluster.hosts_of(job_id).values()
    (notice,) = cluster.events(job_id, "preemption_notice")
    (started,) = [one for one in cluster.events(job_id, "training_started") if one["epoch"] == epoch + 1]
    assert started["replayed"] == 0
    assert [one for one in cluster.events(job_id, "workers_lost") if one["epoch"] == epoch] == []
    assert started["time"] < notice["deadline"]


def test_job_without_capacity_reports_what_is_missing_and_is_cancelled_at_once(
    cluster: HostCluster, job_id: str
) -> None:
    holding = set(cluster.hosts_of(job_id).values())
    lost = [host for host in cluster.nodes if host not in holding] + [cluster.hosts_of(job_id)[3]]
    for host in lost:
        host.kill()
    killed = time.monotonic()
    try:
        wait_for(lambda: cluster.waits_for(job_id, "capacity"), "a reason", seconds=60)
        assert time.monotonic() - killed < 30
        # The driver also reports the start of the wait. It corrects its report if Ray frees resources late.
        missing = "4 workers with 0.75 CPU each; the nodes have room for 2"
        expected = re.compile(rf"waits since \d\d:\d\d:\d\d UTC for {missing}; {lost[-1].name} left the cluster")
        wait_for(lambda: expected.fullmatch(cluster.waits_for(job_id, "capacity")), expected.pattern, seconds=60)
    finally:
        # The next tests need these hosts, and a job that has ended.
        cancelled_at = time.monotonic()
        cluster.client.cancel(job_id)
        cluster.wait_for_state(job_id, JobState.CANCELLED)
        seconds = time.monotonic() - cancelled_at
        for host in lost:
            host.start()
            cluster.start_node(host)
        cluster.wait_for_nodes(3)
    assert seconds < 10


def test_every_sample_was_trained_once_and_lost_work_is_reported(cluster: HostCluster, job_id: str) -> None:
    audit = cluster.client.audit_job(job_id)
    assert audit.clean, audit
    job = cluster.client.job(job_id)
    assert (len(job.attempts), job.attempts[0].result) == (1, "cancelled")
    replayed = sum(one["replayed"] for one in cluster.events(job_id, "training_started"))
    assert (job.lost_work.steps, audit.repeated.total) == (replayed, replayed)
    starts = [float(one["time"]) for one in cluster.events(job_id, "training_started")]
    gaps = sum(seconds_between_new_steps(cluster, job_id, start) for start in starts[1:])
    # The response rounds hours to four digits.
    assert 0 < job.lost_work.hours <= gaps / 3600 + 1e-4


def seconds_between_new_steps(cluster: HostCluster, job_id: str, start: float) -> float:
    """Return the seconds from the best step before a start (Unix seconds) to a better one; 0 if there is none."""
    lines = cluster.metrics(job_id)
    best = max((line for line in lines if line["time"] < start), key=lambda line: int(line["step"]))
    later = [float(line["time"]) for line in lines if line["step"] > best["step"]]
    return min(later) - float(best["time"]) if later else 0.0


def test_logs_have_one_line_per_event(cluster: HostCluster, job_id: str) -> None:
    driver = cluster.run_dir(job_id).attempt(1).driver_log.read_text()
    service = cluster.head.log("trainshed-service").read_text()
    for text in (driver, service):
        assert "Traceback" not in text
        lines = [_LINE.fullmatch(line) for line in text.splitlines() if "[info] request" not in line]
        timed = [(datetime.fromisoformat(line[1]), line[2]) for line in lines if line is not None]
        assert len(timed) > 5
        repeated = [
            line
            for (at, line), (later, following) in pairwise(timed)
            # A host may become silent twice.
            if line == following and (later - at).total_seconds() < 5
        ]
        assert repeated == []


@in_turn("planned hosts")
def test_job_that_trains_all_steps_succeeds_on_its_planned_hosts(cluster: HostCluster) -> None:
    job = yaml.safe_dump(host_job(cluster.lab.shared))
    # The service's list of nodes may be older.
    planned = wait_for(lambda: cluster.client.plan(job).nodes, "a plan with room for all ranks")
    job_id = cluster.submit(training={"max_steps": 12})
    cluster.wait_for_state(job_id, JobState.SUCCEEDED)
    ranks = defaultdict[Host, list[int]](list)
    for rank, host in sorted(cluster.hosts_of(job_id).items()):
        ranks[host].append(rank)
    assert sorted(ranks.values()) == planned == [[0, 1], [2, 3]]
    assert len(cluster.events(job_id, "group_started")) == 1
    assert cluster.client.audit_job(job_id).clean
    wait_for(lambda: not cluster.leftovers(job_id), "an end that leaves nothing")


def test_elastic_job_that_can_never_shrink_is_reported_with_numbers(cluster: HostCluster) -> None:
    warning = (
        "the job cannot shrink when a node is lost: its smallest size needs 4 x 1 CPU + 1 CPU for Ray Data > 4 CPU on "
        "the other nodes; ask for fewer or smaller workers, or add a node"
    )
    scaling = {"num_workers": {"min": 4, "max": 8}, "resources_per_worker": {"CPU": 1}}
    one = {"per_device_train_batch_size": 1}
    raw = yaml.safe_dump(host_job(cluster.lab.shared, training=one, scaling=scaling))
    # The hosts of earlier tests may not have joined again.
    wait_for(lambda: warning in cluster.client.plan(raw).warnings, "a plan for three nodes")
    job = cluster.client.submit(raw)
    assert [one for one in job.warnings if "shrink" in one] == [warning]
    cluster.client.cancel(job.id)
    cluster.wait_for_state(job.id, JobState.CANCELLED)
