"""Two replicas on one Postgres, killed and frozen during many jobs: no job is lost or submitted twice."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.domain.jobs.job import JobState
from service.ports import NewJob
from tests.support.builders.searches import seeds
from tests.support.fakes.service import a_job
from tests.support.faults.replica import CPUS, LEASE
from train_loop.run_dir import JsonLines, Outcome, RunDir

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
JOBS = seeds(24, more=80)
SEED = 6


class Replicas:
    """Replica processes that the test kills, freezes and restarts."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._chance = random.Random(SEED)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._frozen: dict[str, float] = {}
        self.done: Counter[str] = Counter()

    def start(self, owner: str) -> None:
        """Start a replica."""
        command = [sys.executable, "-m", "tests.support.faults.replica", self._url, str(self._folder), owner]
        with (self._folder / f"{owner}.log").open("ab") as log:
            self._processes[owner] = subprocess.Popen(command, stdout=log, stderr=log)

    def disturb(self) -> None:
        """At random, kill and restart a replica, or freeze it for longer than its leases."""
        for owner, until in list(self._frozen.items()):
            if time.monotonic() > until:
                self._processes[owner].send_signal(signal.SIGCONT)
                del self._frozen[owner]
        owner = self._chance.choice(list(self._processes))
        if owner in self._frozen or self._chance.random() > 0.06:
            return
        if self._chance.random() < 0.4:
            self._kill(owner)
            self.start(owner)
        else:
            self._processes[owner].send_signal(signal.SIGSTOP)
            self._frozen[owner] = time.monotonic() + 1.5 * LEASE
        self.done["killed" if owner not in self._frozen else "frozen"] += 1

    def _kill(self, owner: str) -> None:
        self._processes[owner].kill()
        self._processes[owner].wait()

    def end(self) -> None:
        """Kill all replicas."""
        for owner in self._processes:
            self._kill(owner)


def run_submissions(folder: Path) -> None:
    """Act as the cluster: each submission trains for 0.2 s and succeeds."""
    for new in folder.glob("*.new"):
        done = new.with_suffix(".done")
        if done.exists() or time.time() - new.stat().st_mtime < 0.2:
            continue
        attempt = RunDir.at(new.read_text()).attempt(int(new.stem.rpartition("-")[2]))
        JsonLines(attempt.events, attempt=attempt.number).append(event="training_started", steps=1, replayed=0)
        attempt.write_outcome(Outcome(result="succeeded", step=1))
        done.touch()


@pytest.fixture
def store(postgres: str) -> Iterator[SqlJobStore]:
    engine = open_database(postgres)
    yield SqlJobStore(engine)
    engine.dispose()


@pytest.mark.slow
def test_killed_and_frozen_replicas_lose_no_job_and_submit_none_twice(
    store: SqlJobStore, postgres: str, tmp_path: Path
) -> None:
    for number in range(JOBS):
        job_id = f"job-{number:04d}"
        store.add(NewJob(a_job(job_id, run_dir=(tmp_path / "runs" / "p" / job_id).as_uri(), priority=number % 3)))
    replicas = Replicas(postgres, tmp_path)
    try:
        for owner in ("a", "b"):
            replicas.start(owner)
        limit = time.monotonic() + 200
        # Read the entries first: a job that is admitted between the two reads appears in both.
        while store.queue_entries() or store.active():
            assert time.monotonic() < limit, [store.get(job_id) for job_id in store.active()]
            held = sum(entry.needs["CPU"] for entry in store.queue_entries() if entry.holds)
            assert held <= CPUS, f"{held} CPUs are reserved, but the cluster has {CPUS}"
            run_submissions(tmp_path)
            replicas.disturb()
            time.sleep(0.02)
    finally:
        replicas.end()
    jobs = [store.get(f"job-{number:04d}") for number in range(JOBS)]
    assert Counter(job and job.state for job in jobs) == {JobState.SUCCEEDED: JOBS}
    odd = [job for job in jobs if not job or [one.result for one in job.attempts] != ["succeeded"]]
    assert not odd, odd
    made = sorted(path.stem for path in tmp_path.glob("*.new"))
    assert made == [f"job-{number:04d}-1" for number in range(JOBS)]
    requests = len((tmp_path / "requests").read_text().split())
    print(f"{dict(replicas.done)}, {requests} requests for {JOBS} submissions")  # noqa: T201
    assert min(replicas.done[what] for what in ("killed", "frozen")) >= 3
