"""Response models of a run audit."""

from typing import Generic, TypeVar

from pydantic import BaseModel, Field

from service.domain.runs.audit_report import LISTED, Difference, Duplicate, Gap, LossChange, Repeat, Unseen

T = TypeVar("T")


class Findings(BaseModel, Generic[T]):
    """Findings of one kind."""

    total: int
    listed: list[T] = Field(description=f"the first {LISTED} of them")


class RunAuditOut(BaseModel):
    """Audit of the samples that a run's steps trained, over all attempts and worker groups."""

    clean: bool = Field(
        description="no sample is duplicated, missing or out of order; repeated steps alone are not a fault, because "
        "their earlier training has no effect on the model"
    )
    steps: int = Field(description="optimizer steps that count")
    samples: int = Field(description="samples that these steps trained")
    first_step: int | None
    last_step: int | None
    lines: int = Field(description="metrics lines with samples")
    superseded_lines: int = Field(description="lines of worker groups that a newer group had replaced; ignored")
    repeated: Findings[Repeat] = Field(description="steps trained again; total counts steps, one entry per restart")
    duplicated: Findings[Duplicate] = Field(description="samples trained twice in one epoch of the data")
    missing_steps: Findings[Gap] = Field(description="steps without a metrics line; total counts steps")
    missing_samples: Findings[Unseen] = Field(description="samples that a finished epoch of the data did not train")
    out_of_order: Findings[Difference] = Field(description="steps whose samples differ from the data order")
    changed_losses: Findings[LossChange] = Field(
        description="steps whose loss differs from an earlier training of them with as many workers; not a fault"
    )
    notes: list[str] = Field(description="checks that were not possible, with reasons")
