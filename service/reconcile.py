"""claim → observe → decide → apply, for every job that has not ended, again and again.

No transaction is open while the world is looked at or changed. A crash after any line is repaired by the next pass.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from service.domain.admission import view_queue
from service.domain.decide import Decision, Effect, Retry, Seen, decide, wanted_stop
from service.domain.job import Job, JobState
from service.errors import ClusterError
from service.ports import Cluster, JobStore, Launch, Lease, RunDirs

log = structlog.get_logger(__name__)
# More than the steps from QUEUED to a submitted attempt; what is left waits for the next pass.
_STEPS_PER_PASS = 5


@dataclass(frozen=True)
class Pace:
    """How long a lease lasts and how attempts are retried, in seconds."""

    lease: float
    retry: Retry


@dataclass(frozen=True)
class Reconciler:
    """Moves jobs from what was observed to what was asked for."""

    store: JobStore
    cluster: Cluster
    run_dirs: RunDirs
    clock: Callable[[], float]
    owner: str
    pace: Pace

    def run(self, stopped: threading.Event, *, interval: float) -> None:
        """Pass after pass until stopped. A pass that fails is logged, and the next one tries again."""
        while not stopped.is_set():
            try:
                self.run_once(stopped)
            except Exception:
                log.exception("reconcile_pass_failed")
            stopped.wait(interval)

    def run_once(self, stopped: threading.Event | None = None) -> None:
        """Let every job take the steps that are due. One job's trouble does not hold up the others."""
        for job in self.store.live():
            if stopped is not None and stopped.is_set():
                return
            try:
                self._steps(job.id)
            except Exception:
                log.exception("reconcile_failed", job=job.id)

    def _steps(self, job_id: str) -> None:
        for _ in range(_STEPS_PER_PASS):
            job = self._claim(job_id)
            if job is None or job.state.terminal:
                return
            decision = decide(job, self._observe(job), now=self.clock(), retry=self.pace.retry)
            if not self._apply(job, decision):
                return

    def _claim(self, job_id: str) -> Job | None:
        now = self.clock()
        return self.store.claim(job_id, Lease(self.owner, now, now + self.pace.lease))

    def _observe(self, job: Job) -> Seen:
        if job.state is JobState.QUEUED:
            return Seen(queue=view_queue(job, self.store.live(), self.cluster.capacity()))
        if job.attempt is None:
            return Seen()
        # The cluster first: an outcome is written before its driver ends, so a dead driver without one left none.
        submission = self.cluster.status(job.attempt.submission_id)
        sighting = self.run_dirs.observe(job.run_dir, job.attempt.number)
        return Seen(submission, sighting.training, sighting.outcome, sighting.stop)

    def _apply(self, job: Job, decision: Decision) -> bool:
        """Carry the decision out; whether it was stored, so that there may be a next step at once."""
        after = decision.job
        if decision.effect is not None:
            try:
                self._do(decision.effect, job)
            except (ClusterError, OSError) as error:
                log.warning("effect_failed", job=job.id, effect=decision.effect.name, error=str(error))
                self._explain(job, str(error))
                return False
        if after == job or not self.store.save(after, owner=self.owner):
            return False
        if after.state is not job.state:
            log.info("job_moved", job=job.id, from_state=job.state, to_state=after.state, reason=after.reason)
        return True

    def _explain(self, job: Job, reason: str) -> None:
        """Let the owner see why nothing moves; the next pass tries again."""
        if job.reason != reason:
            self.store.save(replace(job, reason=reason), owner=self.owner)

    def _do(self, effect: Effect, job: Job) -> None:
        attempt, stop = job.attempts[-1], wanted_stop(job)
        if effect is Effect.SUBMIT:
            self.run_dirs.prepare(job.run_dir, job.spec, attempt=attempt.number)
            self.cluster.submit(
                Launch(attempt.submission_id, job.id, job.spec.name, attempt=attempt.number, run_dir=job.run_dir)
            )
        elif effect is Effect.STOP_NOW:
            self.cluster.stop(attempt.submission_id)
        elif stop is not None:
            self.run_dirs.ask_to_stop(job.run_dir, stop)
