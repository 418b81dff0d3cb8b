"""A cluster, storage and users in simulated time, with seeded faults, and the invariants that must hold."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from service.domain.jobs.commands import request_cancel, request_pause, request_resume
from service.domain.jobs.job import TRANSITIONS, Job, JobSize, JobState
from service.domain.jobs.observation import LatestAttempt, SubmissionStatus, WorkerStatus
from service.domain.queue.entry import QueueEntry
from service.domain.queue.policy import Quota
from service.errors import ClusterError, IllegalState, StaleAttempt
from service.ports import AttemptObservation, Node, SubmitRequest
from tests.support.fakes.service import a_spec
from tests.support.fakes.stores import MemoryJobStore
from tests.support.faults.true_reasons import contradiction
from train_loop.plan import Capacity, NodeRoom
from train_loop.run_dir import Outcome, Stop
from train_loop.spec import AnyJobSpec, JobSpec
from train_loop.spec.scaling import WorkerRange

CPUS = 8.0
QUOTAS = {"small": Quota(jobs=1)}
STEPS = 6
"""Steps of each job; each step commits a checkpoint."""
PEACE = 60.0
"""Time after which no more faults happen (seconds)."""


class DatabaseError(Exception):
    """The error of a database call without an answer in time."""


class RuleBroken(BaseException):
    """The violation of an invariant. Not an Exception, because the reconciler would log that and continue."""


EXPECTED = (DatabaseError, ClusterError, OSError, StaleAttempt)
"""Exceptions of simulated faults."""


def hold(rule: object, otherwise: str) -> None:
    """Raise RuleBroken with the message `otherwise` if a rule does not hold."""
    if not rule:
        raise RuleBroken(otherwise)


@cache
def spec(fewest: int, most: int, priority: int, project: str) -> JobSpec:
    """Return a job's spec; it is parsed once for all worlds."""
    workers: Any = {"min": fewest, "max": most} if fewest < most else most
    training = {"global_batch_size": 60}
    return a_spec(scaling={"num_workers": workers}, training=training, priority=priority, project=project)


@dataclass
class Disk:
    """The run directory of one job."""

    fence: int = 0
    prepared: int = 0
    stop: Stop | None = None
    committed: int = 0
    committed_by: int = 0
    started: dict[int, WorkerStatus] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)


@dataclass
class Driver:
    """A submission and its state."""

    job_id: str
    attempt: int
    state: SubmissionStatus = SubmissionStatus.PENDING
    ends_as: SubmissionStatus | None = None
    """Final state of a driver that has written its outcome; its process still runs. None before that."""
    late: bool = False
    """The attempt had ended before the driver started: a paused replica submitted it late. The fence will end it."""


