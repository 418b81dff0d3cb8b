"""Opens the database while the service listens already; one that does not answer is asked again and again."""

import threading
from collections.abc import Callable

import structlog
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
)

from service.errors import DatabaseFull, DatabaseUnreachable, DatabaseUnusable, Migrating, ServiceError

log = structlog.get_logger(__name__)
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0


class Opening:
    """How far the database is: `trouble` is what callers are told until it is open, `hopeless` why it never will be."""

    def __init__(self, prepare: Callable[[], object], *, patience: float) -> None:
        self._prepare = prepare
        self._patience = patience
        self.trouble: ServiceError | None = Migrating("the database is being migrated; ask again in a moment")
        self.hopeless: ServiceError | None = None

    def run(self, leaving: threading.Event) -> bool:
        """Open it, in the caller's thread; whether it is open."""
        tries = Retrying(
            retry=retry_if_exception_type((DatabaseUnreachable, DatabaseFull)),
            wait=wait_exponential(_SHORTEST_PAUSE, max=_LONGEST_PAUSE),
            stop=stop_after_delay(self._patience) | stop_when_event_set(leaving),
            sleep=sleep_using_event(leaving),
            before_sleep=self._tell,
            reraise=True,
        )
        try:
            tries(self._prepare)
        except ServiceError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("database_did_not_open")
            self._give_up(DatabaseUnusable(f"the database could not be opened: {type(error).__name__}: {error}"))
        else:
            self.trouble = None
        return self.trouble is None

    def _tell(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, ServiceError):
            self.trouble = error
            log.warning("database_does_not_answer", error=str(error), tries=state.attempt_number)

    def _give_up(self, error: ServiceError) -> None:
        self.trouble = self.hopeless = error


def opened() -> Opening:
    """Of a store that needs no opening."""
    opening = Opening(lambda: None, patience=0.0)
    opening.run(threading.Event())
    return opening
