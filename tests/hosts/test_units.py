"""Hosts and a head that stop and return under their systemd units, without manual restarts."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.domain.jobs.job import JobState
from tests.support.hosts.host_cluster import HostCluster, host_cluster
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.timeout(600), pytest.mark.more]


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[HostCluster]:
    with host_cluster(shared, 2) as made:
        yield made


@pytest.fixture(scope="module")
def job_id(cluster: HostCluster) -> str:
    """Return a long job that needs both hosts."""
    return cluster.start_long_job()


def test_doctor_confirms_that_the_hosts_can_communicate(cluster: HostCluster) -> None:
    (network,) = [one for one in cluster.client.doctor().findings if one.check == "network"]
    assert network.verdict.value == "ok", network


def test_rank_that_dies_during_group_start_costs_no_attempt(cluster: HostCluster, job_id: str) -> None:
    epoch, host = cluster.epoch_of(job_id), cluster.hosts_of(job_id)[3]
    cluster.kill_rank(job_id, 2)
    starting = wait_for(lambda: newer if (newer := cluster.epoch_of(job_id)) > epoch else None, "the next group")
    # The group's epoch is known before its workers are there.
    host.run("timeout", "20", "sh", "-c", "until pkill -9 -f '[r]ay::RayTrainWorker'; do sleep 0.02; done")
    cluster.wait_for_newer_group(job_id, starting)
    (loss,) = [one for one in cluster.events(job_id, "workers_lost") if one["epoch"] == starting]
    assert (loss["hosts"], loss["cause"]) == ([host.name], "killed")
    assert len(cluster.client.job(job_id).attempts) == 1


def test_job_without_capacity_reports_what_is_missing_and_the_lost_host(cluster: HostCluster, job_id: str) -> None:
    host = cluster.hosts_of(job_id)[3]
    host.kill()
    killed = time.monotonic()
    message = wait_for(lambda: cluster.waits_for(job_id, "capacity"), "a reason", seconds=60)
    assert " CPU" in message
    assert message.endswith(f"; {host.name} left the cluster")
    assert time.monotonic() - killed < 30


def test_returning_host_continues_the_job(cluster: HostCluster, job_id: str) -> None:
    (host,) = [node for node in cluster.nodes if not node.is_on]
    best = cluster.newest_step(job_id)
    host.start()
    cluster.start_node(host)
    cluster.wait_for_step(job_id, best + 5)
    assert len(cluster.client.job(job_id).attempts) == 1
    assert cluster.client.job(job_id).progress.waits_for is None


def test_stopped_head_saves_and_is_no_failure(cluster: HostCluster, job_id: str) -> None:
    best = cluster.newest_step(job_id)
    cluster.head.stop_unit("trainshed-head")
    ended = wait_for(lambda: one if (one := cluster.client.job(job_id).attempts[-1]).result else None, "the end")
    assert ended.reason is not None
    assert (ended.result, ended.reason.code) == ("moved", "moving")
    assert "the head of Ray ends as planned" in ended.reason.message
    cluster.start_head()
    cluster.wait_for_step(job_id, best + 5)
    (replayed,) = [one["replayed"] for one in cluster.events(job_id, "training_started") if one["attempt"] == 2]
    assert replayed == 0


def test_stopped_node_is_drained_and_the_job_saves_at_once(cluster: HostCluster, job_id: str) -> None:
    host, before = cluster.hosts_of(job_id)[3], len(cluster.events(job_id, "checkpoint_committed"))
    host.stop_unit("trainshed-node")
    wait_for(lambda: cluster.events(job_id, "preemption_notice"), "the notice", seconds=20)
    wait_for(lambda: len(cluster.events(job_id, "checkpoint_committed")) > before, "a checkpoint", seconds=20)
    # It would have 75 s.
    host.kill()
    host.start()
    cluster.start_node(host)
    best = cluster.newest_step(job_id)
    cluster.wait_for_step(job_id, best + 5)


def test_all_nodes_join_a_new_head_and_the_job_continues(cluster: HostCluster, job_id: str) -> None:
    best = cluster.newest_step(job_id)
    cluster.head.run("pkill", "-9", "-f", "gcs_server")
    wait_for(lambda: len(cluster.client.job(job_id).attempts) == 3, "a third attempt", seconds=120)
    cluster.wait_for_step(job_id, best + 5)
    job = cluster.client.job(job_id)
    assert [attempt.result for attempt in job.attempts] == ["moved", "failed", None]
    assert cluster.client.audit_job(job_id).clean


def test_job_without_workers_is_cancelled_at_once(cluster: HostCluster, job_id: str) -> None:
    host = cluster.hosts_of(job_id)[3]
    host.kill()
    wait_for(lambda: cluster.waits_for(job_id, "capacity"), "a reason", seconds=60)
    cancelled_at = time.monotonic()
    cluster.client.cancel(job_id)
    cluster.wait_for_state(job_id, JobState.CANCELLED, seconds=20)
    assert time.monotonic() - cancelled_at < 10
