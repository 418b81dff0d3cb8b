"""Response models of cluster usage."""

from dataclasses import asdict
from datetime import date

from pydantic import BaseModel, Field

from service.domain.jobs.usage import UsageByDay


class UsageOut(BaseModel):
    """Usage of a project's jobs on one day."""

    project: str
    day: date = Field(description="UTC")
    worker_hours: float
    cpu_hours: float
    gpu_hours: float


class UsageDays(BaseModel):
    """Usage, sorted by day, then by project."""

    data: list[UsageOut]

    @classmethod
    def of(cls, found: UsageByDay) -> "UsageDays":
        """Build from the domain."""
        rows = sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
        return cls(data=[UsageOut(project=project, day=day, **asdict(used)) for (project, day), used in rows])
