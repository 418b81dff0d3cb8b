"""Use cases of jobs: submit, clone, plan, get, page, pause, resume, cancel, delete.

Responses combine the store, the run directory and the latest snapshot of the queue.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, timedelta

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from service.domain.access.roles import OPERATOR, AuditEntry, Principal, Role
from service.domain.jobs.commands import cancelled, paused, resumed
from service.domain.jobs.job import Job, JobState, Lineage
from service.domain.jobs.lineage import check_steps_remaining, parent_of
from service.domain.jobs.reason import Reason, storage_unavailable
from service.domain.jobs.usage import UsageByDay, begin_of, day_of, together, usage_by_day
from service.domain.queue.entry import QueueEntry
from service.domain.queue.snapshot import QueueSnapshot
from service.errors import (
    Busy,
    CheckpointNotFound,
    Forbidden,
    IllegalState,
    InvalidSpec,
    JobNotFound,
    KeyInFlight,
    NotReady,
)
from service.ports import (
    EMPTY_SUMMARY,
    Cluster,
    IdempotencyKey,
    JobQuery,
    JobStore,
    NewJob,
    Preflight,
    Reading,
    RunDirs,
    RunSummary,
)
from service.use_cases.jobs.idempotency import KeysInFlight
from service.use_cases.jobs.planning import Planner, Plans, PlanView, sizes_of
from service.use_cases.jobs.specs import overridden, parsed, sized
from train_loop.run_dir import Manifest, Parent
from train_loop.spec import JobSpec, ScalingSpec

_TRIES = 20
_SMALL = 8192
"""Maximum size in bytes of a spec that is parsed in a group submit: parsing, at most 5 ms, delays the others."""


@dataclass(frozen=True)
class JobView:
    """A job with data from its run directory and the cluster."""

    job: Job
    story: RunSummary
    dashboard_url: str | None
    waits_for: Reason | None = None
    """Reason why a queued job does not start, or why its attempt makes no progress."""
    place: int | None = None
    """Position in the queue, from 1."""
    read_at: float | None = None
    """Time at which the story was read from storage (Unix seconds); None if it never was."""
    warnings: tuple[str, ...] = ()
    """Warnings about the cluster's nodes, only for a job that was just submitted."""


@dataclass(frozen=True)
class Grace:
    """Default grace periods in seconds, after which a stopping driver is killed."""

    cancel: float
    pause: float


