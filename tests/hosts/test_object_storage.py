"""Faults of a job whose run directory is on object storage: differences from shared folders."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.domain.jobs.job import JobState
from tests.support.hosts.host_cluster import HostCluster, host_cluster
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[HostCluster]:
    with host_cluster(shared, 3, s3=True) as made:
        yield made


@pytest.fixture(scope="module")
def job_id(cluster: HostCluster) -> str:
    """Return a long job on two of the three hosts."""
    return cluster.start_long_job()


# `make test` covers the protocol on objects (test_fencing_protocol), and test_faults the frozen host on folders.
@pytest.mark.more
def test_resumed_group_commits_nothing_next_to_its_successor(cluster: HostCluster, job_id: str) -> None:
    assert cluster.late_saves_of_thawed_host(job_id) == []


@pytest.mark.more
def test_disconnected_storage_is_retried(cluster: HostCluster, job_id: str) -> None:
    assert cluster.objects is not None
    epoch, before = cluster.epoch_of(job_id), cluster.newest_step(job_id)
    cluster.objects.cut()
    try:
        message = wait_for(lambda: cluster.waits_for(job_id, "storage_unavailable"), "a reason", seconds=60)
        assert "s3://trainshed" in message
        assert cluster.client.job(job_id).state is JobState.RUNNING
    finally:
        cluster.objects.heal()
    cluster.wait_for_step(job_id, before + 30)
    assert cluster.epoch_of(job_id) == epoch
    steps = [line["step"] for line in cluster.metrics(job_id) if line["epoch"] == epoch]
    assert steps == list(range(steps[0], steps[-1] + 1)), "lines are missing"
    assert wait_for(lambda: cluster.client.job(job_id).progress.waits_for is None, "the reason to clear")


@pytest.mark.more
def test_killed_host_costs_no_sample(cluster: HostCluster, job_id: str) -> None:
    epoch, host = cluster.epoch_of(job_id), cluster.hosts_of(job_id)[3]
    host.kill()
    cluster.wait_for_newer_group(job_id, epoch)
    assert host not in cluster.hosts_of(job_id).values()
    cluster.client.cancel(job_id)
    cluster.wait_for_state(job_id, JobState.CANCELLED)
    audit = cluster.client.audit_job(job_id)
    assert audit.clean, audit
