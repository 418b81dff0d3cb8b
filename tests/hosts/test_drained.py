"""A host that is drained: the run saves at once and moves to hosts that stay."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host_cluster import HostCluster, host_cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.more]


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[HostCluster]:
    with host_cluster(shared, 3) as made:
        yield made


@pytest.fixture(scope="module")
def job_id(cluster: HostCluster) -> str:
    """A long job on two of the three hosts."""
    return cluster.start_long_job()


def test_drained_host_is_left_before_its_deadline(cluster: HostCluster, job_id: str) -> None:
    epoch, host = cluster.epoch_of(job_id), cluster.hosts_of(job_id)[3]
    cluster.drain(host, seconds=60)
    cluster.wait_for_newer_group(job_id, epoch)
    assert host not in cluster.hosts_of(job_id).values()
    (notice,) = cluster.events(job_id, "preemption_notice")
    (started,) = [one for one in cluster.events(job_id, "training_started") if one["epoch"] == epoch + 1]
    assert started["replayed"] == 0
    assert [one for one in cluster.events(job_id, "workers_lost") if one["epoch"] == epoch] == []
    assert started["time"] < notice["deadline"]
