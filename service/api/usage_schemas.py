"""What goes over the wire of what projects have used."""

from dataclasses import asdict
from datetime import date

from pydantic import BaseModel, Field

from service.domain.usage import UsageByDay


class UsageOut(BaseModel):
    """What the jobs of a project used on a day."""

    project: str
    day: date = Field(description="UTC")
    worker_hours: float
    cpu_hours: float
    gpu_hours: float


class UsageDays(BaseModel):
    """By day, then by project."""

    data: list[UsageOut]

    @classmethod
    def of(cls, found: UsageByDay) -> "UsageDays":
        """From the domain."""
        rows = sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
        return cls(data=[UsageOut(project=project, day=day, **asdict(used)) for (project, day), used in rows])
