"""What /doctor answers."""

from pydantic import BaseModel, Field

from service.doctor import Examination
from service.domain.finding import Verdict


class FindingOut(BaseModel):
    """One check."""

    check: str = Field(description="`ray.reachable`, `storage.atomic`, …: always the same, in the same order")
    verdict: Verdict
    seen: str
    remedy: str | None = None


class ExaminationOut(BaseModel):
    """All checks; `ok` where none failed."""

    ok: bool
    seconds: float
    findings: list[FindingOut]

    @classmethod
    def of(cls, found: Examination) -> "ExaminationOut":
        """From the domain."""
        findings = [FindingOut.model_validate(finding, from_attributes=True) for finding in found.findings]
        return cls(ok=found.healthy, seconds=found.seconds, findings=findings)
