"""Request and response models of jobs."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, Field, JsonValue

from service.api.schemas.common import Page, StateName, Time, read_as
from service.domain.jobs.job import JobState
from service.domain.jobs.reason import Code
from train_loop.spec import AnyJobSpec, ScalingSpec


class ReasonOut(BaseModel):
    """A reason for a state, and a remedy."""

    code: Code
    message: str
    remedy: str | None


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


class ProgressOut(BaseModel):
    """Progress of a run, from its newest metrics line, and the reason why it waits or makes no progress."""

    step: int
    of: int | None
    unit: str = Field(default="step", description="what `step` and `of` count: step, or row of an inference job")
    percent: float | None
    eta_seconds: float | None = Field(description="null while no worker trains, as are the rates")
    loss: float | None
    tokens_per_second: float | None = Field(description="null for own code, whose rows have no known tokens")
    mfu: float | None = Field(description="model FLOPs utilisation; null if the device's peak is unknown")
    place: int | None = Field(description="position in the queue, from 1; null if the job is not queued")
    waits_for: ReasonOut | None = Field(
        description="reason for waiting in the queue, or why an attempt makes no progress"
    )
    as_of: Time | None = Field(
        description="time of the last read of the run directory; null if this service has not read it yet"
    )
    age_seconds: float | None = Field(description="seconds since `as_of`: more than a few while storage is unavailable")


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
    times: dict[StateName, Time] = Field(description="when each state was last entered")
    created_at: Time
    updated_at: Time
    started_at: Time | None
    finished_at: Time | None
    scaling: ScalingSpec = Field(description="size of the newest or the next attempt")
    sizes: tuple[int, ...] = Field(description="possible numbers of workers of an elastic job")
    run_dir: str
    parent: LineageOut | None = Field(
        description="the job and step of the checkpoint from which it starts; null if it starts at step 0"
    )
    attempt: int = Field(description="number of the newest attempt; 0 before the first")
    attempts: tuple[AttemptOut, ...]
    restarts: int = Field(
        description="restarts of training after faults, in the same or another attempt; not after pauses and resizes"
    )
    progress: ProgressOut
    lost_work: LostWork
    worker_hours: float
    cpu_hours: float
    gpu_hours: float
    goodput: float | None = Field(description="share of the time since the first start that was spent on new steps")
    dashboard_url: str | None
    warnings: tuple[str, ...] = Field(
        default=(), description="in the response to a submission: the warnings of its plan"
    )
    spec: AnyJobSpec

    def to_json(self, spec: str) -> bytes:
        """Return the model as JSON, given the JSON text of its spec, the largest part, which others computed before."""
        return f'{self.model_dump_json(exclude={"spec"})[:-1]},"spec":{spec}}}'.encode()


JobPage = Page[JobOut]


class CloneIn(BaseModel):
    """Options for cloning a job."""

    model_config = {"extra": "forbid"}

    from_checkpoint: int | None = Field(
        default=None, ge=0, description="step to resume from; default: the newest, if any; 0: start from scratch"
    )
    overrides: Annotated[Mapping[str, object], read_as(dict[str, JsonValue])] = Field(
        default={}, description="overrides of the spec, merged recursively"
    )


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
