"""Use cases that store a new job: submit a spec, clone a job. The plan of a spec passes the same checks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from service.domain.access.code import CodePolicy
from service.domain.access.permissions import require_any_editor, require_role
from service.domain.access.roles import AuditEntry, Principal, Role
from service.domain.jobs.job import Job, JobState, Lineage
from service.domain.jobs.lineage import check_adapter_kept, check_steps_remaining, parent_of
from service.domain.queue.policy import PriorityLimits
from service.errors import (
    CheckpointNotFound,
    ClusterStarting,
    Forbidden,
    IllegalState,
    InvalidSpec,
    KeyInFlight,
    NotReady,
)
from service.ports import Cancellation, IdempotencyKey, NewJob
from service.use_cases.jobs.audit_entries import action_entry, change_entry, job_facts
from service.use_cases.jobs.checkpoint_source import find_source, without_old_source
from service.use_cases.jobs.idempotency import KeysInFlight
from service.use_cases.jobs.jobs import Jobs, JobView
from service.use_cases.jobs.outlook import DeviceQuestion
from service.use_cases.jobs.planning import NO_QUESTION, CheckedSpec, PlanView, sizes_of
from service.use_cases.jobs.specs import SMALL, apply_overrides, parse_spec, spellings_in, with_digest
from train_loop.run_dir import Manifest, Parent
from train_loop.spec import AnyJobSpec, with_lora


@dataclass(frozen=True, eq=False)
class JobRequest:
    """A request to submit a spec. Two requests differ even if their content is the same."""

    caller: Principal
    body: bytes
    """The spec as YAML."""
    key: IdempotencyKey | None = None


@dataclass(frozen=True)
class Submitted:
    """A stored job. `created` is False if its Idempotency-Key was used before: then the job is the one of the key."""

    view: JobView
    created: bool


@dataclass(frozen=True)
class _CheckedJob:
    """A new job that is not stored yet, and the warnings of its plan."""

    new: NewJob
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Submitter:
    """Use cases of new jobs: parse and check a spec, build its job, store it once."""

    jobs: Jobs
    default_root: str
    new_id: Callable[[], str]
    priorities: PriorityLimits = field(default_factory=PriorityLimits)
    code: CodePolicy = field(default_factory=CodePolicy)
    keys_in_flight: KeysInFlight = field(default_factory=KeysInFlight)

    def submit(self, request: JobRequest) -> Submitted:
        """Check a spec and store its job durably. Raises ServiceError."""

        def new_job() -> _CheckedJob:
            spec, parent = find_source(self.jobs, request.caller, self._parse(request.caller, request.body))
            checked = self.jobs.planner.check(spec, parent)
            new = self._new_job(request.caller, request.key, self._build(spec, checked, parent))
            return _CheckedJob(new, checked.warnings)

        return self._store_once(request.caller, request.key, new_job)

    def submit_cached(self, requests: Sequence[JobRequest]) -> Mapping[JobRequest, Submitted]:
        """Store the jobs whose checks are cached, in one durable commit. The requests left out need `submit`."""
        new_jobs = {request: new for request in requests if (new := self._cached_job(request)) is not None}
        # A key that was used before leaves out all requests: `submit` finds its job.
        if not new_jobs or not self.jobs.store.add_all([job.new for job in new_jobs.values()], now=self.jobs.clock()):
            return {}
        return {request: self._created(job) for request, job in new_jobs.items()}

    def clone(
        self,
        caller: Principal,
        job_id: str,
        *,
        step: int | None,
        overrides: Mapping[str, object],
        key: IdempotencyKey | None,
    ) -> Submitted:
        """Store a clone of a job: its spec with overrides, starting from one of its checkpoints.

        `step` None means the newest checkpoint, or a start from scratch if there is none; 0 means from scratch. Raises
        ServiceError, e.g. CheckpointNotFound. A clone into another project needs the role editor in both, and is
        recorded in the audit log of both.
        """

        def new_job() -> _CheckedJob:
            origin = self.jobs.find(caller, job_id)
            changes = without_old_source(self.jobs, origin.spec, overrides)
            spec = self.jobs.planner.resolved(apply_overrides(origin, changes))
            for project in (origin.spec.project, spec.project):
                require_role(caller, Role.EDITOR, project)
            self._check_limits(caller, spec)
            job, warnings = self._build_clone(caller, origin, step, spec)
            if spec.project == origin.spec.project:
                return _CheckedJob(self._new_job(caller, key, job), warnings)
            after, now = job_facts(job) | {"project": spec.project}, self.jobs.clock()
            entry = action_entry(caller, "clone", origin, before={}, after=after, now=now)
            return _CheckedJob(self._new_job(caller, key, job, entry), warnings)

        return self._store_once(caller, key, new_job)

    def plan(
        self,
        caller: Principal,
        body: bytes,
        cancellation: Cancellation | None = None,
        question: DeviceQuestion = NO_QUESTION,
    ) -> PlanView:
        """Return the plan of a spec after the same checks as `submit`, without storing it.

        Raises ServiceError, CallCancelled.
        """
        spec, parent = find_source(self.jobs, caller, self._parse(caller, body, question))
        view = self.jobs.planner.view(spec, parent, cancellation, question)
        return replace(view, spellings=spellings_in(body, view.spec))

    def _parse(self, caller: Principal, body: bytes, question: DeviceQuestion = NO_QUESTION) -> AnyJobSpec:
        """Parse a spec that the caller may submit. Raises InvalidSpec, Forbidden, ClusterStarting."""
        require_any_editor(caller)
        spec = parse_spec(body, lambda project: require_role(caller, Role.EDITOR, project))
        self._check_limits(caller, spec)
        return self.jobs.planner.resolved(spec, question)

    def _check_limits(self, caller: Principal, spec: AnyJobSpec) -> None:
        """Raise InvalidSpec if the caller may not submit a job of this priority, or with its own code."""
        if problems := [*filter(None, (self.priorities.problem(caller, spec), self.code.problem(spec)))]:
            raise InvalidSpec(problems)

    def _cached_job(self, request: JobRequest) -> _CheckedJob | None:
        """Return the new job if all its checks are cached and pass, else None."""
        # Parsing, at most 5 ms, delays the others.
        if len(request.body) > SMALL:
            return None
        try:
            spec = self._parse(request.caller, request.body)
            checked = self.jobs.planner.cached(spec)
        except (InvalidSpec, Forbidden, ClusterStarting):
            # `submit` reports the error, because an idempotency conflict takes precedence.
            return None
        if checked is None or spec.checkpoint_source is not None:
            return None
        return _CheckedJob(self._new_job(request.caller, request.key, self._build(spec, checked)), checked.warnings)

    def _build(self, spec: AnyJobSpec, checked: CheckedSpec, parent: Parent | None = None) -> Job:
        """Build a checked job, and pin the checkpoint from which it starts."""
        spec = with_lora(with_digest(spec, checked.code), checked.lora)
        job_id, now = self.new_id(), self.jobs.clock()
        run_dir, times = f"{self.default_root}/{spec.project}/{job_id}", {JobState.QUEUED: now}
        job = Job(job_id, spec, run_dir, created_at=now, updated_at=now, times=times)
        job = replace(job, sizes=sizes_of(spec, checked.plans), memory=checked.memory)
        if parent is None:
            return job
        if not self.jobs.run_dirs.link_parent(run_dir, parent):
            raise CheckpointNotFound(parent.job, parent.manifest.step)
        return replace(job, parent=Lineage(parent.job, parent.manifest.step))

    def _build_clone(
        self, caller: Principal, origin: Job, step: int | None, spec: AnyJobSpec
    ) -> tuple[Job, tuple[str, ...]]:
        """Build a checked clone; return it with the warnings of its plan."""
        spec, parent = find_source(self.jobs, caller, spec)
        manifest = self._checkpoint_to_clone(origin, step)
        if manifest is not None:
            if problems := [
                *check_steps_remaining(origin, manifest, spec),
                *check_adapter_kept(origin, manifest, spec),
            ]:
                raise InvalidSpec(problems)
            parent = parent_of(origin, manifest, spec)
        checked = self.jobs.planner.check(spec, parent)
        return self._build(spec, checked, parent), checked.warnings

    def _checkpoint_to_clone(self, job: Job, step: int | None) -> Manifest | None:
        """Return the checkpoint from which a clone starts; None for a start from scratch."""
        if step == 0 or (step is None and not job.spec.trains):
            return None
        manifests = {found.manifest.step: found.manifest for found in self.jobs.run_dirs.checkpoints(job.run_dir)}
        if step is None and not manifests and job.parent is not None:
            raise IllegalState(
                f"{job.id} has no checkpoint yet; clone its parent {job.parent.job} from step {job.parent.step}, or "
                "set from_checkpoint to 0 for a clone that starts from scratch"
            )
        wanted = max(manifests, default=None) if step is None else step
        if wanted is not None and wanted not in manifests:
            raise CheckpointNotFound(job.id, wanted)
        return None if wanted is None else manifests[wanted]

    def _new_job(self, caller: Principal, key: IdempotencyKey | None, job: Job, *more: AuditEntry) -> NewJob:
        entry = change_entry(caller, "submit", None, job, now=self.jobs.clock())
        return NewJob(job, key, (entry, *self._entry_of_source(caller, job), *more))

    def _entry_of_source(self, caller: Principal, job: Job) -> tuple[AuditEntry, ...]:
        """Return the entry for the project whose weights a job of another project reads; empty for other jobs."""
        source = self.jobs.store.get(job.parent.job) if job.parent is not None and not job.spec.trains else None
        if source is None or source.spec.project == job.spec.project:
            return ()
        after, now = job_facts(job) | {"project": job.spec.project}, self.jobs.clock()
        return (action_entry(caller, "infer", source, before={}, after=after, now=now),)

    def _store_once(
        self, caller: Principal, key: IdempotencyKey | None, new_job: Callable[[], _CheckedJob]
    ) -> Submitted:
        """Store a new job, unless its Idempotency-Key was used before. Then return the job of the key."""
        if key is None:
            job = new_job()
            self._store(job.new)
            return self._created(job)
        with self.keys_in_flight.hold(key):
            # Before any check: the data of the stored job may have changed since.
            if (known := self._job_of(caller, key)) is not None:
                return self._known(known)
            job = new_job()
            if self._store(job.new):
                return self._created(job)
            # Another replica has stored a job under the key meanwhile.
            if (known := self._job_of(caller, key)) is None:
                raise KeyInFlight(key.key)
            return self._known(known)

    def _job_of(self, caller: Principal, key: IdempotencyKey) -> Job | None:
        """Return the job that was stored under a key. Raises IdempotencyMismatch, Forbidden."""
        known = self.jobs.store.job_of(key, now=self.jobs.clock())
        if known is not None:
            # The groups of a token may have changed since.
            require_role(caller, Role.EDITOR, known.spec.project)
        return known

    def _store(self, new: NewJob) -> bool:
        """Store a job with its key in one transaction; return False if the key was used for another job."""
        store, run_dirs = self.jobs.store, self.jobs.run_dirs
        try:
            stored = store.add(new)
        except NotReady:
            # The connection may have broken after the commit. In that case the job needs its parent's checkpoint.
            with suppress(NotReady):
                if new.job.parent is not None and store.get(new.job.id) is None:
                    run_dirs.release_parent(new.job.run_dir)
            raise
        except BaseException:
            run_dirs.release_parent(new.job.run_dir)
            raise
        if not stored:
            run_dirs.release_parent(new.job.run_dir)
        return stored

    def _created(self, job: _CheckedJob) -> Submitted:
        return Submitted(replace(self.jobs.view(job.new.job), warnings=job.warnings), created=True)

    def _known(self, job: Job) -> Submitted:
        """Return a stored job, with the warnings of its plan, or of the cluster if its checks are not cached."""
        planner, checked = self.jobs.planner, None
        with suppress(InvalidSpec):
            checked = planner.cached(job.spec)
        warnings = checked.warnings if checked is not None else planner.cluster_warnings(job.spec, job.sizes)
        return Submitted(replace(self.jobs.view(job), warnings=tuple(warnings)), created=False)
