"""Response models of `POST /doctor`."""

from pydantic import BaseModel, Field

from service.domain.doctor.finding import Verdict
from service.use_cases.doctor.doctor import Examination


class FindingOut(BaseModel):
    """The result of one check."""

    check: str = Field(description="`ray.reachable`, `storage.atomic`, …: always the same, in the same order")
    verdict: Verdict
    seen: str
    remedy: str | None = None


class ExaminationOut(BaseModel):
    """The results of all checks; `ok` if none failed."""

    ok: bool
    seconds: float
    findings: list[FindingOut]

    @classmethod
    def of(cls, found: Examination) -> "ExaminationOut":
        """Build from the domain."""
        findings = [FindingOut.model_validate(finding, from_attributes=True) for finding in found.findings]
        return cls(ok=found.healthy, seconds=found.seconds, findings=findings)
