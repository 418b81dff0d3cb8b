"""The reconcile loop: admit queued jobs, then claim → observe → decide → apply for each active job.

No transaction is open during calls to the cluster or storage. After a crash at any line, the next pass repairs the
state. Several reconcilers may run: each job belongs to the holder of its lease, and one leader decides about the queue.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from service.domain.jobs.decide import decide, give_up
from service.domain.jobs.decision import Decision, Retry
from service.domain.jobs.job import ACTIVE, Job, JobState
from service.domain.jobs.observation import Observation
from service.domain.jobs.reason import Code, Reason, storage_unavailable
from service.domain.jobs.transitions import preempt, resize, start, stop_with_service
from service.domain.metrics import attempt_results, wait_seconds
from service.domain.queue.admission import admit
from service.domain.queue.entry import QueueEntry
from service.domain.queue.policy import QueuePolicy
from service.domain.queue.snapshot import Admission, QueueSnapshot
from service.errors import ClusterError, NotReady, StorageAway, UnusableRunDir
from service.fault_log import FaultLog
from service.ports import Cluster, JobStore, Lease, Metrics, NoMetrics, NoTracer, RunDirs, Tracer
from service.use_cases.jobs.cluster_view import ClusterView
from service.use_cases.jobs.effects import Effects
from service.use_cases.jobs.idle import IdleTimers
from service.use_cases.jobs.observe import Observer
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
    stop_seconds: float = 600.0


@dataclass(eq=False)
class Reconciler:
    """Loop that moves jobs from their observed state to the requested one. It keeps its observations in memory."""

    store: JobStore
    cluster: Cluster
    run_dirs: RunDirs
    clock: Callable[[], float]
    owner: str
    timings: ReconcileTimings
    rules: QueuePolicy = field(default_factory=QueuePolicy)
    queue: QueueSnapshot = field(default_factory=QueueSnapshot)
    metrics: Metrics = field(default_factory=NoMetrics)
    traces: Tracer = field(default_factory=NoTracer)
    faults: FaultLog = field(default_factory=FaultLog)
    view: ClusterView = field(init=False)
    idle: IdleTimers = field(init=False)
    observer: Observer = field(init=False)
    effects: Effects = field(init=False)

    def __post_init__(self) -> None:
        self.view, self.idle = ClusterView(self.cluster, self.clock), IdleTimers(self.clock)
        self.observer = Observer(self.view, self.run_dirs, self.idle, self.clock)
        self.effects = Effects(self.cluster, self.run_dirs)

    def run(self, stopped: threading.Event, *, interval: float) -> None:
        """Run passes until stopped. An error in a pass is logged, and the next pass retries."""
        while not stopped.is_set():
            began, at = time.thread_time(), time.monotonic()
            try:
                with self.traces.span("reconcile.pass"):
                    self.run_once(stopped)
                self.metrics.passed(time.monotonic() - at)
            except NotReady as error:
                self.faults.warn("reconcile_pass_failed", error)
            except Exception as error:
                self.faults.report("reconcile_pass_failed", error)
            stopped.wait(max(interval, _REST * (time.thread_time() - began)))

    def run_once(self, stopped: threading.Event | None = None) -> None:
        """Run one pass: take the due steps of every job. An error of one job does not delay the others."""
        try:
            # Finished jobs first: they free capacity for queued ones.
            self._reconcile_all(self.store.active(), stopped)
            self._reconcile_all(self._admit(stopped), stopped)
        finally:
            # Metrics and alerts need the cluster's status also without jobs and without the database.
            self.view.probe()
            self.queue.silent_since, self.queue.head = self.view.silent_since, self.view.head
            self.queue.unreachable = self.view.unreachable() is not None

    def stop_jobs(self, *, seconds: float) -> None:
        """Ask all active jobs to save and stop, and reconcile them until they have stopped or the timeout expires.

        Called before embedded Ray is stopped, after the last reconcile pass.
        """
        end, deadline = time.monotonic() + seconds, self.clock() + seconds
        stopping = [job_id for job_id in self.store.active() if self._request_stop(job_id, deadline)]
        if stopping:
            log.info("jobs_asked_to_save", jobs=len(stopping), seconds=seconds)
        while (left := set(stopping) & set(self.store.active())) and time.monotonic() < end:
            self._reconcile_all(sorted(left), None)
            time.sleep(_STOP_PAUSE_SECONDS)
        if left:
            log.warning("jobs_did_not_save_in_time", jobs=sorted(left), seconds=seconds)

    def _request_stop(self, job_id: str, deadline: float) -> bool:
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

    def _reconcile_all(self, job_ids: list[str], stopped: threading.Event | None) -> None:
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
        admission, entries = self._decide_queue(now), self.queue.entries
        if not leads:
            return []
        for job_id, other in admission.preempts.items():
            deadline, whom = now + self.timings.stop_seconds, entries[other].named_to(entries[job_id].project)
            self._change(entries[job_id], partial(preempt, whom=whom, deadline=deadline, now=now))
        for job_id, workers in admission.resizes.items():
            self._change(entries[job_id], partial(resize, workers=workers, timeout=self.timings.stop_seconds, now=now))
        return [
            job_id
            for job_id in admission.starts
            if self._change(entries[job_id], partial(start, now=now, workers=admission.workers.get(job_id)))
        ]

    def _decide_queue(self, now: float) -> Admission:
        """Return the decisions about the queue; the previous ones if their inputs are unchanged."""
        queue, version = self.queue, self.store.queue_version()
        if changed := version != queue.version:
            queue.read(version, self.store.queue_entries())
        # Requested only if needed: each request takes CPU time of the head node from training.
        cluster = self.view.capacity() if queue.waits or queue.elastic else Capacity({})
        # Elastic jobs may grow as time passes, without any other change.
        if changed or cluster is None or cluster != queue.cluster or queue.elastic or queue.admission.has_actions:
            silent = self.view.unreachable()
            admission = admit(queue.entries.values(), cluster, self.rules, now=now, unreachable=silent)
            queue.cluster, queue.admission = cluster, admission
        return queue.admission

    def _change(self, entry: QueueEntry, change: Callable[[Job], Job]) -> bool:
        """Change a job as the leader of the queue, unless it has changed since the decision.

        Like a user's request, this needs no lease of the job, which another reconciler may hold.
        """
        job = self.store.get(entry.id)
        if job is None or QueueEntry.of(job) != entry:
            return False
        return self._store(job, change(job), leads=True)

    def _steps(self, job_id: str, stopped: threading.Event | None) -> None:
        for _ in range(_STEPS_PER_PASS):
            # A service that shuts down has released its leases, and must not acquire new ones.
            if _is_over(stopped):
                return
            job = self.store.claim(job_id, self._lease())
            if job is None:
                self._learn_head(job_id)
                return
            if job.state not in ACTIVE:
                # An error of its storage would replace the reason for its end.
                return
            seen = self._observe(job)
            decision = decide(_without_outage(job, seen), seen, now=self.clock(), retry=self.timings.retry)
            if not self._apply(job, decision):
                return

    def _learn_head(self, job_id: str) -> None:
        """Read the node of the lost head from a job that another reconciler has, which alone observes it."""
        if not self.view.seeks_head(job_id):
            return
        job = self.store.get(job_id)
        if job is None or job.attempt is None:
            return
        try:
            self.view.note_head(self.run_dirs.observe(job.run_dir, job.attempt.number).head)
        except Exception as error:
            if not _storage_failed(error):
                raise
            self.faults.warn("head_unknown", error, job=job_id)

    def _lease(self) -> Lease:
        now = self.clock()
        return Lease(self.owner, now, now + self.timings.lease)

    def _observe(self, job: Job) -> Observation:
        submission = self.observer.submission(job)
        try:
            return self.observer.observe(job, submission)
        except Exception as error:
            if not _storage_failed(error):
                raise
            self._explain(job, error)
            return self.observer.without_storage(job, submission)

    def _apply(self, job: Job, decision: Decision) -> bool:
        """Apply a decision; return True if it changed the stored job, which may then have a next step."""
        for effect in decision.effects:
            try:
                self.effects.run(effect, job)
            except UnusableRunDir as error:
                return self._apply(job, give_up(job, str(error), now=self.clock()))
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
        self._count(job, after)
        if after.state is not job.state:
            if after.state.terminal:
                self.idle.forget(job.id)
                self.view.forget(job.id)
            reason = after.reason.message if after.reason else None
            log.info("job_moved", job=job.id, from_state=job.state, to_state=after.state, reason=reason)
        elif after.reason is not None and (job.reason is None or job.reason.code is not after.reason.code):
            log.info("job_waits", job=job.id, code=after.reason.code, reason=after.reason.message)
        return True

    def _count(self, before: Job, after: Job) -> None:
        for result in attempt_results(before, after):
            self.metrics.ended(result)
        if after.state is not before.state:
            self.metrics.moved(after.state)
        if (seconds := wait_seconds(before, after)) is not None:
            self.metrics.waited(seconds)

    def _explain(self, job: Job, error: Exception, **fields: str) -> None:
        """Store and log the error that blocks a job, once per reason; the next pass retries."""
        reason = _reason(error, trains=job.state is JobState.RUNNING)
        if job.reason != reason and self.store.save(replace(job, reason=reason), owner=self.owner):
            log.warning("job_cannot_move", job=job.id, code=reason.code, error=str(error), **fields)


def _is_over(stopped: threading.Event | None) -> bool:
    return stopped is not None and stopped.is_set()


def _storage_failed(error: Exception) -> bool:
    return isinstance(error, StorageAway) or storage_failed(error)


def _reason(error: Exception, *, trains: bool) -> Reason:
    if isinstance(error, StorageAway):
        return storage_unavailable(error.error, error.since, root=error.root, trains=trains)
    if is_transient(error):
        return storage_unavailable(str(error), trains=trains)
    return Reason(Code.EFFECT_FAILED, str(error), "the service retries until it succeeds")


def _without_outage(job: Job, seen: Observation) -> Job:
    """Return the job without the reason that its storage is unavailable, once its run directory was read."""
    away = job.reason is not None and job.reason.code is Code.STORAGE_UNAVAILABLE
    return replace(job, reason=None) if away and seen.observed else job
