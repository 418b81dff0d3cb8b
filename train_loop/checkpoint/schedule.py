"""When a checkpoint is due."""

import time
from collections.abc import Callable

from train_loop.spec import CheckpointSpec


class SaveTimes:
    """Which steps end with a save: every so many steps, and once so many seconds have gone by since the last."""

    def __init__(self, spec: CheckpointSpec, *, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self.saved = step
        """The newest step that was saved, or that the run began with."""
        self._since = clock()

    @property
    def overdue(self) -> bool:
        """Whether by this rank's clock a save should follow the next step; clocks differ, so one rank's counts."""
        limit = self._spec.every_seconds
        return limit is not None and self._clock() - self._since >= limit

    def due(self, step: int) -> bool:
        """Whether a save follows this step by its number."""
        every = self._spec.every_steps
        return every is not None and step % every == 0

    def begin(self, step: int) -> None:
        """A save of this step begins."""
        self.saved, self._since = step, self._clock()