@dataclass
class World:
    """The simulated world. Raises RuleBroken as soon as an invariant is violated."""

    seed: int
    now: float = 0.0
    store: MemoryJobStore = field(default_factory=MemoryJobStore)
    disks: dict[str, Disk] = field(default_factory=dict)
    drivers: dict[str, Driver] = field(default_factory=dict)
    late: list[SubmitRequest] = field(default_factory=list)
    """Submissions that have not reached the cluster yet."""
    cpus: float = CPUS
    """CPUs of the cluster: fewer while nodes are lost."""
    silent_until: float = 0.0
    """Time until which the cluster does not answer."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def roll(self, share: float) -> bool:
        """Return True if a fault with this probability happens now."""
        return self.now < PEACE and self.chance.random() < share

    def clock(self) -> float:
        """Return the simulated time in seconds."""
        return self.now

    # ------------------------------------------------------------------------------------------------- the cluster

    def submit(self, launch: SubmitRequest) -> None:
        """Start a driver, or raise ClusterError and deliver the request later."""
        self._answer()
        if self.roll(0.1):
            self.late.append(launch)
            raise ClusterError("timed out")
        others = [one for one in self._drivers_of(launch.job_id) if one.state.alive]
        # A replica that was paused may submit an attempt that has ended; its driver finds the fence and ends.
        over = self.disks[launch.job_id].fence > launch.attempt
        hold(over or all(one.attempt == launch.attempt for one in others), f"{launch.job_id} has two drivers")
        self.begin(launch)

    def _drivers_of(self, job_id: str) -> list[Driver]:
        return [one for one in self.drivers.values() if one.job_id == job_id and not one.late]

    def begin(self, launch: SubmitRequest) -> None:
        """Start the driver of a submission. A second request with the same id changes nothing."""
        late = self.store.jobs[launch.job_id].attempts[launch.attempt - 1].ended_at is not None
        self.drivers.setdefault(launch.submission_id, Driver(launch.job_id, launch.attempt, late=late))

    def status(self, submission_id: str) -> SubmissionStatus:
        """Return the status of a driver."""
        if self.now < self.silent_until:
            return SubmissionStatus.UNKNOWN
        driver = self.drivers.get(submission_id)
        return driver.state if driver else SubmissionStatus.MISSING

    def end_of(self, submission_id: str) -> str | None:
        """Return None: it is unknown."""
        return None

    def stop(self, submission_id: str) -> None:
        """Stop a driver now."""
        self._answer()
        driver = self.drivers.get(submission_id)
        if driver is not None and driver.state.alive:
            disk = self.disks[driver.job_id]
            if disk.stop is not None and disk.stop.attempt == driver.attempt:
                disk.outcomes[driver.attempt] = Outcome(result=disk.stop.result)
            driver.state = SubmissionStatus.STOPPED

    def capacity(self) -> Capacity | None:
        """Return the current capacity; None while the cluster does not answer."""
        return None if self.now < self.silent_until else Capacity({"CPU": self.cpus})

    def rooms(self) -> tuple[NodeRoom, ...]:
        """Return nothing: the nodes are unknown."""
        return ()

    def nodes(self) -> list[Node] | None:
        """Return None: the nodes are unknown."""
        return None

    def dashboard(self, submission_id: str | None) -> str | None:
        """Return None: there is no dashboard."""
        return None

    def _answer(self) -> None:
        if self.now < self.silent_until:
            raise ClusterError("no answer")

    # ------------------------------------------------------------------------------------------ the run directories

    def prepare(self, run_dir: str, spec: AnyJobSpec, size: Any, *, attempt: int) -> None:
        """Fence off older attempts. Raises StaleAttempt if a newer one has fenced off this one."""
        self.fence_off(run_dir, attempt=attempt)
        self.disks[run_dir].prepared = max(self.disks[run_dir].prepared, attempt)
        if self.disks[run_dir].fence > attempt:
            raise StaleAttempt(run_dir, attempt)

    def fence_off(self, run_dir: str, *, attempt: int) -> None:
        """Fence off older attempts."""
        disk = self.disks.setdefault(run_dir, Disk())
        disk.fence = max(disk.fence, attempt)

    def request_stop(self, run_dir: str, stop: Stop) -> None:
        """Store a stop request."""
        self.disks.setdefault(run_dir, Disk()).stop = stop

    def observe(self, run_dir: str, attempt: int) -> AttemptObservation:
        """Return the state of an attempt."""
        disk = self.disks.get(run_dir, Disk())
        training = disk.started.get(attempt, WorkerStatus.NOT_YET)
        return AttemptObservation(training, disk.outcomes.get(attempt), disk.stop, ready=training is WorkerStatus.YES)

    def latest(self, run_dir: str) -> LatestAttempt:
        """Return the newest attempt that was prepared or fenced off."""
        disk = self.disks.get(run_dir, Disk())
        number = max(disk.prepared, disk.fence - 1)
        return LatestAttempt(number, fenced=disk.fence > number)

    def committed(self, run_dir: str) -> int | None:
        """Return the newest committed step; None if there is none."""
        return self.disks.get(run_dir, Disk()).committed or None

    # ------------------------------------------------------------------------------------------------- what happens

    def drive(self, driver: Driver) -> None:
        """Advance a driver by one step: it trains, ends or fails."""
        disk = self.disks[driver.job_id]
        stop = disk.stop if disk.stop is not None and disk.stop.attempt == driver.attempt else None
        if driver.ends_as is not None:
            driver.state = driver.ends_as
        elif disk.fence > driver.attempt:
            self._end(driver, Outcome(result="failed", code="fenced"))
        elif self.roll(0.03):
            driver.state = SubmissionStatus.FAILED
        elif stop is not None:
            self._end(driver, Outcome(result=stop.result))
        elif self.roll(0.02):
            retryable = self.chance.random() < 0.7
            self._end(driver, Outcome(result="failed", code="worker_failure", reason="it fails", retryable=retryable))
        elif driver.state is SubmissionStatus.PENDING:
            driver.state = SubmissionStatus.RUNNING
        elif self.roll(0.05) or self._too_many(driver):
            disk.started[driver.attempt] = WorkerStatus.LOST
        else:
            self._train(driver, disk)

    def _too_many(self, driver: Driver) -> bool:
        """Return True if the driver and its workers no longer fit the cluster."""
        return self.store.jobs[driver.job_id].attempts[driver.attempt - 1].workers + 1 > self.cpus

    def _train(self, driver: Driver, disk: Disk) -> None:
        job = self.store.jobs[driver.job_id]
        hold(not job.state.terminal, f"{job.id} trains and is {job.state}")
        others = [one for one in self.drivers.values() if one.job_id == driver.job_id and one is not driver]
        busy = [one for one in others if one.state is SubmissionStatus.RUNNING and one.ends_as is None]
        hold(not busy, f"{job.id} trains twice")
        hold(driver.attempt >= disk.committed_by, f"{job.id}: an older attempt commits")
        disk.started[driver.attempt] = WorkerStatus.YES
        disk.committed, disk.committed_by = disk.committed + 1, driver.attempt
        if disk.committed >= STEPS:
            self._end(driver, Outcome(result="succeeded"))

    def _end(self, driver: Driver, outcome: Outcome) -> None:
        self.disks[driver.job_id].outcomes[driver.attempt] = outcome
        driver.ends_as = SubmissionStatus.FAILED if outcome.result == "failed" else SubmissionStatus.SUCCEEDED

    def end_head(self) -> None:
        """Ask all drivers to save, as a head does that ends as planned; some end before they have saved."""
        for driver in self.drivers.values():
            disk = self.disks[driver.job_id]
            if not driver.state.alive or driver.ends_as is not None:
                continue
            if disk.stop is None or disk.stop.attempt != driver.attempt:
                disk.stop = Stop(mode="pause", attempt=driver.attempt, reason="the head ends")
            if self.chance.random() < 0.3:
                driver.state = SubmissionStatus.FAILED

    def user(self, job_id: str) -> None:
        """Request a random change of a job: pause, resume or cancel."""
        job, now = self.store.jobs[job_id], self.now
        wishes: list[Callable[[], Job]] = [
            lambda: request_pause(job, deadline=now + 10, now=now),
            lambda: request_resume(job, None, deadline=now + 10, now=now),
            lambda: request_resume(job, self._another_size(job), deadline=now + 10, now=now),
            lambda: request_cancel(job, deadline=now + 10, checkpoint=True, now=now),
        ]
        try:
            wanted = self.chance.choices(wishes, (4, 4, 1, 1))[0]()
        except IllegalState:
            return
        if wanted != job:
            self.save(wanted)

    def _another_size(self, job: Job) -> JobSize:
        most = self.chance.randint(1, 6)
        if self.chance.random() < 0.5:
            workers = WorkerRange(min=1, max=most)
            scaling = job.requested_scaling.model_copy(update={"num_workers": workers})
            return JobSize(scaling, tuple(range(1, most + 1)))
        return JobSize(job.requested_scaling.at(most))

    # ----------------------------------------------------------------------------------------------- what must hold

    def save(self, job: Job, *, owner: str | None = None, leads: bool = False) -> bool:
        """Store a change, and check all invariants."""
        before = self.store.jobs[job.id]
        if not self.store.save(job, owner=owner, leads=leads):
            return False
        hold(job.state in _reachable(before.state), f"{job.id}: {before.state} → {job.state}")
        hold(sum(attempt.ended_at is None for attempt in job.attempts) <= 1, f"{job.id} has two attempts")
        disk = self.disks.get(job.id, Disk())
        false = contradiction(job, committed=disk.committed, outcomes=disk.outcomes)
        hold(false is None, f"{job.id}: {false}")
        if job.state is JobState.SUCCEEDED:
            hold(self.disks[job.id].committed >= STEPS, f"{job.id} succeeded without all of its steps")
        if job.state is JobState.PAUSED:
            busy = [
                one for one in self._drivers_of(job.id) if one.state is SubmissionStatus.RUNNING and one.ends_as is None
            ]
            hold(not busy, f"{job.id} is paused and runs")
        holders = [one for one in map(QueueEntry.of, self.store.jobs.values()) if one.holds]
        hold(sum(one.needs["CPU"] for one in holders) <= CPUS, "more room is held than there is")
        for project, quota in QUOTAS.items():
            held = sum(one.project == project for one in holders)
            hold(held <= (quota.jobs or 0), f"{project} has {held} jobs")
        return True


@cache
def _reachable(state: JobState) -> frozenset[JobState]:
    """Return the states that one change may reach: the same, a transition's, or one beyond the queue."""
    direct = {state, *TRANSITIONS[state]}
    if state is JobState.PAUSED:
        direct |= TRANSITIONS[JobState.QUEUED]
    if state is JobState.PAUSING:
        direct |= {JobState.QUEUED}
    return frozenset(direct)
