"""Random faults from a seed, one after the other; `HOSTS_SEEDS=7,8,9 make hosts` sets other seeds."""

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.domain.jobs.job import JobState
from tests.support.hosts.host_cluster import HostCluster, host_cluster
from tests.support.hosts.hosts import Host

pytestmark = [pytest.mark.timeout(1200), pytest.mark.more]
SEEDS = [int(seed) for seed in os.environ.get("HOSTS_SEEDS", "1,2").split(",")]
FAULTS = 5


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[HostCluster]:
    with host_cluster(shared, 3, hosts_files=("debian", "none", "real")) as made:
        yield made


Fault = Callable[[HostCluster, str, random.Random], None]


def kill_rank(cluster: HostCluster, job_id: str, draw: random.Random) -> None:
    cluster.kill_rank(job_id, draw.randrange(4))


def outage(begin: Callable[[Host], None], end: Callable[[Host], None], *, longest: float) -> Fault:
    """Return a fault that begins on the host of a random rank and ends after 1 to `longest` seconds."""

    def fault(cluster: HostCluster, job_id: str, draw: random.Random) -> None:
        host = cluster.hosts_of(job_id)[draw.randrange(4)]
        begin(host)
        time.sleep(draw.uniform(1, longest))
        end(host)
        if begin is Host.kill:
            cluster.start_node(host)

    return fault


ALL = [
    kill_rank,
    outage(Host.freeze, Host.thaw, longest=25),
    outage(Host.cut, Host.heal, longest=25),
    outage(Host.unmount, Host.mount, longest=15),
    outage(Host.kill, Host.start, longest=15),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_is_trained_despite_random_host_faults(cluster: HostCluster, seed: int) -> None:
    draw = random.Random(seed)
    job_id = cluster.start_long_job()
    for _ in range(FAULTS):
        fault = draw.choice(ALL)
        # At any moment of a step, of a save and of a restart.
        time.sleep(draw.uniform(0, 6))
        best = cluster.newest_step(job_id)
        fault(cluster, job_id, draw)
        cluster.wait_for_step(job_id, best + 20, seconds=240)
        cluster.wait_for_nodes(3)
    cluster.client.cancel(job_id)
    cluster.wait_for_state(job_id, JobState.CANCELLED)
    audit = cluster.client.audit_job(job_id)
    assert audit.clean, audit
    assert len(cluster.client.job(job_id).attempts) == 1
