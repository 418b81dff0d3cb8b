"""A drained node of a real Ray cluster of two: the run on it saves before the node is removed."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.own_ray import own_cluster
from tests.support.ranks.torchrun import write_tokens
from tests.support.servers.worker_forks import worker_forks
from tests.support.waiting import wait_for
from train_loop.data.stream import takeover
from train_loop.run_dir import RunDir, Stop, read_lines


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """Return the address of a cluster, and the id of its node `spot`, which holds the workers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", **worker_forks(step_seconds=0.05)}.items():
            patch.setenv(name, value)
        with own_cluster(num_cpus=2, include_dashboard=False) as cluster:
            spot = cluster.add_node(num_cpus=1, resources={"spot": 1})
            cluster.wait_for_nodes()
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster.address, spot.node_id


@pytest.mark.timeout(400)
def test_run_on_a_drained_node_saves_at_once(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=64, length=32, vocab=TINY["vocab_size"])
    run_dir = RunDir(tmp_path / "default" / "run")
    run_dir.write_spec(
        spec(
            data={"train": {"path": str(tmp_path / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
            training={"max_steps": 1_000_000},
            checkpoint={"every_steps": None, "save_final": False},
            scaling={"num_workers": 1, "resources_per_worker": {"CPU": 1, "spot": 1}},
        )
    )

    def events(name: str) -> list[dict[str, object]]:
        return [line for line in read_lines(run_dir.attempt(1).events) if line["event"] == name]

    with two_nodes() as (address, spot):
        command = [sys.executable, "-m", "train_loop.ray_train.driver"]
        command += ["--run-dir", str(run_dir.root), "--attempt", "1"]
        driver = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            # Ray Data has not started: Ray places nothing on a draining node.
            wait_for(lambda: any(line["step"] > 30 for line in read_lines(run_dir.attempt(1).metrics)), "step 31")
            drain = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", address, "--node-id", spot]
            drain += [
                "--reason",
                "DRAIN_NODE_REASON_PREEMPTION",
                "--reason-message",
                "spot",
                "--deadline-remaining-seconds",
            ]
            drained_at = time.time()
            subprocess.run([*drain, "600"], check=True, timeout=120)
            (committed,) = wait_for(lambda: events("checkpoint_committed"), "a checkpoint")
            (notice,) = events("preemption_notice")
            assert notice["ranks"] == [0]
            assert isinstance(notice["deadline"], float)
            assert 0 < notice["deadline"] - drained_at < 700
            assert sorted(run_dir.manifests()) == [committed["step"]]
            # The run continues while the node exists, even if Ray Data cannot start there.
            (started,) = (line["time"] for line in events("training_started"))
            after = float(str(started)) + takeover._WORTH_IT + 10
            metrics = run_dir.attempt(1).metrics
            wait_for(lambda: any(line["time"] > after for line in read_lines(metrics)), "later steps")
            assert len(events("training_started")) == 1
            run_dir.write_stop(Stop(mode="cancel", checkpoint=False))
            assert driver.wait(timeout=120) == 0
        finally:
            driver.kill()
            driver.wait()
    outcome = run_dir.attempt(1).outcome()
    assert outcome is not None
    assert outcome.result == "cancelled"
