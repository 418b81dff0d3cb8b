"""Request and response models of jobs, pages and problems."""

from datetime import UTC, datetime
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, Field, JsonValue, PlainSerializer

from service.domain.job import Attempt, JobState
from service.domain.reason import Code, Reason
from service.domain.usage import usage_of
from service.ports import Progress
from service.use_cases import JobView
from train_loop.spec import JobSpec, ScalingSpec

T = TypeVar("T")
Time = Annotated[datetime, PlainSerializer(lambda time: time.isoformat(timespec="milliseconds"), return_type=str)]


def as_time(seconds: float) -> datetime:
    """Convert Unix seconds to a UTC datetime."""
    return datetime.fromtimestamp(seconds, UTC)


def time_or_none(seconds: float | None) -> datetime | None:
    """Convert Unix seconds to a UTC datetime; None stays None."""
    return None if seconds is None else as_time(seconds)


class ReasonOut(BaseModel):
    """A reason for a state, and a remedy."""

    code: Code
    message: str
    remedy: str | None

    @classmethod
    def of(cls, reason: Reason | None) -> "ReasonOut | None":
        """Build from the domain."""
        return None if reason is None else cls(code=reason.code, message=reason.message, remedy=reason.remedy)


class AttemptOut(BaseModel):
    """One Ray submission of a job."""

    attempt: int
    submission_id: str
    workers: int
    result: str | None
    reason: ReasonOut | None
    committed_step: int | None = Field(description="newest committed step at its end")
    started_at: Time
    ended_at: Time | None

    @classmethod
    def of(cls, attempt: Attempt) -> "AttemptOut":
        """Build from the domain."""
        return cls(
            attempt=attempt.number,
            submission_id=attempt.submission_id,
            workers=attempt.workers,
            result=attempt.result,
            reason=ReasonOut.of(attempt.reason),
            committed_step=attempt.step,
            started_at=as_time(attempt.started_at),
            ended_at=time_or_none(attempt.ended_at),
        )


class ProgressOut(BaseModel):
    """Progress of a run, from its newest metrics line, and the reason why it waits or makes no progress."""

    step: int
    of: int | None
    percent: float | None
    eta_seconds: float | None
    loss: float | None
    tokens_per_second: float | None
    mfu: float | None = Field(description="model FLOPs utilisation; null if the device's peak is unknown")
    place: int | None = Field(description="position in the queue, from 1; null if the job is not queued")
    waits_for: ReasonOut | None = Field(
        description="reason for waiting in the queue, or why an attempt makes no progress"
    )
    as_of: Time | None = Field(
        description="time of the last read of the run directory; null if this service has not read it yet"
    )
    age_seconds: float | None = Field(description="seconds since `as_of`: more than a few while storage is unavailable")

    @classmethod
    def of_view(cls, view: JobView, *, now: float) -> "ProgressOut":
        """Build from the run directory and the queue."""
        parent = view.job.parent
        done = view.story.progress or Progress(parent.step if parent else 0, view.job.spec.training.max_steps)
        return cls(
            step=done.step,
            of=done.of,
            percent=round(100 * done.step / done.of, 1) if done.of else None,
            eta_seconds=done.eta_seconds,
            loss=done.loss,
            tokens_per_second=done.tokens_per_second,
            mfu=done.mfu,
            place=view.place,
            waits_for=ReasonOut.of(view.waits_for),
            as_of=time_or_none(view.read_at),
            age_seconds=None if view.read_at is None else round(max(now - view.read_at, 0.0), 1),
        )


class LineageOut(BaseModel):
    """The checkpoint that a job was cloned from."""

    job: str
    step: int


class LostWork(BaseModel):
    """Work lost to faults."""

    steps: int = Field(description="optimizer steps trained again")
    hours: float = Field(description="from the last new step before each fault to the first one after it")


