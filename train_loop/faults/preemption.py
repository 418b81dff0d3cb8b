"""Preemption of hosts: a checkpoint at once, then a move to other hosts, or a last checkpoint at the deadline."""

import logging
import time
from collections.abc import Callable

from train_loop.loop.session import Preemption, Session

log = logging.getLogger(__name__)
_POLL_SECONDS = 2.0
_LAST_SAVE_SECONDS = 3.0
"""Seconds before the deadline at which the last checkpoint is due, if the group could not move."""
_LATE_SECONDS = 1.0
"""A save that starts within this many seconds before the deadline may not finish in time."""


class PreemptionWatch:
    """A check for preemption of the run's hosts every 2 s, on all ranks at the same steps."""

    def __init__(
        self,
        session: Session,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal = session.journal
        self._read_notice = session.preemption
        self._may_move = session.may_move
        self._clock, self._wall_clock = clock, wall_clock
        self._checked_at = self._tried = clock()
        self._compared_at: float | None = None
        """Unix time of this rank's last comparison with the deadline, once before each step."""
        self._known: Preemption | None = None
        self._saved_last = False

    @property
    def overdue(self) -> bool:
        """Return whether a check is due by this rank's clock."""
        return self._read_notice is not None and self._clock() - self._checked_at >= _POLL_SECONDS

    def sees_news(self) -> bool:
        """Return whether there is a new preemption notice, identical on all ranks. A collective call."""
        assert self._read_notice is not None, "only ranks with a preemption source check for it"
        self._checked_at, found = self._clock(), self._read_notice()
        if found is None or found == self._known:
            return False
        self._known, self._saved_last = found, False
        self._journal.event("preemption_notice", ranks=found.ranks, deadline=found.deadline)
        return True

    def wants_to_move(self) -> bool:
        """Return whether other hosts have room for all ranks; checked on this rank every 2 s after a notice."""
        if self._known is None or self._may_move is None or self._clock() - self._tried < _POLL_SECONDS:
            return False
        self._tried = self._clock()
        try:
            return self._may_move()
        except Exception as error:
            # Ray's control plane may be temporarily unavailable: retry later.
            log.warning("free resources of hosts cannot be read from Ray: %s", error)
            return False

    def wants_last_save(self) -> bool:
        """Return True once when the last checkpoint is due: 3 s before the deadline, or earlier if steps take longer.

        Call it before each step; the save follows the step.
        """
        now = self._wall_clock()
        step = 0.0 if self._compared_at is None else now - self._compared_at
        self._compared_at = now
        if self._known is None or self._known.deadline is None or self._saved_last:
            return False
        seconds_left = self._known.deadline - (now + step)
        # Save after this step if the save after the next step would start too late.
        self._saved_last = seconds_left <= _LAST_SAVE_SECONDS or seconds_left - step <= _LATE_SECONDS
        return self._saved_last
