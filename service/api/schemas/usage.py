"""Response models of cluster usage."""

from datetime import date

from pydantic import BaseModel, Field


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
