"""Results of the checks of a model. Needs no torch."""

from typing import Literal

from pydantic import BaseModel, Field


class Finding(BaseModel):
    """The result of one guarantee."""

    guarantee: str
    verdict: Literal["holds", "does not hold", "not tested"]
    seen: str = Field(description="the measured figure, or the reason why it was not tested")
    remedy: str | None = Field(default=None, description="what to do if it does not hold")


class Findings(BaseModel):
    """Results of all guarantees; `ok` if each of them holds or was not tested."""

    ok: bool
    findings: list[Finding]