@dataclass(frozen=True)
class Jobs:
    """Use cases of jobs."""

    store: JobStore
    cluster: Cluster
    run_dirs: RunDirs
    preflight: Preflight
    board: QueueSnapshot
    default_root: str
    grace: Grace
    clock: Callable[[], float]
    new_id: Callable[[], str]
    caller: Principal = OPERATOR
    """The caller; jobs that it may not see are reported as not found."""
    in_flight: KeysInFlight = field(default_factory=KeysInFlight)

    def of(self, caller: Principal) -> "Jobs":
        """Return these use cases for another caller."""
        return replace(self, caller=caller)

    @property
    def planner(self) -> Planner:
        """Return the planner, which checks specs."""
        return Planner(self.preflight, self.cluster)

    def submit(self, body: bytes, once: IdempotencyKey | None) -> tuple[JobView, bool]:
        """Store a job durably. Return False with it if its Idempotency-Key was used before. Raises ServiceError."""

        def begin() -> NewJob:
            spec = self._parsed(body)
            return self._new(self._begin(spec, self.planner.check(spec)), once)

        return self._once(once, begin)

    def submit_known(self, asked: Sequence[tuple[Principal, bytes, IdempotencyKey | None]]) -> list[JobView | None]:
        """Store the jobs whose checks are cached in one durable commit; None for each job that needs `submit`."""
        found = [self.of(caller)._known(body, once) for caller, body, once in asked]
        if (added := [new for new in found if new is not None]) and not self.store.add_all(added, now=self.clock()):
            return [None] * len(asked)
        return [None if new is None else self._new_view(new.job) for new in found]

    def _known(self, body: bytes, once: IdempotencyKey | None) -> NewJob | None:
        """Return the new job if all its checks are cached and pass, else None."""
        if len(body) > _SMALL:
            return None
        try:
            spec = self._parsed(body)
            plans = self.planner.known(spec)
            return None if plans is None else self._new(self._begin(spec, plans), once)
        except (InvalidSpec, Forbidden):
            # `submit` reports the error, because an idempotency conflict takes precedence.
            return None

    def clone(
        self, job_id: str, step: int | None, overrides: Mapping[str, JsonValue], once: IdempotencyKey | None
    ) -> tuple[JobView, bool]:
        """Store a clone of a job: its spec with overrides, starting from one of its checkpoints. Returns as `submit`.

        `step` None means the newest checkpoint, or a start from scratch if there is none; 0 means from scratch. Raises
        ServiceError, e.g. CheckpointNotFound. A clone into another project needs the role editor in both, and is
        recorded in the audit log of both.
        """

        def begin() -> NewJob:
            origin = self.find(job_id)
            spec = overridden(origin, overrides)
            for project in (origin.spec.project, spec.project):
                self.must(Role.EDITOR, project)
            job = self._cloned(origin, step, spec)
            if spec.project == origin.spec.project:
                return self._new(job, once)
            return self._new(job, once, self.deed("clone", origin, {}, _facts(job) | {"project": spec.project}))

        return self._once(once, begin)

    def _cloned(self, origin: Job, step: int | None, spec: JobSpec) -> Job:
        manifest = self._manifest(origin, step)
        if manifest is None:
            return self._begin(spec, self.planner.check(spec))
        if problems := check_steps_remaining(origin, manifest, spec):
            raise InvalidSpec(problems)
        parent = parent_of(origin, manifest, spec)
        return self._begin(spec, self.planner.check(spec, parent), parent)

    def _manifest(self, job: Job, step: int | None) -> Manifest | None:
        """Return the checkpoint from which a clone starts; None for a start from scratch."""
        if step == 0:
            return None
        manifests = {found.manifest.step: found.manifest for found in self.run_dirs.checkpoints(job.run_dir)}
        if step is None and not manifests and job.parent is not None:
            raise IllegalState(
                f"{job.id} has no checkpoint yet; clone its parent {job.parent.job} from step {job.parent.step}, or "
                "set from_checkpoint to 0 for a clone that starts from scratch"
            )
        wanted = max(manifests, default=None) if step is None else step
        if wanted is not None and wanted not in manifests:
            raise CheckpointNotFound(job.id, wanted)
        return None if wanted is None else manifests[wanted]

    def _once(self, once: IdempotencyKey | None, begin: Callable[[], NewJob]) -> tuple[JobView, bool]:
        """Store a job, under its Idempotency-Key if it has one. Return False with it if the key was used before."""
        if once is None:
            new = begin()
            self._add(new)
            return self._new_view(new.job), True
        with self.in_flight.hold(once):
            # Before any check: the data of the stored job may have changed since.
            if (known := self._job_of(once)) is not None:
                return self._new_view(known), False
            new = begin()
            if self._add(new):
                return self._new_view(new.job), True
            # Another replica has stored a job under the key meanwhile.
            if (known := self._job_of(once)) is None:
                raise KeyInFlight(once.key)
            return self._new_view(known), False

    def _job_of(self, once: IdempotencyKey) -> Job | None:
        """Return the job that was stored under a key. Raises IdempotencyMismatch, Forbidden."""
        known = self.store.job_of(once, now=self.clock())
        if known is not None:
            # The groups of a token may have changed since.
            self.must(Role.EDITOR, known.spec.project)
        return known

    def _add(self, new: NewJob) -> bool:
        """Store a job with its key in one transaction; return False if the key was used for another job."""
        try:
            added = self.store.add(new)
        except NotReady:
            # The connection may have broken after the commit. In that case the job needs its parent's checkpoint.
            with suppress(NotReady):
                if new.job.parent is not None and self.store.get(new.job.id) is None:
                    self.run_dirs.let_go(new.job.run_dir)
            raise
        except BaseException:
            self.run_dirs.let_go(new.job.run_dir)
            raise
        if not added:
            self.run_dirs.let_go(new.job.run_dir)
        return added

    def _new(self, job: Job, once: IdempotencyKey | None, *more: AuditEntry) -> NewJob:
        return NewJob(job, once, (self._deed("submit", None, job), *more))

    def _begin(self, spec: JobSpec, plans: Plans, parent: Parent | None = None) -> Job:
        """Build a checked job, and pin the checkpoint from which it starts."""
        job_id, now = self.new_id(), self.clock()
        run_dir, times = f"{self.default_root}/{spec.project}/{job_id}", {JobState.QUEUED: now}
        job = Job(job_id, spec, run_dir, created_at=now, updated_at=now, times=times, sizes=sizes_of(spec, plans))
        if parent is None:
            return job
        if not self.run_dirs.inherit(run_dir, parent):
            raise CheckpointNotFound(parent.job, parent.manifest.step)
        return replace(job, parent=Lineage(parent.job, parent.manifest.step))

    def plan(self, body: bytes) -> PlanView:
        """Return the plan of a spec after the same checks as `submit`, without storing it. Raises ServiceError."""
        return self.planner.view(self._parsed(body))

    def get(self, job_id: str) -> JobView:
        """Return a job. Raises JobNotFound."""
        return self._view(self.find(job_id))

    def find(self, job_id: str, role: Role = Role.VIEWER) -> Job:
        """Return the stored job if the caller has this role. Raises JobNotFound, Forbidden."""
        job = self.store.get(job_id)
        if job is None or not self.caller.may(Role.VIEWER, job.spec.project):
            raise JobNotFound(job_id)
        self.must(role, job.spec.project)
        return job

    def must_edit(self) -> None:
        """Raise Forbidden unless the caller is an editor of some project; called before a body is read."""
        if not self.caller.edits:
            raise Forbidden(f"key {self.caller.name!r} is not an editor of any project; ask an admin for the role")

    def must(self, role: Role, project: str) -> None:
        """Raise Forbidden unless the caller has this role."""
        if not self.caller.may(role, project):
            raise Forbidden(
                f"key {self.caller.name!r} lacks the role {role} in project {project[:64]!r}; ask an admin of the "
                "project for it"
            )

    def deed(
        self, action: str, job: Job, before: Mapping[str, JsonValue], after: Mapping[str, JsonValue]
    ) -> AuditEntry:
        """Build the audit log entry of an action of the caller on a job."""
        return AuditEntry(self.clock(), self.caller, f"job.{action}", job.spec.project, job.id, before, after)

    def _deed(self, action: str, before: Job | None, after: Job | None) -> AuditEntry:
        old, new = _facts(before), _facts(after)
        was, is_now = ({name: one[name] for name in one if old.get(name) != new.get(name)} for one in (old, new))
        job = after or before
        assert job is not None
        return self.deed(action, job, was, is_now)

    def page(self, query: JobQuery) -> tuple[list[JobView], bool]:
        """Return the matching jobs, newest first, and True if there are more after them."""
        found = self.store.page(replace(query, projects=self._among(query.projects), limit=query.limit + 1))
        return [self._view(job) for job in found[: query.limit]], len(found) > query.limit

    def cancel(self, job_id: str, *, grace_seconds: float | None, checkpoint: bool) -> JobView:
        """Cancel a job; a repeated request can only shorten the grace period. Raises IllegalState, JobNotFound."""
        grace = self.grace.cancel if grace_seconds is None else grace_seconds
        return self._change(
            job_id, "cancel", lambda job, now: cancelled(job, deadline=now + grace, checkpoint=checkpoint, now=now)
        )

    def pause(self, job_id: str, *, grace_seconds: float | None) -> JobView:
        """Pause a job: it saves, and leaves the cluster until it is resumed. Raises IllegalState, JobNotFound."""
        grace = self.grace.pause if grace_seconds is None else grace_seconds
        return self._change(job_id, "pause", lambda job, now: paused(job, deadline=now + grace, now=now))

    def resume(self, job_id: str, scaling: ScalingSpec | None) -> JobView:
        """Resume a job, at another size if `scaling` is given. Raises IllegalState, InvalidSpec, JobNotFound."""
        sizes: tuple[int, ...] = ()
        if scaling is not None:
            spec = sized(self.find(job_id, Role.EDITOR).spec, scaling)
            sizes = sizes_of(spec, self.planner.check(spec))
        grace = self.grace.pause
        return self._change(
            job_id, "resume", lambda job, now: resumed(job, scaling, sizes, deadline=now + grace, now=now)
        )

    def delete(self, job_id: str) -> None:
        """Delete a finished job; its run directory and its usage are kept. Raises IllegalState, JobNotFound."""
        job = self.find(job_id, Role.EDITOR)
        if not job.state.terminal:
            raise IllegalState(f"{job_id} is {job.state}; cancel it first, then delete it")
        used = usage_by_day([job], since=0.0, until=self.clock())
        # A finished job cannot change, except that another caller deletes it.
        self.store.delete(job, {day: hours for (_, day), hours in used.items()}, self._deed("delete", job, None))

    def usage(self, first: date, last: date, *, projects: frozenset[str] | None = None) -> UsageByDay:
        """Return the usage of jobs, including deleted ones, from one day to another, both inclusive, up to now."""
        now, projects = self.clock(), self._among(projects)
        # `last` may be the last date of the calendar, which has no day after it.
        since, until = begin_of(first), now if last >= day_of(now) else begin_of(last + timedelta(days=1))
        deleted = self.store.used_by_deleted(first, last, projects=projects)
        return together(
            deleted, usage_by_day(self.store.used_between(since, until, projects=projects), since=since, until=until)
        )

    def _among(self, projects: frozenset[str] | None) -> frozenset[str] | None:
        """Return the projects, out of `projects` or all, that the caller may see; None means all."""
        seen = self.caller.projects(Role.VIEWER)
        return seen if projects is None else projects if seen is None else projects & seen

    def _change(self, job_id: str, action: str, change: Callable[[Job, float], Job]) -> JobView:
        for _ in range(_TRIES):
            job = self.find(job_id, Role.EDITOR)
            wanted = change(job, self.clock())
            if wanted == job or self.store.save(wanted, deed=self._deed(action, job, wanted)):
                return self._view(wanted)
        raise Busy(f"{job_id} changed {_TRIES} times while it was being changed; send the request again")

    def _parsed(self, body: bytes) -> JobSpec:
        """Parse a spec that the caller may submit. Raises InvalidSpec, Forbidden."""
        self.must_edit()
        return parsed(body, lambda project: self.must(Role.EDITOR, project))

    def _new_view(self, job: Job) -> JobView:
        return replace(self._view(job), warnings=tuple(self.planner.warnings(job.spec, job.sizes)))

    def _view(self, job: Job) -> JobView:
        submission = job.attempt.submission_id if job.attempt else None
        # The cached story: listing ten thousand jobs must not read ten thousand folders.
        read = self.run_dirs.known_story(job.run_dir) if job.attempts else Reading(EMPTY_SUMMARY, self.clock())
        dashboard = self.cluster.dashboard(submission)
        if not QueueEntry.of(job).waits:
            return JobView(job, read.story, dashboard, _missing(job, read) or job.waits_for, read_at=read.read_at)
        queue, story = self.board.admission, read.story
        return JobView(job, story, dashboard, queue.waits.get(job.id), queue.places.get(job.id), read_at=read.read_at)


def _missing(job: Job, read: Reading) -> Reason | None:
    """Return the storage outage that makes the story of an unfinished job stale; None if there is none."""
    if read.error is None or job.state.terminal:
        return None
    return storage_unavailable(read.error, read.since, root=read.root)


def _facts(job: Job | None) -> dict[str, JsonValue]:
    """Return the facts about a job that the audit log records."""
    if job is None:
        return {}
    facts = {"name": job.spec.name, "state": job.state, "wish": job.wish, "scaling": job.size, "parent": job.parent}
    told: dict[str, JsonValue] = to_jsonable_python({name: fact for name, fact in facts.items() if fact is not None})
    return told
