"""`checkpoint:`, `scaling:` and `failure:` the checkpoints, the size and the retries of a run."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from train_loop.spec.base import SpecModel


class KeepBestSpec(SpecModel):
    """The metric that selects the best checkpoint."""

    metric: Literal["loss", "grad_norm", "eval_loss", "eval_perplexity"]
    mode: Literal["min", "max"]


class CheckpointSpec(SpecModel):
    """The schedule of checkpoints, and the number of checkpoints to keep."""

    every_steps: int | None = Field(default=100, ge=1)
    every_seconds: float | None = Field(default=None, gt=0, description="seconds since the last save of any kind")
    keep_last: int = Field(default=2, ge=1)
    keep_best: KeepBestSpec | None = Field(
        default=None,
        description="also keep the best checkpoint by a metric of its step; loss is the mean since the last metrics "
        "line",
    )
    save_final: bool = True
    max_consecutive_failures: int = Field(default=3, ge=1, description="consecutive failed saves that end the attempt")


MOST_WORKERS = 4096


class WorkerRange(SpecModel):
    """The numbers of workers that an elastic job accepts."""

    min: int = Field(ge=1)
    max: int = Field(ge=1, le=MOST_WORKERS)

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
    ] = 1
    resources_per_worker: dict[str, Annotated[float, Field(ge=0)]] = Field(default={"CPU": 1.0})
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"

    @property
    def elastic(self) -> bool:
        """True if the service chooses the number of workers, and may change it."""
        return isinstance(self.num_workers, WorkerRange)

    @property
    def bounds(self) -> tuple[int, int]:
        """The minimum and maximum number of workers."""
        asked = self.num_workers
        return (asked.min, asked.max) if isinstance(asked, WorkerRange) else (asked, asked)

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

    max_failures: int = Field(default=3, ge=0, description="restarts of the worker group inside one attempt")
    max_attempts: int = Field(
        default=3, ge=1, description="consecutive Ray submissions that may fail; committing a new step resets the count"
    )
    spare_workers: bool = Field(
        default=True,
        description="keep a standby process with all imports, about 0.5 GB, for every worker: it restarts in seconds",
    )
    hang_timeout_seconds: float = Field(
        default=1800.0,
        ge=1,
        description="timeout for a step: after it, the stacks of all ranks are written, pending collectives fail, and "
        "the worker group restarts, or as a last resort the attempt",
    )
