"""An elastic job on a real Ray cluster whose nodes join and leave ends with the bits of an undisturbed job."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.cluster_utils import Cluster

from service.domain.jobs.job import JobState
from tests.support.clients.command import run
from tests.support.ranks.own_ray import own_cluster
from tests.support.servers.live import LiveService, small_job
from tests.support.servers.worker_forks import SLOW, TRAINING, worker_forks
from tests.support.waiting import SERVICE_PAUSE, wait_for
from train_loop.checkpoint.manifest import newest_verified

STEPS = 4000
"""More steps than are trained before the nodes have joined and left."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return a head with the driver, and separate nodes for the workers."""
    # On an external cluster, the service starts drivers as `python`.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", **worker_forks()}.items():
        monkeypatch.setenv(name, value)
    with own_cluster(num_cpus=2, include_dashboard=True) as cluster:
        yield cluster


@pytest.fixture
def service(cluster: Cluster, tmp_path: Path) -> Iterator[LiveService]:
    environment = {
        "TRAINSHED_RAY_ADDRESS": f"http://{cluster.head_node.webui_url}",
        "TRAINSHED_RESIZE_SECONDS": "1",
        "RAY_AUTH_MODE": "disabled",
    }
    service = LiveService(tmp_path, environment=environment, quick=True)
    service.start()
    try:
        yield service
    finally:
        service.stop()


def submit(service: LiveService, *, workers: Any, steps: int, **labels: str) -> str:
    """Submit a job whose bits do not depend on its number of workers; return its id."""
    return service.submit(
        labels=labels,
        training={
            "max_steps": steps,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 1,
            "reproducible": "any_size",
            "reduction_tree": {"max_shards": 4},
        },
        strategy={"ulysses_size": 1},
        checkpoint={"every_steps": 20},
        scaling={"num_workers": workers, "resources_per_worker": {"CPU": 0.5, "place": 1}},
    )


@pytest.mark.timeout(300)
def test_elastic_job_shrinks_and_grows_with_the_cluster_and_keeps_its_bits(
    cluster: Cluster, service: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = (cluster.add_node(num_cpus=1, resources={"place": 1}) for _ in range(2))
    cluster.wait_for_nodes()
    # The service's list of nodes may be older, and the job would start with fewer workers.
    whole = {"num_workers": 2, "resources_per_worker": {"CPU": 0.5, "place": 1}}
    spec = yaml.safe_dump(small_job(service.home, strategy={"ulysses_size": 1}, scaling=whole))
    wait_for(lambda: service.client.plan(spec).nodes, "room for two workers", pause=SERVICE_PAUSE)
    # Slow steps, because the other job repeats all of them.
    job_id = submit(service, workers={"min": 1, "max": 4}, steps=STEPS, **{SLOW: TRAINING})
    assert service.client.job(job_id).sizes == (1, 2, 4), "expected no size 3: the reduction tree has powers of two"
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
    os.kill(starts[-1]["workers"][1]["pid"], signal.SIGKILL)
    again = wait_for(lambda: service.events(job_id, "training_started")[len(starts) :], "a restart", seconds=90)
    service.wait_for_step(job_id, again[0]["resumed_from"] + again[0]["replayed"] + 5)
    service.client.cancel(job_id)
    service.wait_for_state(job_id, JobState.CANCELLED)
    # Cancelled with a checkpoint of the last step.
    newest, rejected = newest_verified(service.run_dir(job_id))
    assert newest is not None
    assert (newest.step, rejected) == (service.metrics(job_id)[-1]["step"], {})
    last = {line["step"]: line["samples"] for line in service.metrics(job_id)}
    taken = [sample for samples in last.values() for sample in samples]
    assert sorted(last) == list(range(1, len(last) + 1))
    assert len(taken) == 4 * len(last)
    assert len(set(taken[:400])) == min(len(taken), 400), "expected every sample once per epoch"

    alone = submit(service, workers=1, steps=len(last))
    service.wait_for_state(alone, JobState.SUCCEEDED)
    monkeypatch.setenv("TRAINSHED_HOME", str(service.home))
    same = run("diff", job_id, alone)
    assert same.exit_code == 0, same.output
    assert f"identical: {len(last)} steps, " in same.output
    assert f" of step {len(last)}, sha256 " in same.output
