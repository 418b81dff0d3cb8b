"""Calls to storage with a deadline: storage that is unavailable or hangs must not hold up the service."""

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import structlog

from service.errors import RunFileRefused, StorageAway, StorageFull
from train_loop.run_dir import IrregularFileError, is_transient, storage_failed

log = structlog.get_logger(__name__)
T = TypeVar("T")
_MOST_THREADS = 32
"""Maximum number of threads that wait for storage at once. A call that hangs occupies its thread."""
_CHECK_SECONDS = 2.0
_RETRY_SECONDS = 1.0
"""Seconds between two checks of an unavailable root."""


@dataclass
class _Outage:
    since: float
    error: str
    next_check: float


class StorageGuard:
    """The guard of storage calls. It records which roots are unavailable, since when and why, and logs each change."""

    def __init__(self, check: Callable[[str], None], *, clock: Callable[[], float] = time.time) -> None:
        """Create the guard. `check` raises OSError if a root is unavailable."""
        self._check = check
        self._clock = clock
        self._lock = threading.Lock()
        self._outages: dict[str, _Outage] = {}
        self._hanging: dict[str, int] = {}
        self._places = threading.BoundedSemaphore(_MOST_THREADS)

    def call(self, root: str, act: Callable[[], T], *, seconds: float) -> T:
        """Return the result of `act`. Raises StorageAway if storage is unavailable, fails, or hangs for `seconds`."""
        self._refuse_if_away(root)
        try:
            return self._within(root, act, seconds)
        except Exception as error:
            if not storage_failed(error):
                raise
            raise self.failed(root, error) from error

    def probe(self, root: str, *, seconds: float) -> None:
        """Raise StorageAway unless the root is available."""
        self.call(root, lambda: self._check(root), seconds=seconds)
        self._is_back(root)

    def outage(self, root: str) -> tuple[float, str] | None:
        """Return since when a root has been unavailable, and why; None if it is available."""
        found = self._outages.get(root)
        return None if found is None else (found.since, found.error)

    def _refuse_if_away(self, root: str) -> None:
        with self._lock:
            outage = self._outages.get(root)
            if outage is None:
                return
            now = time.monotonic()
            if now < outage.next_check or self._hanging.get(root, 0) > 1:
                raise StorageAway(root, outage.since, outage.error)
            # One caller checks the root; the others fail at once.
            outage.next_check = now + _RETRY_SECONDS

    def _within(self, root: str, act: Callable[[], T], seconds: float) -> T:
        if not self._places.acquire(timeout=seconds):
            raise TimeoutError(f"{_MOST_THREADS} earlier requests to storage are still waiting for an answer")
        answer, late = Future[T](), threading.Event()

        def run() -> None:
            try:
                answer.set_result(act())
            except BaseException as error:
                answer.set_exception(error)
            self._places.release()
            with self._lock:
                self._hanging[root] = self._hanging.get(root, 0) - late.is_set()

        threading.Thread(target=run, name="storage", daemon=True).start()
        try:
            found = answer.result(timeout=seconds)
        except TimeoutError as error:
            with self._lock:
                if answer.done():
                    raise
                late.set()
                self._hanging[root] = self._hanging.get(root, 0) + 1
            raise TimeoutError(f"no answer within {seconds:g} s") from error
        self._is_back(root)
        return found

    def failed(self, root: str, error: Exception) -> StorageAway:
        """Return the error for the caller. Record an outage if the whole root is unavailable, not only a file."""
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFull(root, str(error))
        if isinstance(error, IrregularFileError):
            return RunFileRefused(root, str(error))
        message = str(error) or type(error).__name__
        if not is_transient(error) or self._answers(root):
            return StorageAway(root, None, message)
        with self._lock:
            known = self._outages.get(root)
            outage = known or _Outage(self._clock(), message, time.monotonic() + _RETRY_SECONDS)
            outage.error = message
            self._outages[root] = outage
        if known is None:
            log.warning("storage_unavailable", root=root, error=message)
        return StorageAway(root, outage.since, message)

    def _answers(self, root: str) -> bool:
        try:
            self._within(root, lambda: self._check(root), _CHECK_SECONDS)
        except Exception:
            return False
        return True

    def _is_back(self, root: str) -> None:
        if root not in self._outages:
            return
        with self._lock:
            outage = self._outages.pop(root, None)
        if outage is not None:
            log.info("storage_available", root=root, seconds=round(self._clock() - outage.since, 1))
