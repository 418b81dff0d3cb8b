"""Findings of the doctor: one per check."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"
    """The check could not run because of another check's result, or because too little time was left."""


@dataclass(frozen=True)
class Finding:
    """A check with its observation, and a remedy unless it passed."""

    check: str
    verdict: Verdict
    seen: str
    remedy: str | None = None


def ok(check: str, seen: str) -> Finding:
    """Return the finding of a passed check."""
    return Finding(check, Verdict.OK, seen)


def warning(check: str, seen: str, remedy: str) -> Finding:
    """Return the finding of a problem that does not stop jobs, but may affect them."""
    return Finding(check, Verdict.WARNING, seen, remedy)


def failed(check: str, seen: str, remedy: str) -> Finding:
    """Return the finding of a problem that stops jobs or makes them run incorrectly."""
    return Finding(check, Verdict.FAILED, seen, remedy)


def skipped(check: str, seen: str) -> Finding:
    """Return the finding of a check that did not run."""
    return Finding(check, Verdict.SKIPPED, seen)
