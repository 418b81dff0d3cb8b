"""Port for the checks that must read the data and the model."""

from dataclasses import dataclass
from typing import Protocol

from service.ports.cancellation import Cancellation
from train_loop.plan import LargestRead, ModelShape, Preview, SampleCount
from train_loop.run_dir import Parent
from train_loop.spec import AnyJobSpec, LoraSpec, Problem


@dataclass(frozen=True)
class PreflightReport:
    """The result of a preflight check: all problems, and the model's sizes, if they can be determined."""

    problems: tuple[Problem, ...]
    shape: ModelShape | None
    preview: tuple[Preview, ...] = ()
    """Counts of the first rows of each source."""
    count: SampleCount | None = None
    """Number of training samples, if it can be counted before the data is prepared."""
    largest: LargestRead | None = None
    """The part of the data for which preparation needs most memory."""
    code: str | None = None
    """SHA-256 of the package with the spec's own code, if it has any."""
    lora: LoraSpec | None = None
    """Settings of the adapters in the folder that the spec names, if it names one."""
    notes: tuple[str, ...] = ()
    """Warnings about the model."""


class Preflight(Protocol):
    """Checks that must read the data and the model, in a separate process."""

    def check(
        self, spec: AnyJobSpec, parent: Parent | None = None, cancellation: Cancellation | None = None
    ) -> PreflightReport:
        """Check a spec. Raises PreflightFailed if the check has no result, CallCancelled if it is cancelled."""

    def trouble(self) -> str | None:
        """Return why no spec can be checked now, without waiting; None if the next one is checked at once."""

    def cached(self, spec: AnyJobSpec) -> PreflightReport | None:
        """Return the result of a recent check without problems, else None. Does not start a check."""
