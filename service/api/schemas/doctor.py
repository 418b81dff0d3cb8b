"""Response models of `POST /doctor`."""

from pydantic import BaseModel, Field

from service.domain.doctor.finding import Verdict


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