class JobOut(BaseModel):
    """A job: its spec, state, progress and cost."""

    id: str
    name: str
    project: str
    labels: dict[str, str]
    priority: int
    state: JobState
    reason: ReasonOut | None
    times: dict[JobState, Time] = Field(description="when each state was last entered")
    created_at: Time
    updated_at: Time
    started_at: Time | None
    finished_at: Time | None
    spec: JobSpec
    scaling: ScalingSpec = Field(description="size of the newest or the next attempt")
    sizes: tuple[int, ...] = Field(description="possible numbers of workers of an elastic job")
    run_dir: str
    parent: LineageOut | None = Field(
        description="the job and step that it was cloned from; null if it starts at step 0"
    )
    attempt: int = Field(description="number of the newest attempt; 0 before the first")
    attempts: tuple[AttemptOut, ...]
    restarts: int = Field(description="number of restarts of training, in the same or another attempt")
    progress: ProgressOut
    lost_work: LostWork
    worker_hours: float
    cpu_hours: float
    gpu_hours: float
    goodput: float | None = Field(description="share of the time since the first start that was spent on new steps")
    dashboard_url: str | None
    warnings: tuple[str, ...] = Field(
        default=(), description="in the response to a submission: warnings about placement, as in a plan"
    )

    @classmethod
    def of(cls, view: JobView, *, now: float) -> "JobOut":
        """Build from the use case."""
        job, story, used = view.job, view.story, usage_of(view.job, until=now)
        return cls(
            id=job.id,
            name=job.spec.name,
            project=job.spec.project,
            labels=job.spec.labels,
            priority=job.spec.priority,
            state=job.state,
            reason=ReasonOut.of(view.waits_for or job.reason),
            times={state: as_time(entered) for state, entered in job.times.items()},
            created_at=as_time(job.created_at),
            updated_at=as_time(job.updated_at),
            started_at=time_or_none(job.started_at),
            finished_at=time_or_none(job.finished_at),
            spec=job.spec,
            scaling=job.size,
            sizes=job.sizes,
            run_dir=job.run_dir,
            parent=LineageOut(job=job.parent.job, step=job.parent.step) if job.parent else None,
            attempt=len(job.attempts),
            attempts=tuple(map(AttemptOut.of, job.attempts)),
            restarts=story.restarts,
            progress=ProgressOut.of_view(view, now=now),
            lost_work=LostWork(steps=story.lost_steps, hours=round(story.lost_seconds / 3600, 4)),
            worker_hours=round(used.worker_hours, 4),
            cpu_hours=round(used.cpu_hours, 4),
            gpu_hours=round(used.gpu_hours, 4),
            goodput=_goodput(view, now),
            dashboard_url=view.dashboard_url,
            warnings=view.warnings,
        )


def _goodput(view: JobView, now: float) -> float | None:
    started = view.job.started_at
    wall = (view.job.finished_at or now) - started if started is not None else 0.0
    return round(min(view.story.productive_seconds / wall, 1.0), 4) if wall > 0 else None


class Page(BaseModel, Generic[T]):
    """A page of a list. `next` is the cursor for `?after=`; it is null if nothing can follow."""

    data: list[T]
    has_more: bool
    next: str | None


JobPage = Page[JobOut]
LinePage = Page[dict[str, JsonValue]]
TextPage = Page[str]


class CloneIn(BaseModel):
    """Options for cloning a job."""

    model_config = {"extra": "forbid"}

    from_checkpoint: int | None = Field(
        default=None, ge=0, description="step to resume from; default: the newest, if any; 0: start from scratch"
    )
    overrides: dict[str, JsonValue] = Field(default={}, description="overrides of the spec, merged recursively")


class CancelIn(BaseModel):
    """Options for cancelling a job."""

    model_config = {"extra": "forbid"}

    grace_seconds: float | None = Field(default=None, ge=0, le=86400, description="default: the service's setting")
    checkpoint: bool = Field(default=True, description="commit a last checkpoint first")


class PauseIn(BaseModel):
    """Options for pausing a job."""

    model_config = {"extra": "forbid"}

    grace_seconds: float | None = Field(default=None, ge=0, le=86400, description="default: the service's setting")


class ResumeIn(BaseModel):
    """Options for resuming a job."""

    model_config = {"extra": "forbid"}

    scaling: ScalingSpec | None = Field(default=None, description="another size; default: the one it had")


class Health(BaseModel):
    """Health of the service, in one word."""

    status: str


class ProblemOut(BaseModel):
    """One error in a spec or a request."""

    pointer: str
    message: str
    line: int | None = Field(default=None, ge=1, description="line in the YAML body, from 1; absent for JSON")
    column: int | None = Field(default=None, ge=1, description="column in the YAML body, from 1, in characters")


class ProblemDetails(BaseModel):
    """Problem details of an error, as in RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    errors: list[ProblemOut] | None = None
