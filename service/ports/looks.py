"""What can only be found by looking at data and model."""

from dataclasses import dataclass
from typing import Protocol

from train_loop.plan import ModelShape, Preview, SampleCount
from train_loop.run_dir import Parent
from train_loop.spec import JobSpec, Problem


@dataclass(frozen=True)
class Findings:
    """What a look at data and model found: everything wrong, and the model's sizes, unless they cannot be told."""

    problems: tuple[Problem, ...]
    shape: ModelShape | None
    preview: tuple[Preview, ...] = ()
    """Counts of the first rows of each source of text."""
    count: SampleCount | None = None
    """Samples of the training data, if they can be counted before they are prepared."""


class Preflight(Protocol):
    """What can only be found by looking at data and model, in a process of its own."""

    def check(self, spec: JobSpec, parent: Parent | None = None) -> Findings:
        """Look. Raises PreflightFailed when it cannot say."""

    def trouble(self) -> str | None:
        """Return why no spec can be checked now, without waiting; None if the next one is checked at once."""

    def known(self, spec: JobSpec) -> Findings | None:
        """What a look found a moment ago, where all was in order; nobody looks now."""
