"""Observation of a job: its submission in the cluster, then its run directory. The order of the reads matters."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from service.domain.jobs.decide import hangs
from service.domain.jobs.job import Attempt, Job
from service.domain.jobs.observation import NO_ATTEMPT, LatestAttempt, Observation, SubmissionStatus
from service.domain.jobs.reason import Reason, run_dir_gone
from service.ports import AttemptObservation, RunDirs
from service.use_cases.jobs.cluster_view import ClusterView
from service.use_cases.jobs.idle import IdleTimers


@dataclass(frozen=True)
class Observer:
    """Observer of the newest attempt of each job."""

    cluster: ClusterView
    run_dirs: RunDirs
    idle: IdleTimers
    clock: Callable[[], float]

    def submission(self, job: Job) -> SubmissionStatus:
        """Return the status of the newest attempt in the cluster; UNKNOWN if there is none.

        Read it before the run directory: a driver writes its outcome before it exits. A dead driver without an outcome
        then left none.
        """
        return self.cluster.status(job.attempt.submission_id) if job.attempt else SubmissionStatus.UNKNOWN

    def observe(self, job: Job, submission: SubmissionStatus) -> Observation:
        """Observe a job whose submission has this status. Raises StorageAway and the errors of storage."""
        if job.attempt is None:
            return Observation()
        written = self.run_dirs.observe(job.run_dir, job.attempt.number)
        if written.outcome is None and submission is not SubmissionStatus.UNKNOWN and not submission.alive:
            # Ray may crash the driver while it disconnects. Then nothing of the attempt is left running.
            written = replace(written, outcome=written.finished)
        latest = self._latest(job, submission)
        self.cluster.note(job.id, written)
        idle_seconds = self.idle.seconds(job, written)
        has_output = written.size > 0 or (latest.fenced and latest.attempt >= job.attempt.number)
        return Observation(
            submission=submission,
            training=written.training,
            outcome=written.outcome,
            stop=written.stop,
            committed=self._committed(job, submission, written, has_output=has_output, idle_seconds=idle_seconds),
            loss_reason=written.lost,
            driver_end=self._driver_end(job.attempt, submission, written),
            waits_for=written.waits_for,
            condition=written.condition or self._silent_condition(job, written) if submission.alive else None,
            unreachable=self.cluster.unreachable(),
            group_up=written.ready,
            idle_seconds=idle_seconds,
            has_output=has_output,
            newer=latest if latest.attempt > job.attempt.number else None,
            previous=self._previous(job, job.attempt),
            gone=run_dir_gone(job.run_dir) if written.gone and job.attempt.submitted_at is not None else None,
            observed=True,
        )

    def without_storage(self, job: Job, submission: SubmissionStatus) -> Observation:
        """Return the observation of a job whose run directory cannot be read.

        The attempt may have written an outcome, so its status is unknown. After the deadline of a stop request it is
        not: lost storage must not keep a job alive forever.
        """
        late = job.stop_request is not None and self.clock() >= job.stop_request.deadline
        status = submission if late else SubmissionStatus.UNKNOWN
        return Observation(status, unreachable=self.cluster.unreachable())

    def _latest(self, job: Job, submission: SubmissionStatus) -> LatestAttempt:
        """Return the newest attempt of the run directory. A live submission is the newest, so nothing is read."""
        return NO_ATTEMPT if submission.alive else self.run_dirs.latest(job.run_dir)

    def _committed(
        self,
        job: Job,
        submission: SubmissionStatus,
        written: AttemptObservation,
        *,
        has_output: bool,
        idle_seconds: float,
    ) -> int | None:
        """Return the newest committed step; None as long as the attempt may commit another one."""
        # A reconciler that lost its lease may have submitted the attempt without storing that.
        submitted = submission is not SubmissionStatus.MISSING or job.attempts[-1].submitted_at is not None
        exited = (submitted or has_output) and not (submission is SubmissionStatus.UNKNOWN or submission.alive)
        may_have_ended = written.outcome is not None or exited or hangs(job, idle_seconds)
        return self.run_dirs.committed(job.run_dir) if may_have_ended else None

    def _driver_end(self, attempt: Attempt, submission: SubmissionStatus, written: AttemptObservation) -> str | None:
        """Return how the driver of a live attempt ended if it left no outcome."""
        if written.outcome is not None or attempt.ended_at is not None or attempt.submitted_at is None:
            return None
        return self.cluster.end_of(attempt.submission_id, submission)

    def _previous(self, job: Job, attempt: Attempt) -> SubmissionStatus:
        """Return the status of the previous attempt, as long as the newest one is not submitted."""
        if attempt.submitted_at is not None or attempt.number == 1:
            return SubmissionStatus.MISSING
        return self.cluster.status(job.attempts[-2].submission_id)

    def _silent_condition(self, job: Job, written: AttemptObservation) -> Reason | None:
        """Return the reason why an attempt makes no progress if it reports none itself."""
        return self.cluster.no_room(job, written) or self.idle.stalled(job)
