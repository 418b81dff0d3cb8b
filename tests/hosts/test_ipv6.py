"""Jobs on hosts that have only IPv6 addresses: with the units, and in the chart's pods."""

import json
from functools import partial
from pathlib import Path

import pytest

from service.domain.doctor.finding import Verdict
from service.domain.jobs.job import JobState
from tests.support.hosts.charts import render
from tests.support.hosts.containers import Container, run
from tests.support.hosts.host_cluster import TOKEN, host_cluster
from tests.support.hosts.hosts import Host, HostsFile, lab
from tests.support.hosts.pods import place
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.more]


@pytest.mark.parametrize("hosts_file", ["debian", "none"])
def test_job_over_ipv6_succeeds(shared: Path, hosts_file: HostsFile) -> None:
    with host_cluster(shared, 2, hosts_files=[hosts_file], ipv6=True) as cluster:
        job_id = cluster.submit(training={"max_steps": 12})
        cluster.wait_for_state(job_id, JobState.SUCCEEDED)
        assert len(set(cluster.hosts_of(job_id).values())) == 2
        (network,) = [found for found in cluster.client.doctor().findings if found.check == "network"]
        assert network.verdict is Verdict.OK, network


def test_chart_pods_with_only_ipv6_addresses_train(shared: Path) -> None:
    # The folders of the other tests belong to the user of the units.
    own = shared / "pods"
    own.mkdir()
    shared.chmod(0o755)
    names = ["api", "test", "ray-head", "ray-worker-1", "ray-worker-2"]
    with lab(names, shared=own, ipv6=True) as made:
        pods = place(render({"ipFamily": "IPv6"}), made.hosts, token=TOKEN, more="--object-store-memory=80000000")
        for name in ("ray-head", "ray-worker-1", "ray-worker-2", "api"):
            pods[name].start()
        # A kubelet probes the address of the pod.
        urls = [f"http://[{made.hosts['api'].address}]:8000/readyz"]
        urls += [f"http://[{made.hosts['ray-head'].address}]:52365/api/healthz"]
        urls += [f"http://[{made.hosts['ray-worker-1'].address}]:52365/api/local_raylet_healthz"]
        for url in urls:
            assert wait_for(partial(get, made.hosts["test"], url), url, seconds=60)
        assert "SUCCEEDED  10/10" in pods["test"].run(seconds=240)
        report = json.loads(pods["test"].run("trainshed", "doctor", "--json", seconds=120))
        assert {one["check"] for one in report["findings"] if one["verdict"] == "failed"} == set()


def get(host: Host, url: str) -> bool:
    """Return True if a URL answers a client on another host."""
    try:
        run(host, Container("probe", ("wget", "-q", "-O", "/dev/null", url)))
    except AssertionError:
        return False
    return True
