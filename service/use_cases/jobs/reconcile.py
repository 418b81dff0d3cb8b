"""The reconcile loop: admit queued jobs, then claim → observe → decide → apply for each active job.

No transaction is open during calls to the cluster or storage. After a crash at any line, the next pass repairs the
state. Several reconcilers may run: each job belongs to the holder of its lease, and one leader decides about the queue.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import structlog

from service.domain.changes import outcomes, waited
from service.domain.jobs.decide import (
    NO_ATTEMPT,
    Decision,
    Effect,
    Observation,
    Retry,
    SubmissionStatus,
    decide,
    hangs,
    wanted_stop,
)
from service.domain.jobs.job import Attempt, Job, JobState
from service.domain.jobs.reason import Code, Reason, storage_unavailable
from service.domain.jobs.transitions import preempt, resize, start, stop_with_service
from service.domain.queue.admission import admit
from service.domain.queue.entry import QueueEntry
from service.domain.queue.policy import QueuePolicy
from service.domain.queue.snapshot import Admission, QueueSnapshot
from service.errors import ClusterError, NotReady, StorageAway
from service.fault_log import FaultLog
from service.ports import (
    AttemptObservation,
    Cluster,
    JobStore,
    Lease,
    Metrics,
    NoMetrics,
    NoTracer,
    RunDirs,
    SubmitRequest,
    Tracer,
)
from service.use_cases.jobs.cluster_view import ClusterView
from service.use_cases.jobs.idle import IdleTimers
from train_loop.plan import Capacity
from train_loop.run_dir import is_transient, storage_failed

log = structlog.get_logger(__name__)
# More than the steps from the first attempt to its submission; further steps wait for the next pass.
_STEPS_PER_PASS = 5
_TRIES, _STOP_PAUSE_SECONDS = 5, 0.2
_REST = 9.0
"""Pause after a pass, as a multiple of its CPU time: 90% of a core stays free for requests with any number of jobs."""


@dataclass(frozen=True)
class ReconcileTimings:
    """Timings of the reconciler in seconds: lease, retries of attempts, and the timeout of a preemption or resize."""

    lease: float
    retry: Retry
    room: float = 600.0


@dataclass(frozen=True)
class Reconciler:
    """Loop that moves jobs from their observed state to the requested one."""

    store: JobStore
    cluster: Cluster
    run_dirs: RunDirs
    clock: Callable[[], float]
    owner: str
    pace: ReconcileTimings
    rules: QueuePolicy = field(default_factory=QueuePolicy)
    board: QueueSnapshot = field(default_factory=QueueSnapshot)
    watch: Metrics = field(default_factory=NoMetrics)
    traces: Tracer = field(default_factory=NoTracer)
    faults: FaultLog = field(default_factory=FaultLog)

    @cached_property
    def view(self) -> ClusterView:
        """Return the cluster, with this reconciler's observations of it."""
        return ClusterView(self.cluster, self.clock)

    @cached_property
    def idle(self) -> IdleTimers:
        """Return the idle time of each attempt."""
        return IdleTimers(self.clock)

    def run(self, stopped: threading.Event, *, interval: float) -> None:
        """Run passes until stopped. An error in a pass is logged, and the next pass retries."""
        while not stopped.is_set():
            began, at = time.thread_time(), time.monotonic()
            try:
                with self.traces.span("reconcile.pass"):
                    self.run_once(stopped)
                self.watch.passed(time.monotonic() - at)
            except NotReady as error:
                self.faults.warn("reconcile_pass_failed", error)
            except Exception as error:
                self.faults.report("reconcile_pass_failed", error)
            stopped.wait(max(interval, _REST * (time.thread_time() - began)))

    def run_once(self, stopped: threading.Event | None = None) -> None:
        """Run one pass: take the due steps of every job. An error of one job does not delay the others."""
        try:
            # Finished jobs first: they free capacity for queued ones.
            self._look_after(self.store.active(), stopped)
            self._look_after(self._admit(stopped), stopped)
        finally:
            # Metrics and alerts need the cluster's status also without jobs and without the database.
            self.view.look()
            self.board.silent_since = self.view.silent_since
            self.board.unreachable = self.view.unreachable() is not None

    def stop_jobs(self, *, seconds: float) -> None:
        """Ask all active jobs to save and stop, and reconcile them until they have stopped or the timeout expires.

        Called before embedded Ray is stopped, after the last reconcile pass.
        """
        end, deadline = time.monotonic() + seconds, self.clock() + seconds
        asked = [job_id for job_id in self.store.active() if self._ask_to_stop(job_id, deadline)]
        if asked:
            log.info("jobs_asked_to_save", jobs=len(asked), seconds=seconds)
        while (left := set(asked) & set(self.store.active())) and time.monotonic() < end:
            self._look_after(sorted(left), None)
            time.sleep(_STOP_PAUSE_SECONDS)
        if left:
            log.warning("jobs_did_not_save_in_time", jobs=sorted(left), seconds=seconds)

    def _ask_to_stop(self, job_id: str, deadline: float) -> bool:
        """Ask a job to stop, unless it is stopping already; return whether it is stopping."""
        for _ in range(_TRIES):
            job = self.store.claim(job_id, self._lease())
            if job is None or job.state.terminal:
                return False
            if job.state in (JobState.PAUSING, JobState.CANCELLING):
                return True
            if self._store(job, stop_with_service(job, deadline=deadline, now=self.clock())):
                return True
        return False

    def _look_after(self, job_ids: list[str], stopped: threading.Event | None) -> None:
        for job_id in job_ids:
            try:
                with self.traces.span("reconcile.job", **{"trainshed.job.id": job_id}):
                    self._steps(job_id, stopped)
            except NotReady:
                # The next job would wait as long for the same database.
                raise
            except Exception as error:
                self.faults.report("reconcile_failed", error, job=job_id)

    def _admit(self, stopped: threading.Event | None) -> list[str]:
        """Decide about the queue if this reconciler leads; return the jobs that start."""
        if _is_over(stopped):
            return []
        leads, now = self.store.lead(self._lease()), self.clock()
        admission, tickets = self._look_at_queue(now), self.board.tickets
        if not leads:
            return []
        for job_id, whom in admission.preempts.items():
            deadline = now + self.pace.room
            self._change(tickets[job_id], partial(preempt, whom=whom, deadline=deadline, now=now))
        for job_id, workers in admission.resizes.items():
            self._change(tickets[job_id], partial(resize, workers=workers, patience=self.pace.room, now=now))
        return [
            job_id
            for job_id in admission.starts
            if self._change(tickets[job_id], partial(start, now=now, workers=admission.workers.get(job_id)))
        ]

    def _look_at_queue(self, now: float) -> Admission:
        """Return the decisions about the queue; the previous ones if their inputs are unchanged."""
        board, mark = self.board, self.store.queue_mark()
        if changed := mark != board.mark:
            board.read(mark, self.store.tickets())
        # Requested only if needed: each request takes CPU time of the head node from training.
        cluster = self.view.capacity() if board.waits or board.elastic else Capacity({})
        # Elastic jobs may grow as time passes, without any other change.
        if changed or cluster is None or cluster != board.cluster or board.elastic or board.admission.acts:
            silent = self.view.unreachable()
            admission = admit(board.tickets.values(), cluster, self.rules, now=now, unreachable=silent)
            board.cluster, board.admission = cluster, admission
        return board.admission

    def _change(self, ticket: QueueEntry, change: Callable[[Job], Job]) -> bool:
        """Change a job as the leader of the queue, unless it has changed since the decision.

        Like a user's request, this needs no lease of the job, which another reconciler may hold.
        """
        job = self.store.get(ticket.id)
        if job is None or QueueEntry.of(job) != ticket:
            return False
        return self._store(job, change(job), leads=True)

    def _steps(self, job_id: str, stopped: threading.Event | None) -> None:
        for _ in range(_STEPS_PER_PASS):
            # A service that shuts down has released its leases, and must not acquire new ones.
            if _is_over(stopped):
                return
            job = self.store.claim(job_id, self._lease())
            if job is None:
                return
            seen = self._observe(job)
            decision = decide(_without_outage(job, seen), seen, now=self.clock(), retry=self.pace.retry)
            if not self._apply(job, decision):
                return

    def _lease(self) -> Lease:
        now = self.clock()
        return Lease(self.owner, now, now + self.pace.lease)

    def _observe(self, job: Job) -> Observation:
        if job.attempt is None:
            return Observation()
        # The cluster first: a driver writes its outcome before it exits, so a dead driver without one left none.
        submission = self.view.status(job.attempt.submission_id)
        try:
            sighting = self.run_dirs.observe(job.run_dir, job.attempt.number)
            latest = NO_ATTEMPT if submission.alive else self.run_dirs.latest(job.run_dir)
        except Exception as error:
            if not _storage_failed(error):
                raise
            self._explain(job, error)
            # The attempt may have written an outcome, but lost storage must not keep a job alive forever.
            late = job.wish is not None and self.clock() >= job.wish.deadline
            return Observation(submission if late else SubmissionStatus.UNKNOWN, unreachable=self.view.unreachable())
        self.view.note(job.id, sighting)
        silent = submission is SubmissionStatus.UNKNOWN or job.attempt.submitted_at is None
        quiet = self.idle.seconds(job, sighting)
        over = sighting.outcome is not None or not (silent or submission.alive) or hangs(job, quiet)
        committed = self.run_dirs.committed(job.run_dir) if over else None
        known = job.attempt.number
        return Observation(
            submission=submission,
            training=sighting.training,
            outcome=sighting.outcome,
            stop=sighting.stop,
            committed=committed,
            lost=sighting.lost,
            condition=sighting.condition or self._silent_condition(job, sighting) if submission.alive else None,
            unreachable=self.view.unreachable(),
            group_up=sighting.ready,
            quiet=quiet,
            begun=sighting.size > 0 or (latest.over and latest.attempt >= known),
            latest=latest if latest.attempt > known else None,
            previous=self._previous(job, job.attempt),
            observed=True,
        )

    def _silent_condition(self, job: Job, sighting: AttemptObservation) -> Reason | None:
        """Return the reason why an attempt makes no progress if it reports none itself."""
        return self.view.no_room(job, sighting) or self.idle.stalled(job)

    def _previous(self, job: Job, attempt: Attempt) -> SubmissionStatus:
        """Return the status of the previous attempt, as long as the newest one is not submitted."""
        if attempt.submitted_at is not None or attempt.number == 1:
            return SubmissionStatus.MISSING
        return self.view.status(job.attempts[-2].submission_id)

    def _apply(self, job: Job, decision: Decision) -> bool:
        """Apply a decision; return True if it changed the stored job, which may then have a next step."""
        for effect in decision.effects:
            try:
                self._do(effect, job)
            except Exception as error:
                if not isinstance(error, ClusterError) and not _storage_failed(error):
                    raise
                self.faults.warn("effect_failed", error, job=job.id, effect=effect.name)
                if decision.needed:
                    self._explain(job, error, effect=effect.name)
                    return False
        return decision.job != job and self._store(job, decision.job)

    def _store(self, job: Job, after: Job, *, leads: bool = False) -> bool:
        if not self.store.save(after, owner=self.owner, leads=leads):
            return False
        self._tell(job, after)
        if after.state is not job.state:
            if after.state.terminal:
                self.idle.forget(job.id)
                self.view.forget(job.id)
            reason = after.reason.message if after.reason else None
            log.info("job_moved", job=job.id, from_state=job.state, to_state=after.state, reason=reason)
        elif after.reason is not None and (job.reason is None or job.reason.code is not after.reason.code):
            log.info("job_waits", job=job.id, code=after.reason.code, reason=after.reason.message)
        return True

    def _tell(self, before: Job, after: Job) -> None:
        for outcome in outcomes(before, after):
            self.watch.ended(outcome)
        if after.state is not before.state:
            self.watch.moved(after.state)
        if (seconds := waited(before, after)) is not None:
            self.watch.waited(seconds)

    def _explain(self, job: Job, error: Exception, **told: str) -> None:
        """Store and log the error that blocks a job, once per reason; the next pass retries."""
        reason = _reason(error)
        if job.reason != reason and self.store.save(replace(job, reason=reason), owner=self.owner):
            log.warning("job_cannot_move", job=job.id, code=reason.code, error=str(error), **told)

    def _do(self, effect: Effect, job: Job) -> None:
        if effect is Effect.RELEASE_PARENT:
            self.run_dirs.let_go(job.run_dir)
            return
        attempt = job.attempts[-1]
        if effect is Effect.SUBMIT:
            self.run_dirs.prepare(job.run_dir, job.spec, job.size, attempt=attempt.number)
            self.cluster.submit(
                SubmitRequest(
                    attempt.submission_id,
                    job.id,
                    job.spec.name,
                    attempt=attempt.number,
                    run_dir=job.run_dir,
                    project=job.spec.project,
                    labels=job.spec.labels,
                )
            )
        elif effect is Effect.STOP_NOW:
            self.cluster.stop(attempt.submission_id)
        elif effect is Effect.STOP_PREVIOUS:
            self.cluster.stop(job.attempts[-2].submission_id)
        elif effect is Effect.FENCE_OFF:
            self.run_dirs.fence_off(job.run_dir, attempt=attempt.number + 1)
        elif job.wish is not None:
            self.run_dirs.ask_to_stop(job.run_dir, wanted_stop(job.wish, attempt))


def _is_over(stopped: threading.Event | None) -> bool:
    return stopped is not None and stopped.is_set()


def _storage_failed(error: Exception) -> bool:
    return isinstance(error, StorageAway) or storage_failed(error)


def _reason(error: Exception) -> Reason:
    if isinstance(error, StorageAway):
        return storage_unavailable(error.error, error.since, root=error.root)
    if is_transient(error):
        return storage_unavailable(str(error))
    return Reason(Code.EFFECT_FAILED, str(error), "the service retries until it succeeds")


def _without_outage(job: Job, seen: Observation) -> Job:
    """Return the job without the reason that its storage is unavailable, once its run directory was read."""
    away = job.reason is not None and job.reason.code is Code.STORAGE_UNAVAILABLE
    return replace(job, reason=None) if away and seen.observed else job
