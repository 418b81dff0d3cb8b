"""`scaling:` the number of workers, and their resources; `failure:` the limits on failures, and standby processes."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from train_loop.spec.base import SpecModel

MOST_WORKERS = 4096
MEMORY = "memory"
"""Ray's name of host memory in bytes."""


class WorkerRange(SpecModel):
    """The numbers of workers that an elastic job accepts."""

    min: int = Field(ge=1, description="minimum number of workers")
    max: int = Field(ge=1, le=MOST_WORKERS, description="maximum number of workers, at most 4096")

    @model_validator(mode="after")
    def _in_order(self) -> "WorkerRange":
        if self.min > self.max:
            raise ValueError(f"min={self.min} is more than max={self.max}; swap them")
        return self


class ScalingSpec(SpecModel):
    """The number of workers, and the resources of each of them."""

    num_workers: Annotated[
        Annotated[int, Field(ge=1, le=MOST_WORKERS), Tag("int")] | Annotated[WorkerRange, Tag("WorkerRange")],
        Discriminator(lambda given: "WorkerRange" if isinstance(given, dict | WorkerRange) else "int"),
    ] = Field(
        default=1,
        description="number of workers, one rank each, at most 4096; or the range of an elastic job: {min: 2, max: 8}",
    )
    resources_per_worker: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={"CPU": 1.0}, description="Ray resources of each worker: {CPU: 4, GPU: 1}"
    )
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="Ray placement of the workers: PACK: on few nodes; SPREAD: on many; STRICT_…: only so",
    )

    @property
    def elastic(self) -> bool:
        """True if the service chooses the number of workers, and may change it."""
        return isinstance(self.num_workers, WorkerRange)

    @property
    def bounds(self) -> tuple[int, int]:
        """The minimum and maximum number of workers."""
        workers = self.num_workers
        return (workers.min, workers.max) if isinstance(workers, WorkerRange) else (workers, workers)

    @property
    def world(self) -> int:
        """Number of workers, one rank each, once it has been chosen."""
        assert isinstance(self.num_workers, int), "an elastic job gets its size before its world is read"
        return self.num_workers

    def at(self, workers: int) -> "ScalingSpec":
        """Return a copy with a chosen number of workers."""
        return self.model_copy(update={"num_workers": workers})


class FailureSpec(SpecModel):
    """The limits on the failures of a run before the job fails."""

    max_failures: int = Field(default=3, ge=0, description="maximum restarts of the worker group in one attempt")
    max_attempts: int = Field(
        default=3,
        ge=1,
        description="maximum consecutive failed attempts (Ray submissions), counted since the last checkpoint",
    )
    spare_workers: bool = Field(
        default=True,
        description="keep a standby process per worker with all imports done, about 0.5 GB of memory; it restarts "
        "in seconds",
    )
    hang_timeout_seconds: float = Field(
        default=1800.0,
        ge=1,
        description="seconds without a finished step before the stacks of all ranks are written and the workers, "
        "then the attempt, are restarted",
    )
