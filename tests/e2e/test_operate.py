"""Backup during a job: after a restore, in place or on an empty machine, the service continues the job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.domain.jobs.job import JobState
from tests.support.servers.live import LiveService, small_job
from train_loop.run_dir import RunDir, read_lines

pytestmark = pytest.mark.timeout(600)


def a_service(home: Path, shared: Path) -> LiveService:
    """Return a service on a separate machine, with storage that outlives it."""
    home.mkdir()
    environment = {"TRAINSHED_RUNS": (shared / "runs").as_uri()}
    roots = ((shared / "data").as_uri(),)
    return LiveService(home, environment=environment, roots=roots, quick=True, step_seconds=0.05)


def trainshed(home: Path, *arguments: str) -> None:
    """Run a command as an operator types it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINSHED_")}
    environment["TRAINSHED_HOME"] = str(home)
    command = [sys.executable, "-m", "trainshed.cli.main", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def newest_step(service: LiveService, job_id: str) -> int:
    """Return the last trained step."""
    return int(service.metrics(job_id)[-1]["step"])


def test_restored_backup_continues_the_jobs(tmp_path: Path) -> None:
    shared, backup = tmp_path / "shared", tmp_path / "backup.tar"
    first, second = a_service(tmp_path / "first", shared), a_service(tmp_path / "second", shared)
    try:
        first.start()
        # Too many steps to end meanwhile.
        spec = small_job(shared, training={"max_steps": 100_000})
        job_id = first.client.submit(yaml.safe_dump(spec)).id
        first.wait_for_step(job_id, 5)
        trainshed(first.home, "backup", str(backup))
        first.wait_for_step(job_id, newest_step(first, job_id) + 10)

        # The process and its database are lost, but not the machine: the run is not affected.
        first.kill()
        (first.home / "trainshed.db").unlink()
        trainshed(first.home, "restore", str(backup), "--force")
        first.start()
        first.wait_for_state(job_id, JobState.RUNNING)
        first.wait_for_step(job_id, newest_step(first, job_id) + 10)
        assert len(first.client.job(job_id).attempts) == 1

        # Only the backup and the storage of the machine are left.
        # Its jobs save before it stops.
        first.stop()
        reached = newest_step_on(shared, job_id)
        assert newest_checkpoint_on(shared, job_id) == reached
        trainshed(second.home, "restore", str(backup))
        second.start()
        second.wait_for_step(job_id, reached + 1)
        assert [one.attempt for one in second.client.job(job_id).attempts] == [1, 2]
        assert_trained_once(second, job_id)
        second.client.cancel(job_id, checkpoint=False)
        second.wait_for_state(job_id, JobState.CANCELLED)
    finally:
        first.stop()
        second.stop()


def newest_step_on(shared: Path, job_id: str) -> int:
    """Return the last trained step, while the service is stopped."""
    (run_dir,) = (shared / "runs").glob(f"*/{job_id}")
    return int(max(line["step"] for line in read_lines(run_dir / "attempts" / "1" / "metrics.jsonl")))


def newest_checkpoint_on(shared: Path, job_id: str) -> int:
    """Return the step of the newest checkpoint, while the service is stopped."""
    (run_dir,) = (shared / "runs").glob(f"*/{job_id}")
    return max(RunDir(run_dir).manifests())


def assert_trained_once(service: LiveService, job_id: str) -> None:
    """Check that every step has its samples, and a repeated step the same ones."""
    samples = dict[int, list[int]]()
    for line in service.metrics(job_id):
        assert samples.setdefault(line["step"], line["samples"]) == line["samples"], line
    assert sorted(samples) == list(range(1, max(samples) + 1))
