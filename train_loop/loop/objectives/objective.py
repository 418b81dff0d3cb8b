"""The seam between the loop and the objective of a run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from train_loop.errors import UserError
from train_loop.loop.batch import MicroBatch, StepBatch
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.faults import own_faults

_STEP_FIELDS = "step tokens loss grad_norm lr tokens_per_second tokens_per_second_per_worker mfu loss_scale samples"
_TIME_FIELDS = (
    "step_seconds data_wait_seconds checkpoint_blocked_seconds slowest_rank slowest_rank_seconds rank_seconds"
)
_LOG_FIELDS = "seq time attempt epoch peak_device_bytes peak_host_bytes expert_load"
LINE_FIELDS = frozenset(f"{_STEP_FIELDS} {_TIME_FIELDS} {_LOG_FIELDS}".split())
"""Fields of a metrics line that an objective cannot use for its sums."""


@dataclass(frozen=True)
class Terms:
    """An objective's results for a micro-batch: sums over this rank's slice of it, never means."""

    total: Tensor
    """Sum to train on, with its graph."""
    count: Tensor | None = None
    """Divisor's share of the micro-batch, if the objective cannot count the step's batch before."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums for the metrics line, by the objective's `sums`; the line has them divided by the step's count."""
    stands_in: bool = False
    """True if a micro-batch has padding only: its zero gradients do not count as gradients."""


class Objective(Protocol):
    """The training and evaluation rule of a run.

    An objective only sums. The loop divides: by the count over all micro-batches and ranks of the step, and by no other
    factor. The objective never sees that number, so that accumulation and world size cannot change the result.
    """

    @property
    def anatomy(self) -> Anatomy:
        """Return the parts of the model that it calls."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that each batch needs."""
        ...

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums in `Terms`, in the same order: fields of the metrics line."""
        ...

    @property
    def evaluation_sums(self) -> tuple[str, ...]:
        """Return the names of the sums of an evaluation."""
        ...

    def divisor(self, batch: StepBatch) -> Tensor | None:
        """Return the batch's share of the step's divisor, integer or float64; None if only the terms contain it.

        The answer is None for every batch, or for none. With None the gradients are divided once, after the step's
        last backward pass.
        """
        ...

    def __call__(self, batch: MicroBatch) -> Terms:
        """Call the model and return the terms of this rank's slice.

        Rows whose sample is PADDING add nothing, but the model is called for them too: other ranks wait for the call.
        """
        ...

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Call the model and return the evaluation's sums over this rank's slice, in the order of `evaluation_sums`."""
        ...

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return the results of an evaluation from its sums over all samples, in float64.

        The metrics line has each as `eval_NAME`. Integers are counts: `keep_best` compares only floats.
        """
        ...


def call_model(anatomy: Anatomy, batch: MicroBatch) -> Tensor:
    """Return a model's output for a micro-batch. Raises ModelError for errors in the model's own code."""
    with own_faults(anatomy.model):
        return anatomy.family.call(anatomy.model, batch.values, batch.attention)


def check_objective(objective: Objective, columns: Collection[str]) -> None:
    """Raise UserError for a column that batches do not have, and for a sum whose name the metrics line already has."""
    name = type(objective).__name__
    missing = [column for column in objective.columns if column not in columns]
    if missing:
        raise UserError(f"{name} needs the columns {', '.join(missing)}; batches have {', '.join(sorted(columns))}")
    taken = [one for one in objective.sums if one in LINE_FIELDS or one.startswith("eval_")]
    if taken:
        raise UserError(
            f"{name} has sums named {', '.join(taken)}, which are fields of every metrics line; choose other names, "
            "without the prefix eval_"
        )
