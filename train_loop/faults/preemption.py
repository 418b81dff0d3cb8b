"""Hosts that will be taken away: a checkpoint at once, then a move to other hosts, or a last checkpoint."""

import logging
import time
from collections.abc import Callable

from train_loop.loop.session import Preemption, Session
from train_loop.telemetry.event_log import Journal

log = logging.getLogger(__name__)
_LOOK_SECONDS = 2.0
_LAST_SAVE_SECONDS = 3.0
"""How long before the deadline the last checkpoint is due, if the group could not move."""
_LATE_SECONDS = 1.0
"""A save that begins so shortly before the deadline may not end in time."""


class PreemptionWatch:
    """Asks every two seconds whether hosts of the run will be taken away, on all ranks at the same steps."""

    def __init__(
        self,
        session: Session,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._ask = session.preemption
        self._may_move = session.may_move
        self._clock, self._wall_clock = clock, wall_clock
        self._asked = self._tried = clock()
        self._looked: float | None = None
        """When this rank last compared the clock with the deadline: once before each step."""
        self._known: Preemption | None = None
        self._saved_last = False

    @property
    def overdue(self) -> bool:
        """Whether by this rank's clock it is time to ask."""
        return self._ask is not None and self._clock() - self._asked >= _LOOK_SECONDS

    def sees_news(self, journal: Journal) -> bool:
        """Return whether there is a notice that was not there before, the same on all ranks; a collective call."""
        assert self._ask is not None, "only ranks that can be preempted ask"
        self._asked, found = self._clock(), self._ask()
        if found is None or found == self._known:
            return False
        self._known, self._saved_last = found, False
        journal.event("preemption_notice", ranks=found.ranks, deadline=found.deadline)
        return True

    def wants_to_move(self) -> bool:
        """Return whether other hosts have room for all ranks, by this rank's look at the cluster every two seconds."""
        if self._known is None or self._may_move is None or self._clock() - self._tried < _LOOK_SECONDS:
            return False
        self._tried = self._clock()
        try:
            return self._may_move()
        except Exception as error:
            # Ray's control plane may be away just then: it is asked again.
            log.warning("Ray does not tell which hosts have room: %s", error)
            return False

    def wants_last_save(self) -> bool:
        """Return, once, whether a last checkpoint is due: 3 s before the deadline, or sooner if steps take longer.

        To be called before each step; the save follows the step.
        """
        now = self._wall_clock()
        step = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if self._known is None or self._known.deadline is None or self._saved_last:
            return False
        left = self._known.deadline - (now + step)
        # The save after this step, or else that after the next one, which would begin too late.
        self._saved_last = left <= _LAST_SAVE_SECONDS or left - step <= _LATE_SECONDS
        return self._saved_last
