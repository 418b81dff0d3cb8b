"""`checkpoint:` the schedule of checkpoints, and those to keep."""

from typing import Literal

from pydantic import Field

from train_loop.spec.base import SpecModel


class KeepBestSpec(SpecModel):
    """The metric that selects the best checkpoint."""

    metric: Literal["loss", "grad_norm", "eval_loss", "eval_perplexity", "eval_accuracy", "eval_f1", "eval_mse"] = (
        Field(description="metric to compare; those of evaluations need training.eval_steps, and depend on model.head")
    )
    mode: Literal["min", "max"] = Field(description="whether the smallest or the largest value is best")


class CheckpointSpec(SpecModel):
    """The schedule of checkpoints, and the number of checkpoints to keep."""

    every_steps: int | None = Field(
        default=100, ge=1, description="optimizer steps between checkpoints; null: not by steps"
    )
    every_seconds: float | None = Field(
        default=None,
        gt=0,
        description="seconds between checkpoints, from the previous one of any kind; null: not by time",
    )
    keep_last: int = Field(default=2, ge=1, description="number of newest checkpoints to keep")
    keep_best: KeepBestSpec | None = Field(
        default=None,
        description="keep the best checkpoint, too, among those with the metric; loss is the mean over logging_steps",
    )
    save_final: bool = Field(default=True, description="save a checkpoint after the last step")
    max_consecutive_failures: int = Field(default=3, ge=1, description="consecutive failed saves that end the attempt")
