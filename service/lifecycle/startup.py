"""Opening of the database, with retries, while the service already listens."""

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


class DatabaseStartup:
    """State of the database startup.

    `trouble` is the error returned to callers until the database is open. `hopeless` is set if it can never be opened.
    """

    def __init__(self, prepare: Callable[[], object], *, retry_seconds: float) -> None:
        self._prepare = prepare
        self._retry_seconds = retry_seconds
        self.trouble: ServiceError | None = Migrating("the database is being migrated; retry in a few seconds")
        self.hopeless: ServiceError | None = None

    def run(self, shutdown: threading.Event) -> bool:
        """Open the database in the caller's thread; return whether it is open."""
        tries = Retrying(
            retry=retry_if_exception_type((DatabaseUnreachable, DatabaseFull)),
            wait=wait_exponential(_SHORTEST_PAUSE, max=_LONGEST_PAUSE),
            stop=stop_after_delay(self._retry_seconds) | stop_when_event_set(shutdown),
            sleep=sleep_using_event(shutdown),
            before_sleep=self._report_retry,
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

    def _report_retry(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, ServiceError):
            self.trouble = error
            log.warning("database_does_not_answer", error=str(error), tries=state.attempt_number)

    def _give_up(self, error: ServiceError) -> None:
        self.trouble = self.hopeless = error


def opened() -> DatabaseStartup:
    """Return the state of a store that needs no startup."""
    startup = DatabaseStartup(lambda: None, retry_seconds=0.0)
    startup.run(threading.Event())
    return startup
