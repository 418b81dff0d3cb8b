"""Rate-limited logging of repeated errors: one line with a traceback per minute instead of one per poll."""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import structlog

log = structlog.get_logger(__name__)
_SECONDS = 60.0
_MOST = 1000


@dataclass
class FaultLog:
    """Log of errors that writes each distinct error at most once a minute, with its traceback and repeat count.

    Errors are distinct if their event, fields, type or place in the code differ. Thread-safe.
    """

    clock: Callable[[], float] = time.monotonic
    _logged: dict[Hashable, tuple[float, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, event: str, error: Exception, **fields: str) -> None:
        """Log an error with its traceback, unless the same error was logged in the last minute."""
        repeated = self._count(event, error, fields)
        if repeated is not None:
            log.error(event, **fields, **_error_fields(error, repeated), exc_info=error)

    def warn(self, event: str, error: Exception, **fields: str) -> None:
        """Log an expected error in one line without a traceback, unless it was logged in the last minute."""
        repeated = self._count(event, error, fields)
        if repeated is not None:
            log.warning(event, **fields, **_error_fields(error, repeated))

    def report_each(self, event: str, error: Exception) -> None:
        """Log every error in one line; add its traceback at most once a minute."""
        repeated = self._count(event, error, {})
        log.error(event, **_error_fields(error, repeated or 0), exc_info=error if repeated is not None else None)

    def _count(self, event: str, error: Exception, fields: dict[str, str]) -> int | None:
        """Return the number of suppressed repeats since the error's last line; None to suppress it now."""
        key, now = (event, *fields.items(), type(error), _place(error)), self.clock()
        with self._lock:
            if len(self._logged) >= _MOST:
                self._logged = {known: one for known, one in self._logged.items() if now - one[0] < _SECONDS}
            at, repeated = self._logged.get(key, (None, 0))
            if at is not None and now - at < _SECONDS:
                self._logged[key] = at, repeated + 1
                return None
            self._logged[key] = now, 0
            return repeated


def _error_fields(error: Exception, repeated: int) -> dict[str, object]:
    first, _, _ = str(error).partition("\n")
    description = f"{type(error).__name__}: {first}"
    return {"error": description, "repeated": repeated} if repeated else {"error": description}


def _place(error: Exception) -> tuple[str, int] | None:
    """Return where the error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
