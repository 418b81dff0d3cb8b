"""What an examination found: one finding a check."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It could not be made, because of what another one found."""


@dataclass(frozen=True)
class Finding:
    """A check: what was seen, and what helps where it is not as it should be."""

    check: str
    verdict: Verdict
    seen: str
    remedy: str | None = None


def ok(check: str, seen: str) -> Finding:
    """All as it should be."""
    return Finding(check, Verdict.OK, seen)


def warning(check: str, seen: str, remedy: str) -> Finding:
    """Jobs run, and may not run well."""
    return Finding(check, Verdict.WARNING, seen, remedy)


def failed(check: str, seen: str, remedy: str) -> Finding:
    """Jobs do not run, or not rightly."""
    return Finding(check, Verdict.FAILED, seen, remedy)


def skipped(check: str, seen: str) -> Finding:
    """Not looked at."""
    return Finding(check, Verdict.SKIPPED, seen)
