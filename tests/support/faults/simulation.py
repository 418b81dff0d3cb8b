"""Replicas of the reconciler in a simulated world, which run until every job has ended.

Each replica runs in a greenlet that yields at every call of a port. Between two of its calls, other replicas, users and
drivers run. Calls fail before or after their effect, requests arrive late, and replicas die or pause until their leases
expire.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from greenlet import GreenletExit, greenlet

from service.domain.jobs.commands import request_resume
from service.domain.jobs.decision import Retry
from service.domain.jobs.job import Job, JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.queue.policy import QueuePolicy
from service.domain.queue.snapshot import QueueSnapshot
from service.errors import ClusterError
from service.ports import NewJob
from service.use_cases.jobs.reconcile import Reconciler, ReconcileTimings
from tests.support.faults.simulated_world import CPUS, PEACE, QUOTAS, DatabaseError, World, hold, spec

END = 600.0
"""Simulated seconds after which every job must have ended."""

_UNKNOWN: dict[str, Any] = {"capacity": None, "nodes": None, "dashboard": None, "status": SubmissionStatus.UNKNOWN}
"""Results of calls to a cluster that does not answer."""


class Port:
    """A replica's access to the world. Every call yields first, and may fail before or after its effect."""

    def __init__(self, target: Any, world: World, fault: type[Exception], *, faults: float) -> None:
        self._target, self._world, self._fault, self._faults = target, world, fault, faults

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self._target, name)

        def handed_over(*args: Any, **kwargs: Any) -> Any:
            scheduler = greenlet.getcurrent().parent
            assert scheduler is not None
            scheduler.switch()
            if self._world.roll(self._faults):
                if name in _UNKNOWN:
                    return _UNKNOWN[name]
                raise self._fault("before")
            answer = call(*args, **kwargs)
            if name not in _UNKNOWN and self._world.roll(self._faults):
                raise self._fault("after")
            return answer

        self.__dict__[name] = handed_over
        return handed_over


class Store:
    """A store that checks all invariants at every save."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.store, name)

    def save(self, job: Job, *, owner: str | None = None, leads: bool = False) -> bool:
        """Store a change, and check all invariants."""
        return self._world.save(job, owner=owner, leads=leads)


@dataclass
class Replica:
    """One process of the service."""

    world: World
    owner: str
    paused_until: float = 0.0
    body: greenlet | None = None

    def advance(self) -> None:
        """Run the replica to its next call; at random, kill it for a restart or pause it for longer than its leases."""
        if self.world.now < self.paused_until:
            return
        if self.body is None:
            self.body = greenlet(self._run)
        elif self.world.roll(0.006):
            self.body.throw(GreenletExit)
            self.body = None
            return
        elif self.world.roll(0.015):
            self.paused_until = self.world.now + 12.0
            return
        self.body.switch()

    def stop(self) -> None:
        """Stop the replica."""
        if self.body is not None:
            self.body.throw(GreenletExit)

    def _run(self) -> None:
        world = self.world
        reconciler = Reconciler(
            store=Port(Store(world), world, DatabaseError, faults=0.01),
            cluster=Port(world, world, ClusterError, faults=0.02),
            run_dirs=Port(world, world, OSError, faults=0.02),
            clock=world.clock,
            owner=self.owner,
            timings=ReconcileTimings(lease=5.0, retry=Retry(base=1.0, cap=8.0), stop_seconds=10.0),
            rules=QueuePolicy(quotas=QUOTAS, resize_seconds=5.0),
            queue=QueueSnapshot(),
        )
        while True:
            try:
                reconciler.run_once()
            except DatabaseError:
                continue


def simulate(seed: int) -> World:
    """Run a world until every job has ended. Raises RuleBroken if a job does not end in time."""
    world = World(seed)
    replicas = [Replica(world, f"replica-{number}") for number in range(world.chance.choice((1, 2, 2, 3)))]
    jobs = list(_jobs(world))
    try:
        while jobs or any(not job.state.terminal for job in world.store.jobs.values()):
            left = [(job.id, job.state) for job in world.store.jobs.values() if not job.state.terminal]
            hold(world.now < END, f"not ended: {left}")
            world.now += world.chance.random() * 0.4
            if jobs and world.chance.random() < 0.1:
                world.store.add(NewJob(replace(jobs.pop(0), created_at=world.now)))
            for replica in replicas:
                for _ in range(world.chance.randint(0, 12)):
                    replica.advance()
            _happen(world)
    finally:
        for replica in replicas:
            replica.stop()
    return world


def _jobs(world: World) -> Iterator[Job]:
    for number in range(world.chance.randint(2, 5)):
        most = world.chance.randint(1, 6)
        fewest = world.chance.choice((most, most, world.chance.randint(1, most)))
        wanted = spec(fewest, most, world.chance.choice((0, 0, 5)), world.chance.choice(("small", "big")))
        sizes = tuple(range(fewest, most + 1)) if fewest < most else ()
        job_id = f"job-{number}"
        yield Job(job_id, wanted, job_id, created_at=0.0, updated_at=0.0, sizes=sizes)


def _happen(world: World) -> None:
    """Advance drivers, users and faults: all that the service does not do itself."""
    for driver in list(world.drivers.values()):
        if driver.state.alive and world.chance.random() < 0.5:
            world.drive(driver)
    if world.late and world.chance.random() < 0.3:
        world.begin(world.late.pop(world.chance.randrange(len(world.late))))
    if world.store.jobs and world.roll(0.04):
        world.user(world.chance.choice(list(world.store.jobs)))
    if world.roll(0.01):
        world.silent_until = world.now + world.chance.random() * 20
    if world.roll(0.01):
        world.cpus = world.chance.choice((3.0, 5.0, CPUS, CPUS))
    if world.roll(0.005):
        world.end_head()
    if world.roll(0.003):
        # The cluster is replaced: the new one has no submissions, and pending requests are lost.
        world.drivers.clear()
        world.late.clear()
    if world.now >= PEACE:
        world.cpus = CPUS
        # Users resume their paused jobs, so that every job can end.
        for job in list(world.store.jobs.values()):
            if job.state is JobState.PAUSED:
                world.save(request_resume(job, None, deadline=world.now, now=world.now))
