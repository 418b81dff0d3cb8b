"""What the operator decided about the queue, and what a project's running jobs come to."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.domain.ticket import Ticket


@dataclass(frozen=True)
class Quota:
    """What the running jobs of a project may come to; None: as much as there is."""

    jobs: int | None = None
    workers: int | None = None
    gpus: float | None = None


@dataclass(frozen=True)
class Rules:
    """What the operator decided."""

    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """By project; "*" is for those that are not named."""
    backfill: bool = True
    preemption: bool = True
    resize_seconds: float = 600.0
    """An elastic job grows no more often."""


@dataclass(frozen=True)
class Use:
    """What the running jobs of a project come to."""

    jobs: int = 0
    workers: int = 0
    gpus: float = 0.0

    def plus(self, ticket: Ticket) -> "Use":
        """The same with one job more."""
        gpus = self.gpus + ticket.needs.get("GPU", 0.0)
        return Use(self.jobs + 1, self.workers + ticket.scaling.world, gpus)

    def with_workers(self, ticket: Ticket, *, instead_of: Ticket) -> "Use":
        """The same with a job at another size."""
        gpus = self.gpus + ticket.needs.get("GPU", 0.0) - instead_of.needs.get("GPU", 0.0)
        return Use(self.jobs, self.workers + ticket.scaling.world - instead_of.scaling.world, gpus)
