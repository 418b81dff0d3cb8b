"""A job on hosts that have only IPv6 addresses."""

from pathlib import Path

import pytest

from service.domain.doctor.finding import Verdict
from service.domain.jobs.job import JobState
from tests.support.hosts.host_cluster import host_cluster
from tests.support.hosts.hosts import HostsFile

pytestmark = [pytest.mark.timeout(300), pytest.mark.more]


@pytest.mark.parametrize("hosts_file", ["debian", "none"])
def test_job_over_ipv6_succeeds(shared: Path, hosts_file: HostsFile) -> None:
    with host_cluster(shared, 2, hosts_files=[hosts_file], ipv6=True) as cluster:
        job_id = cluster.submit(training={"max_steps": 12})
        cluster.wait_for_state(job_id, JobState.SUCCEEDED)
        assert len(set(cluster.hosts_of(job_id).values())) == 2
        (network,) = [found for found in cluster.client.doctor().findings if found.check == "network"]
        assert network.verdict is Verdict.OK, network
