"""Base class and helper functions of both job handles. Pure, except for clocks and spec files."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from service.api.schemas import CheckpointOut, ExportOut, JobOut, ProgressOut, ReasonOut, StateName
from service.domain.jobs.job import JobState
from train_loop.spec import AnyJobSpec, InferJobSpec, JobSpec, dump
from trainshed.errors import AmbiguousId, ExportFailed, JobCancelled, JobEnded, JobFailed

A = TypeVar("A")
Spec = AnyJobSpec | Mapping[str, object] | str | bytes | Path
"""A job spec: as a model, as plain data, as YAML or JSON text, or the file with that text."""
States = StateName | Collection[StateName]
"""A job state or several, as members of JobState or as their names."""
POLL_SECONDS = 1.0
_COMPLETE_ID = re.compile(r"job-[0-9a-z]{26}")


class JobHandle(Generic[A]):
    """A job as in the last answer of the service."""

    def __init__(self, api: A, info: JobOut) -> None:
        self._api = api
        self.info = info

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self.state.value})"

    @property
    def id(self) -> str:
        """The job's id."""
        return self.info.id

    @property
    def name(self) -> str:
        """The job's name in its spec."""
        return self.info.name

    @property
    def state(self) -> JobState:
        """The job's state."""
        return self.info.state

    @property
    def reason(self) -> ReasonOut | None:
        """The reason for the state, with a remedy."""
        return self.info.reason

    @property
    def progress(self) -> ProgressOut:
        """The job's progress."""
        return self.info.progress

    @property
    def ended(self) -> bool:
        """True if the job has finished."""
        return self.info.state.terminal


@dataclass(frozen=True)
class Deadline:
    """The time limit of a wait."""

    awaited: str
    timeout: float | None
    """Time limit in seconds; None means no limit."""
    _began: float = field(default_factory=monotonic)

    def check(self) -> None:
        """Raise TimeoutError if the time limit has passed."""
        if self.timeout is not None and monotonic() - self._began > self.timeout:
            raise TimeoutError(f"{self.timeout:g} s were not enough for {self.awaited}; wait again, or longer")


def spec_text(spec: Spec) -> str | bytes:
    """Return a spec as the body of a request."""
    if isinstance(spec, Path):
        return spec.read_bytes()
    if isinstance(spec, JobSpec | InferJobSpec):
        return dump(spec)
    return json.dumps(spec) if isinstance(spec, Mapping) else spec


def states_of(state: States) -> tuple[JobState, ...]:
    """Return one or several states as a tuple. Raises ValueError for a name that is not a state."""
    names = (state,) if isinstance(state, str) else tuple(state)
    if unknown := [name for name in names if name.upper() not in set(JobState)]:
        raise ValueError(f"invalid state {unknown[0]!r}; expected {', '.join(JobState)}")
    return tuple(JobState(name.upper()) for name in names)


def reached(job: JobOut, until: Sequence[JobState]) -> bool:
    """Return True if the job is in one of the states. Raises JobEnded if it finished in another one."""
    if job.state in until or not job.state.terminal:
        return job.state in until
    kinds = {JobState.FAILED: JobFailed, JobState.CANCELLED: JobCancelled}
    raise kinds.get(job.state, JobEnded)(job)


def is_exported(status: ExportOut) -> bool:
    """Return True if the export is done. Raises ExportFailed if it failed."""
    if status.state == "failed":
        raise ExportFailed(f"the export of step {status.step} failed: {status.reason}")
    return status.state == "done"


def newest_step(job_id: str, found: Sequence[CheckpointOut]) -> int:
    """Return the step of the newest checkpoint. Raises LookupError if there is none."""
    if not found:
        raise LookupError(f"{job_id} has no checkpoint yet; wait for one, or lower checkpoint.every_steps in its spec")
    return found[-1].step


def is_complete_id(job_id: str) -> bool:
    """Return True if this is a complete id, not a prefix."""
    return _COMPLETE_ID.fullmatch(job_id) is not None


def resolve_id(given: str, found: Sequence[JobOut]) -> JobOut | None:
    """Return the job with this id or id prefix, or None. Raises AmbiguousId if several match."""
    prefix = given.lower() if given.lower().startswith("job-") else f"job-{given.lower()}"
    matching = [job for job in found if job.id.startswith(prefix)]
    exact = [job for job in matching if job.id == prefix]
    if len(matching) > 1 and not exact:
        ids = ", ".join(job.id for job in matching[:5])
        raise AmbiguousId(f"{len(matching)} or more ids begin with {prefix}, such as {ids}; write more of one")
    return next(iter(exact or matching), None)
