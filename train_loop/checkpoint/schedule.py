"""Schedule of saves."""

import time
from collections.abc import Callable

from train_loop.spec import CheckpointSpec


class SaveSchedule:
    """The schedule of saves: after every `every_steps` steps, and `every_seconds` seconds after the last save."""

    def __init__(self, spec: CheckpointSpec, *, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self.saved = step
        """Newest step that was saved, or the step at which the run began."""
        self._since = clock()

    @property
    def overdue(self) -> bool:
        """True if a save should follow the next step by this rank's clock. Clocks differ, so one rank decides."""
        limit = self._spec.every_seconds
        return limit is not None and self._clock() - self._since >= limit

    def due(self, step: int) -> bool:
        """Return whether a save follows this step because of its number."""
        every = self._spec.every_steps
        return every is not None and step % every == 0

    def begin(self, step: int) -> None:
        """Record that a save of this step begins."""
        self.saved, self._since = step, self._clock()
