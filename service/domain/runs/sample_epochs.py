"""Epoch check: each epoch of the data takes every sample at most once, and all samples by its end. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.domain.runs.audit_report import Duplicate, Found, Unseen


@dataclass
class SampleEpochs:
    """The samples `first` to `first + size - 1` in a run with shuffled epochs, with their current epoch.

    Steps without a line took `unknown` positions of the current epoch, so their samples are unknown.
    """

    size: int
    first: int = 0
    taken: int = 0
    data_epoch: int = 0
    unknown: int = 0
    duplicates: Found[Duplicate] = field(default_factory=Found)
    unseen: Found[Unseen] = field(default_factory=Found)
    _steps: "array[int]" = field(init=False)
    """Step of this epoch that trained each sample; 0 if none did."""

    def __post_init__(self) -> None:
        self._steps = array("I", bytes(4 * self.size))

    def take(self, step: int, samples: Sequence[int]) -> None:
        """Count the samples of one step, which may end one epoch and begin the next."""
        left = self.size - self.taken
        if len(samples) <= left:
            self._mark(step, samples)
            self._advance(len(samples))
            return
        # The line is sorted, so it does not show which samples end the epoch: the ones that the epoch still lacks.
        rest = [sample for sample in samples if not self._is_new(step, sample)]
        exact, begun = self.unknown == 0, len(samples) - left
        self._advance(left)
        self.take(step, rest[:begun] if len(rest) > begun and not exact else rest)
        # A missing or repeated sample must not shift later epochs.
        if begun < self.size:
            self.unknown = 0 if exact else max(begun - len(rest), 0)
            self.taken = begun

    def skip(self, positions: int) -> None:
        """Count positions whose samples are unknown."""
        epochs, taken = divmod(self.taken + positions, self.size)
        if epochs:
            self._begin(self.data_epoch + epochs)
            self.unknown = taken
        else:
            self.unknown += positions
        self.taken = taken

    def lose(self, positions: int) -> None:
        """Count positions that a step took but did not list."""
        self._advance(min(positions, self.size - self.taken))

    def _mark(self, step: int, samples: Sequence[int]) -> None:
        for sample in samples:
            if not self._is_new(step, sample):
                before = self._steps[sample - self.first]
                self.duplicates.add(Duplicate(sample, self.data_epoch, before, step))

    def _is_new(self, step: int, sample: int) -> bool:
        """Record a sample. Return whether it is new in this epoch."""
        place = sample - self.first
        if self._steps[place]:
            return False
        self._steps[place] = step
        return True

    def _advance(self, positions: int) -> None:
        self.taken += positions
        if self.taken < self.size:
            return
        if not self.unknown:
            for place in (place for place, step in enumerate(self._steps) if not step):
                self.unseen.add(Unseen(self.first + place, self.data_epoch))
        self._begin(self.data_epoch + 1)

    def _begin(self, data_epoch: int) -> None:
        self._steps = array("I", bytes(4 * self.size))
        self.data_epoch, self.taken, self.unknown = data_epoch, 0, 0
