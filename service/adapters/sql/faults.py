"""Failures of the database: their meaning for the caller, for readiness, and for the log."""

import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from sqlalchemy.engine.interfaces import ExceptionContext
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError

from service.errors import DatabaseFull, DatabaseUnreachable, NotReady
from service.fault_log import FaultLog

log = structlog.get_logger(__name__)
ROOM_BYTES = 1 << 20
"""Free bytes below which the file system of SQLite counts as full: a small write may fit, but a job would not."""
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
_IO = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_POSTGRES = {
    "57014": "a statement took longer than TRAINSHED_DATABASE_CALL_SECONDS",
    "55P03": "a lock was not released in time",
    "25006": "it is read-only",
    "53300": "it has no connections left",
    "57P01": "it is shutting down",
    "57P02": "it has crashed and is restarting",
    "57P03": "it is starting",
    "40001": "it aborted the transaction because of a conflict",
    "40P01": "it aborted the transaction because of a deadlock",
}
_FULL = "53100"
_OUTAGES = ("08", "53", "55", "57", "58")
"""SQLSTATE classes of outages: connection, resources, state, operator, system. Other classes are bugs."""


def explain(error: BaseException, file: Path | None) -> NotReady | None:
    """Return the service error for a driver's error; None if it is not an outage of the database.

    `file` is the file of a SQLite database, None for Postgres.
    """
    if file is not None:
        return _explain_sqlite(error, file)
    state = getattr(error, "sqlstate", None)
    if state == _FULL:
        return DatabaseFull()
    if state in _POSTGRES or state is None or state[:2] in _OUTAGES:
        return DatabaseUnreachable.because(_POSTGRES.get(state or "", "the connection failed"))
    return None


def _explain_sqlite(error: BaseException, file: Path) -> NotReady | None:
    # The lowest byte of an extended code is the primary code.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code in _IO and not has_room(file)):
        return DatabaseFull()
    if code in _LOCKED:
        return DatabaseUnreachable.because("another process holds its lock")
    if code in _UNWRITABLE:
        return DatabaseUnreachable.because("it is read-only")
    return DatabaseUnreachable.because("its file cannot be read or written") if code in _IO else None


def has_room(file: Path) -> bool:
    """Return whether the file system of a SQLite database has free space. Raises OSError."""
    return shutil.disk_usage(file.parent).free >= ROOM_BYTES


class DatabaseStatus:
    """The state of a database, as far as its callers have observed it. Threads share it."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.writes_fail = False
        self._faults = FaultLog()
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._reconnecting = False

    def translate(self, context: ExceptionContext) -> None:
        """Raise NotReady in place of a driver's error if that is an outage. This is a listener of `handle_error`."""
        error = context.sqlalchemy_exception
        outage = isinstance(error, OperationalError | InterfaceError | InternalError)
        if context.is_pre_ping or not outage or not isinstance(error, DBAPIError):
            return
        found = explain(context.original_exception, self.file)
        if found is None:
            return
        if context.connection is not None:
            # Each ping tests a read. It tests a write only after a failure.
            self.writes_fail = True
        self._faults.warn("database_failed", _first_line(context.original_exception), reason=found.code)
        raise found from context.original_exception

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Connect within the context: while the database is away, only one caller at a time.

        Raises DatabaseUnreachable at once for other callers, because a frozen server costs each one the whole timeout.
        """
        with self._lock:
            if self._away_since is not None:
                if self._reconnecting:
                    raise DatabaseUnreachable.because("the connection failed")
                self._reconnecting = True
        try:
            yield
        except BaseException:
            self._set_away()
            raise
        self._set_back()

    def _set_away(self) -> None:
        with self._lock:
            known, self._reconnecting = self._away_since, False
            self._away_since = known or time.monotonic()
        if known is None:
            log.warning("database_away")

    def _set_back(self) -> None:
        with self._lock:
            since, self._away_since, self._reconnecting = self._away_since, None, False
        if since is not None:
            log.info("database_back", seconds=round(time.monotonic() - since, 1))

    def check_room(self) -> None:
        """Raise DatabaseFull if the file system of a SQLite database has no free space."""
        try:
            full = self.file is not None and not has_room(self.file)
        except OSError as error:
            raise DatabaseUnreachable.because(os.strerror(error.errno or 0)) from error
        if full:
            raise DatabaseFull


def _first_line(error: BaseException) -> Exception:
    """Return the error with only the first line of its message: the rest may contain values of a row."""
    message = " ".join(str(error).splitlines()[:1])
    return type(error)(message) if isinstance(error, Exception) else RuntimeError(message)
