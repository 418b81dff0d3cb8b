"""The operator's queue policy, and the usage of a project's running jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.domain.access.roles import ANY, Principal, Role
from service.domain.queue.entry import QueueEntry
from train_loop.spec import AnyJobSpec, Problem


@dataclass(frozen=True)
class PriorityLimits:
    """The operator's maximum priority of the jobs of each project: priority also preempts jobs of other projects."""

    by_project: Mapping[str, int] = field(default_factory=dict)
    """Maximum by project; "*" applies to all other projects, and is 0 if it is not given."""

    def problem(self, caller: Principal, spec: AnyJobSpec) -> Problem | None:
        """Return why the caller may not submit a spec with its priority; None if it may."""
        most = self.by_project.get(spec.project, self.by_project.get(ANY, 0))
        # An admin of the project alone must not preempt others either.
        if spec.priority <= most or caller.has_role(Role.ADMIN, ANY):
            return None
        return Problem(
            "/priority",
            f"priority {spec.priority} is over the maximum of project {spec.project}, {most}; choose at most {most}, "
            "or ask the operator to raise TRAINSHED_MAX_PRIORITY; only an admin of all projects may exceed it",
        )


@dataclass(frozen=True)
class Quota:
    """Limits of the running jobs of a project; None means unlimited."""

    jobs: int | None = None
    workers: int | None = None
    gpus: float | None = None


@dataclass(frozen=True)
class QueuePolicy:
    """The operator's queue policy."""

    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """Quotas by project; "*" applies to all other projects."""
    backfill: bool = True
    preemption: bool = True
    resize_seconds: float = 600.0
    """Minimum seconds that an attempt of an elastic job runs before the job grows."""


@dataclass(frozen=True)
class ProjectUsage:
    """The usage of a project's running jobs."""

    jobs: int = 0
    workers: int = 0
    gpus: float = 0.0

    def plus(self, entry: QueueEntry) -> "ProjectUsage":
        """Return the usage with one more job."""
        gpus = self.gpus + entry.needs.get("GPU", 0.0)
        return ProjectUsage(self.jobs + 1, self.workers + entry.scaling.world, gpus)

    def with_workers(self, entry: QueueEntry, *, instead_of: QueueEntry) -> "ProjectUsage":
        """Return the usage with a job at another size."""
        gpus = self.gpus + entry.needs.get("GPU", 0.0) - instead_of.needs.get("GPU", 0.0)
        return ProjectUsage(self.jobs, self.workers + entry.scaling.world - instead_of.scaling.world, gpus)
