"""What a user can ask for: submit, plan, get, page, cancel. Answers come from the store and the run directory."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from service.domain.admission import never_fits
from service.domain.job import Cancel, Job, JobState
from service.errors import Busy, IllegalState, InvalidSpec, JobNotFound
from service.ports import Cluster, JobQuery, JobStore, Once, Preflight, RunDirs, Story
from train_loop.plan import ModelShape, Plan, data_starves, plan_job
from train_loop.spec import JobSpec, Problem, SpecError, parse_text

_TRIES = 20


@dataclass(frozen=True)
class JobView:
    """A job with what its run directory and the cluster add."""

    job: Job
    story: Story
    dashboard_url: str | None


@dataclass(frozen=True)
class PlanView:
    """A plan with what the cluster adds."""

    spec: JobSpec
    plan: Plan
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Jobs:
    """The use cases, over the ports they need."""

    store: JobStore
    cluster: Cluster
    run_dirs: RunDirs
    preflight: Preflight
    default_root: str
    cancel_grace: float
    clock: Callable[[], float]
    new_id: Callable[[], str]

    def submit(self, body: bytes, once: Once | None) -> tuple[JobView, bool]:
        """Store a job durably; False beside it says that the key stood for it already. Raises ServiceError."""
        # Before any check: the data of a job that was taken may have moved since.
        if once is not None and (known := self.store.replay(once)):
            return self._view(known), False
        spec, _ = self._checked(body)
        job_id, now = self.new_id(), self.clock()
        run_dir = f"{self.default_root}/{spec.project}/{job_id}"
        job, new = self.store.add(Job(job_id, spec, run_dir, created_at=now, updated_at=now), once)
        return self._view(job), new

    def plan(self, body: bytes) -> PlanView:
        """What a spec comes to, by the same checks as submit; nothing is stored. Raises ServiceError."""
        spec, plan = self._checked(body)
        never = never_fits(spec.scaling, self.cluster.capacity())
        warnings = (*plan.warnings, f"the job would stay QUEUED: {never}") if never else plan.warnings
        return PlanView(spec, plan, warnings)

    def get(self, job_id: str) -> JobView:
        """One job. Raises JobNotFound."""
        return self._view(self.find(job_id))

    def find(self, job_id: str) -> Job:
        """One job as it is stored. Raises JobNotFound."""
        job = self.store.get(job_id)
        if job is None:
            raise JobNotFound(job_id)
        return job

    def page(self, query: JobQuery) -> tuple[list[JobView], bool]:
        """The jobs that match, newest first, and whether there are more behind them."""
        found = self.store.page(replace(query, limit=query.limit + 1))
        return [self._view(job) for job in found[: query.limit]], len(found) > query.limit

    def cancel(self, job_id: str, *, grace_seconds: float | None, checkpoint: bool) -> JobView:
        """Ask for the end of a job; asking again can only shorten the grace. Raises IllegalState, JobNotFound."""
        grace = self.cancel_grace if grace_seconds is None else grace_seconds
        for _ in range(_TRIES):
            job = self.find(job_id)
            now = self.clock()
            wanted = _cancelled(job, Cancel(now + grace, checkpoint), now)
            if wanted == job or self.store.save(wanted):
                return self._view(wanted)
        raise Busy(f"{job_id} changed {_TRIES} times while it was being cancelled; send the request again")

    def _checked(self, body: bytes) -> tuple[JobSpec, Plan]:
        try:
            spec = parse_text(body)
        except SpecError as error:
            raise InvalidSpec(error.problems) from error
        starves = data_starves(spec.scaling, self.cluster.capacity())
        found = self.preflight.check(spec)
        plan, broken = _planned(spec, found.shape)
        problems = [*([starves] if starves else []), *broken, *found.problems]
        if problems or plan is None:
            raise InvalidSpec(problems)
        return spec, plan

    def _view(self, job: Job) -> JobView:
        submission = job.attempt.submission_id if job.attempt else None
        return JobView(job, self.run_dirs.story(job.run_dir), self.cluster.dashboard(submission))


def _planned(spec: JobSpec, shape: ModelShape | None) -> tuple[Plan | None, list[Problem]]:
    """The plan for a model of known sizes, or the rules that the spec breaks."""
    try:
        return (plan_job(spec, shape) if shape else None), []
    except SpecError as error:
        return None, error.problems


def _cancelled(job: Job, cancel: Cancel, now: float) -> Job:
    """The job after a cancel; the same job where it changes nothing."""
    if job.state is JobState.CANCELLED:
        return job
    if job.state.terminal:
        raise IllegalState(f"{job.id} is {job.state} and cannot be cancelled any more; nothing needs to be done")
    if job.cancel is None:
        return replace(job.move(JobState.CANCELLING, now=now), cancel=cancel)
    earlier = min(cancel.deadline, job.cancel.deadline)
    return replace(job, cancel=replace(job.cancel, deadline=earlier))
