"""Word that hosts will be taken away: a checkpoint before they are."""

import time
from collections.abc import Callable

from train_loop.journal import Journal
from train_loop.session import Preemption, Session

_LOOK_SECONDS = 2.0


class PreemptionWatch:
    """Asks in a while whether hosts of the run will be taken away, on all ranks at the same steps."""

    def __init__(self, session: Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = session.preemption
        self._clock = clock
        self._asked = clock()
        self._known: Preemption | None = None

    @property
    def overdue(self) -> bool:
        """Whether by this rank's clock it is time to ask."""
        return self._ask is not None and self._clock() - self._asked >= _LOOK_SECONDS

    def sees_news(self, journal: Journal) -> bool:
        """Whether there is word that was not there before, the same on all ranks; a collective call."""
        assert self._ask is not None, "only who may be pre-empted asks"
        self._asked, found = self._clock(), self._ask()
        if found is None or found == self._known:
            return False
        self._known = found
        journal.event("preemption_notice", ranks=found.ranks, deadline=found.deadline)
        return True
