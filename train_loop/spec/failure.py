"""`failure:` the limits on failures, and standby processes."""

from pydantic import Field

from train_loop.spec.base import SpecModel


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
