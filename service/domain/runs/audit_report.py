"""The report of a run audit."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
LISTED = 100
"""Maximum number of findings of one kind that a report lists; it counts all of them."""


@dataclass
class Found(Generic[T]):
    """Findings of one kind: their total number, and the first ones."""

    total: int = 0
    listed: list[T] = field(default_factory=list)

    def add(self, finding: T, count: int = 1) -> None:
        """Count a finding, and list it unless the list is full."""
        self.total += count
        if len(self.listed) < LISTED:
            self.listed.append(finding)

    def extend(self, other: "Found[T]") -> None:
        """Add the findings of another check."""
        self.total += other.total
        self.listed += other.listed[: LISTED - len(self.listed)]


@dataclass(frozen=True)
class Duplicate:
    """A sample that two steps of one epoch trained, or one step trained twice (then both steps are equal)."""

    sample: int
    data_epoch: int
    first_step: int
    step: int


@dataclass(frozen=True)
class Unseen:
    """A sample that a finished epoch of the data did not train."""

    sample: int
    data_epoch: int


@dataclass(frozen=True)
class Repeat:
    """Steps that a worker group trained again, because an earlier group had trained them after its last checkpoint."""

    attempt: int
    epoch: int | None
    resumed_from: int
    steps: int


@dataclass(frozen=True)
class Gap:
    """Steps without a metrics line."""

    first_step: int
    last_step: int


@dataclass(frozen=True)
class Difference:
    """A step with other samples than the schedule requires."""

    step: int
    attempt: int
    message: str


@dataclass(frozen=True)
class LossChange:
    """A step whose loss differs from its earlier training with the same number of workers."""

    step: int
    attempt: int
    loss: float
    earlier_attempt: int
    earlier_loss: float


@dataclass
class RunAudit:
    """The findings of a run audit."""

    lines: int = 0
    superseded: int = 0
    """Number of lines that a worker group wrote after a newer group had replaced it."""
    steps: int = 0
    samples: int = 0
    first_step: int | None = None
    last_step: int | None = None
    repeated: Found[Repeat] = field(default_factory=Found)
    duplicated: Found[Duplicate] = field(default_factory=Found)
    missing_steps: Found[Gap] = field(default_factory=Found)
    missing_samples: Found[Unseen] = field(default_factory=Found)
    out_of_order: Found[Difference] = field(default_factory=Found)
    changed_losses: Found[LossChange] = field(default_factory=Found)
    notes: list[str] = field(default_factory=list)
    """Checks that were not possible, with the reasons."""

    @property
    def clean(self) -> bool:
        """Return whether each step counts once and each sample was trained as often as scheduled.

        Repeated steps are not faults: their earlier training has no effect on the model.
        """
        faults = (self.duplicated, self.missing_steps, self.missing_samples, self.out_of_order)
        return not any(found.total for found in faults)
