"""Use cases of stored jobs: get, list, pause, resume, cancel, delete, usage. `submit` stores new ones.

Responses combine the store, the run directory and the latest snapshot of the queue.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import cached_property

from service.domain.access.permissions import require_role
from service.domain.access.roles import Principal, Role
from service.domain.jobs.commands import request_cancel, request_pause, request_resume
from service.domain.jobs.job import Job, JobSize, JobState
from service.domain.jobs.reason import Reason, storage_unavailable
from service.domain.jobs.usage import UsageByDay, begin_of, day_of, merge_usage, usage_by_day
from service.domain.queue.entry import QueueEntry
from service.domain.queue.snapshot import QueueSnapshot
from service.errors import Busy, IllegalState, JobNotFound
from service.ports import (
    EMPTY_SUMMARY,
    Cluster,
    JobQuery,
    JobStore,
    Preflight,
    Reading,
    RunDirs,
    RunSummary,
)
from service.use_cases.jobs.audit_entries import change_entry
from service.use_cases.jobs.first_view import FirstView
from service.use_cases.jobs.planning import Planner, sizes_of
from service.use_cases.jobs.specs import clone_advised, resize_spec
from train_loop.spec import ScalingSpec

_TRIES = 20


@dataclass(frozen=True)
class JobView:
    """A job with data from its run directory and the cluster."""

    job: Job
    summary: RunSummary
    dashboard_url: str | None
    waits_for: Reason | None = None
    """Reason why a queued job does not start, or why its attempt makes no progress."""
    place: int | None = None
    """Position in the queue, from 1."""
    read_at: float | None = None
    """Time at which the summary was read from storage (Unix seconds); None if it never was."""
    warnings: tuple[str, ...] = ()
    """Warnings of the plan, only for a job that was just submitted."""


@dataclass(frozen=True)
class Grace:
    """Default grace periods in seconds, after which a stopping driver is killed."""

    cancel: float
    pause: float


@dataclass(frozen=True)
class Jobs:
    """Use cases of stored jobs. Jobs that the caller may not see are reported as not found."""

    store: JobStore
    cluster: Cluster
    run_dirs: RunDirs
    preflight: Preflight
    queue: QueueSnapshot
    grace: Grace
    clock: Callable[[], float]
    first_view: FirstView = field(default_factory=lambda: FirstView(pending=False))

    @cached_property
    def planner(self) -> Planner:
        """Return the planner, which checks specs and keeps the plans of the newest."""
        return Planner(self.preflight, self.cluster, self.first_view)

    def get(self, caller: Principal, job_id: str) -> JobView:
        """Return a job. Raises JobNotFound."""
        return self.view(self.find(caller, job_id))

    def find(self, caller: Principal, job_id: str, role: Role = Role.VIEWER) -> Job:
        """Return the stored job if the caller has this role. Raises JobNotFound, Forbidden."""
        job = self.store.get(job_id)
        if job is None or not caller.has_role(Role.VIEWER, job.spec.project):
            raise JobNotFound(job_id)
        require_role(caller, role, job.spec.project)
        return job

    def page(self, caller: Principal, query: JobQuery) -> tuple[list[JobView], bool]:
        """Return the matching jobs, newest first, and True if there are more after them."""
        projects = caller.projects(Role.VIEWER, among=query.projects)
        found = self.store.page(replace(query, projects=projects, limit=query.limit + 1))
        return [self.view(job) for job in found[: query.limit]], len(found) > query.limit

    def cancel(self, caller: Principal, job_id: str, *, grace_seconds: float | None, checkpoint: bool) -> JobView:
        """Cancel a job; a repeated request can only shorten the grace period. Raises IllegalState, JobNotFound."""
        grace = self.grace.cancel if grace_seconds is None else grace_seconds
        return self._change(
            caller,
            job_id,
            "cancel",
            lambda job, now: request_cancel(job, deadline=now + grace, checkpoint=checkpoint, now=now),
        )

    def pause(self, caller: Principal, job_id: str, *, grace_seconds: float | None) -> JobView:
        """Pause a job: it saves, and leaves the cluster until it is resumed. Raises IllegalState, JobNotFound."""
        grace = self.grace.pause if grace_seconds is None else grace_seconds
        return self._change(caller, job_id, "pause", lambda job, now: request_pause(job, deadline=now + grace, now=now))

    def resume(self, caller: Principal, job_id: str, scaling: ScalingSpec | None) -> JobView:
        """Resume a job, at another size if `scaling` is given. Raises IllegalState, InvalidSpec, JobNotFound."""
        size: JobSize | None = None
        if scaling is not None:
            job = self.find(caller, job_id, Role.EDITOR)
            spec = resize_spec(job.spec, scaling)
            parent = self.run_dirs.parent(job.run_dir) if spec.checkpoint_source is not None else None
            with clone_advised(job_id, spec):
                checked = self.planner.check(spec, parent)
            size = JobSize(scaling, sizes_of(spec, checked.plans), checked.memory)
        grace = self.grace.pause
        return self._change(
            caller,
            job_id,
            "resume",
            lambda job, now: request_resume(job, size, deadline=now + grace, now=now),
        )

    def delete(self, caller: Principal, job_id: str) -> None:
        """Delete a finished job; its run directory and its usage are kept. Raises IllegalState, JobNotFound."""
        job = self.find(caller, job_id, Role.EDITOR)
        if not job.state.terminal:
            raise IllegalState(f"{job_id} is {job.state}; cancel it first, then delete it")
        now = self.clock()
        used = usage_by_day([job], since=0.0, until=now)
        # A finished job cannot change, except that another caller deletes it.
        entry = change_entry(caller, "delete", job, None, now=now)
        self.store.delete(job, {day: hours for (_, day), hours in used.items()}, entry)

    def usage(
        self, caller: Principal, first: date, last: date, *, projects: frozenset[str] | None = None
    ) -> UsageByDay:
        """Return the usage of jobs, including deleted ones, from one day to another, both inclusive, up to now."""
        now, projects = self.clock(), caller.projects(Role.VIEWER, among=projects)
        # `last` may be the last date of the calendar, which has no day after it.
        since, until = begin_of(first), now if last >= day_of(now) else begin_of(last + timedelta(days=1))
        deleted = self.store.used_by_deleted(first, last, projects=projects)
        return merge_usage(
            deleted, usage_by_day(self.store.used_between(since, until, projects=projects), since=since, until=until)
        )

    def _change(self, caller: Principal, job_id: str, action: str, change: Callable[[Job, float], Job]) -> JobView:
        for _ in range(_TRIES):
            job = self.find(caller, job_id, Role.EDITOR)
            now = self.clock()
            wanted = change(job, now)
            if wanted == job or self.store.save(wanted, entry=change_entry(caller, action, job, wanted, now=now)):
                return self.view(wanted)
        raise Busy(f"{job_id} changed {_TRIES} times while it was being changed; send the request again")

    def view(self, job: Job) -> JobView:
        """Return a job with data from its run directory, the cluster and the queue."""
        submission = job.attempt.submission_id if job.attempt else None
        # The cached summary: listing ten thousand jobs must not read ten thousand folders.
        read = self.run_dirs.latest_summary(job.run_dir) if job.attempts else Reading(EMPTY_SUMMARY, self.clock())
        dashboard = self.cluster.dashboard(submission)
        if not QueueEntry.of(job).waits:
            return JobView(job, read.summary, dashboard, _missing(job, read) or job.waits_for, read_at=read.read_at)
        admission, summary = self.queue.admission, read.summary
        return JobView(
            job, summary, dashboard, admission.waits.get(job.id), admission.places.get(job.id), read_at=read.read_at
        )


def _missing(job: Job, read: Reading) -> Reason | None:
    """Return the storage outage that makes the summary of an unfinished job stale; None if there is none."""
    if read.error is None or job.state.terminal:
        return None
    return storage_unavailable(read.error, read.since, root=read.root, trains=job.state is JobState.RUNNING)
