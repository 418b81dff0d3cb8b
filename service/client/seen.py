"""What both clients know of a job, and what an answer about it means. Pure."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import JsonValue

from service.api.ledger_schemas import CheckpointOut, ExportOut
from service.api.schemas import JobOut, ProgressOut, ReasonOut
from service.domain.job import JobState
from train_loop.spec import JobSpec, dump

A = TypeVar("A")
Spec = JobSpec | Mapping[str, JsonValue] | str | bytes | Path
"""A job spec: as a model, as plain data, as YAML or JSON text, or the file with that text."""
States = JobState | Collection[JobState]
LOOK_SECONDS = 1.0
_WHOLE_ID = re.compile(r"job-[0-9a-z]{26}")


class JobEnded(Exception):
    """The job has ended as nobody waited for; `job` is how it was then."""

    def __init__(self, job: JobOut) -> None:
        why = f": {job.reason.message}" if job.reason else ""
        super().__init__(f"{job.id} is {job.state}{why}")
        self.job = job


class JobFailed(JobEnded):
    """The job has failed."""


class JobCancelled(JobEnded):
    """The job was cancelled."""


class ExportFailed(Exception):
    """There is no Hugging Face folder of the checkpoint; `str(error)` says why."""


class AmbiguousId(LookupError):
    """More than one id begins like this."""


class Seen(Generic[A]):
    """A job as it was when the service was last asked."""

    def __init__(self, api: A, info: JobOut) -> None:
        self._api = api
        self.info = info

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self.state.value})"

    @property
    def id(self) -> str:
        """What it is called by everywhere."""
        return self.info.id

    @property
    def name(self) -> str:
        """What its spec calls it."""
        return self.info.name

    @property
    def state(self) -> JobState:
        """Where it stands."""
        return self.info.state

    @property
    def reason(self) -> ReasonOut | None:
        """Why it stands there, and what helps."""
        return self.info.reason

    @property
    def progress(self) -> ProgressOut:
        """How far it is."""
        return self.info.progress

    @property
    def ended(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self.info.state.terminal


def spec_text(spec: Spec) -> str | bytes:
    """A spec as it goes over the wire."""
    if isinstance(spec, Path):
        return spec.read_bytes()
    if isinstance(spec, JobSpec):
        return dump(spec)
    return json.dumps(spec) if isinstance(spec, Mapping) else spec


def states_of(state: States) -> tuple[JobState, ...]:
    """One state, or several."""
    return (state,) if isinstance(state, JobState) else tuple(state)


def has_come(job: JobOut, until: Sequence[JobState]) -> bool:
    """Whether it is in one of the states. Raises JobEnded where it never will be."""
    if job.state in until or not job.state.terminal:
        return job.state in until
    kinds = {JobState.FAILED: JobFailed, JobState.CANCELLED: JobCancelled}
    raise kinds.get(job.state, JobEnded)(job)


def is_exported(status: ExportOut) -> bool:
    """Whether the folder is there. Raises ExportFailed."""
    if status.state == "failed":
        raise ExportFailed(f"the export of step {status.step} failed: {status.reason}")
    return status.state == "done"


def newest_step(job_id: str, found: Sequence[CheckpointOut]) -> int:
    """The step of the newest checkpoint. Raises LookupError."""
    if not found:
        raise LookupError(f"{job_id} has no checkpoint yet; wait for one, or lower checkpoint.every_steps in its spec")
    return found[-1].step


def is_whole(job_id: str) -> bool:
    """Whether it can be no beginning of a longer id."""
    return _WHOLE_ID.fullmatch(job_id) is not None


def meant(given: str, found: Sequence[JobOut]) -> JobOut | None:
    """The one job whose id is this or begins like this; None where there is none. Raises AmbiguousId."""
    beginning = given.lower() if given.lower().startswith("job-") else f"job-{given.lower()}"
    fitting = [job for job in found if job.id.startswith(beginning)]
    same = [job for job in fitting if job.id == beginning]
    if len(fitting) > 1 and not same:
        ids = ", ".join(job.id for job in fitting[:5])
        raise AmbiguousId(f"{len(fitting)} or more ids begin with {beginning}, such as {ids}; write more of one")
    return next(iter(same or fitting), None)
