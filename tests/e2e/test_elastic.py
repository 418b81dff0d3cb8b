"""An elastic job on a real Ray cluster whose nodes join and leave."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from service.domain.jobs.job import JobState
from tests.support.servers.live import LiveService
from tests.support.waiting import wait_for

STEPS = 4000
"""More steps than are trained before the nodes have joined and left."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return a head with the driver, and separate nodes for the workers."""
    # On an external cluster, the service starts drivers as `python`.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    # Another Ray on this machine may use the default ports of the dashboard and of the agent that starts drivers.
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": None, "dashboard_agent_listen_port": None}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.timeout(300)
def test_elastic_job_shrinks_and_grows_with_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    first, _ = (cluster.add_node(num_cpus=1, resources={"place": 1}) for _ in range(2))
    cluster.wait_for_nodes()
    service = LiveService(
        tmp_path,
        environment={
            "TRAINSHED_RAY_ADDRESS": f"http://{cluster.head_node.webui_url}",
            "TRAINSHED_RESIZE_SECONDS": "1",
            "RAY_AUTH_MODE": "disabled",
        },
        quick=True,
    )
    service.start()
    try:
        job_id = service.submit(
            training={"max_steps": STEPS, "logging_steps": 1},
            strategy={"ulysses_size": 1},
            checkpoint={"every_steps": 20},
            scaling={"num_workers": {"min": 1, "max": 3}, "resources_per_worker": {"CPU": 0.5, "place": 1}},
        )
        job = service.client.job(job_id)
        assert job.sizes == (1, 2), "expected no size 3: it does not divide 4 sequences"
        service.wait_for_step(job_id, 25)
        assert service.client.job(job_id).scaling.world == 2

        cluster.remove_node(first, allow_graceful=False)
        wait_for(lambda: service.client.job(job_id).attempt == 2, "a second attempt", seconds=90)
        service.wait_for_state(job_id, JobState.RUNNING)
        assert service.client.job(job_id).scaling.world == 1

        cluster.add_node(num_cpus=1, resources={"place": 1})
        wait_for(lambda: service.client.job(job_id).attempt == 3, "a third attempt", seconds=90)
        service.wait_for_state(job_id, JobState.RUNNING)
        job = service.client.job(job_id)
        assert [attempt.workers for attempt in job.attempts] == [2, 1, 2]
        assert [attempt.result for attempt in job.attempts] == ["resized", "resized", None], job.attempts[0].reason
        starts = service.events(job_id, "training_started")
        # The smaller attempt resumed from the latest checkpoint, the larger one from that saved for the resize.
        assert (starts[-2]["resumed_from"] % 20, starts[-1]["replayed"]) == (0, 0)
        service.wait_for_step(job_id, starts[-1]["resumed_from"] + 5)
        service.client.cancel(job_id, checkpoint=False)
        service.wait_for_state(job_id, JobState.CANCELLED)
        last = {line["step"]: line["samples"] for line in service.metrics(job_id)}
        taken = [sample for samples in last.values() for sample in samples]
        assert sorted(last) == list(range(1, len(last) + 1))
        assert len(taken) == 4 * len(last)
        assert len(set(taken[:400])) == min(len(taken), 400), "expected every sample once per epoch"
    finally:
        service.stop()
