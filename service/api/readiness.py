"""Responses before the database is open, and the health probe of the open database."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import problem
from service.errors import DatabaseUnreachable, Migrating, NotReady, ServiceError
from service.lifecycle.startup import DatabaseStartup

_HEALTH = ("/healthz", "/readyz")
_HOLD_SECONDS = 5.0
"""Seconds to hold a request during startup: an up-to-date database opens sooner, so its callers get no error."""
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 2.0


class ReadinessGate:
    """Middleware that rejects requests while the database is not open, except for the health endpoints (ASGI)."""

    def __init__(self, app: ASGIApp, *, startup: DatabaseStartup) -> None:
        self.app = app
        self.startup = startup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or answer it with the reason why the database is not open."""
        if self.startup.trouble is None or scope["type"] != "http" or scope["path"] in _HEALTH:
            await self.app(scope, receive, send)
            return
        if (trouble := await self._trouble()) is None:
            await self.app(scope, receive, send)
        else:
            scope.setdefault("state", {})["outage"] = True
            await problem(trouble)(scope, receive, send)

    async def _trouble(self) -> ServiceError | None:
        """Return why the database is not open, or None. During a migration, wait for up to `_HOLD_SECONDS` first."""
        end = time.monotonic() + _HOLD_SECONDS
        while isinstance(self.startup.trouble, Migrating) and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
        return self.startup.trouble


class DatabaseProbe:
    """A probe of the database. One thread pings it at a time, however many callers wait and however long it hangs."""

    def __init__(self, ping: Callable[[], None]) -> None:
        self._ping = ping
        self._pending: Future[None] | None = None

    async def is_up(self) -> bool:
        """Return True if the database is usable now. Concurrent callers share one ping."""
        return await self.trouble() is None

    async def trouble(self) -> ServiceError | None:
        """Return why the database cannot be used now, or None if it answers and accepts writes."""
        if self._pending is None or self._pending.done():
            self._pending = Future()
            # A daemon thread: a hung ping does not keep the process alive.
            threading.Thread(target=self._run_ping, args=(self._pending,), name="pulse", daemon=True).start()
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._pending)), _PATIENCE_SECONDS)
        except NotReady as error:
            return error
        except TimeoutError:
            return DatabaseUnreachable.because(f"no answer within {_PATIENCE_SECONDS:g} s")
        except Exception:
            return DatabaseUnreachable.because("the connection failed")
        return None

    def _run_ping(self, answer: "Future[None]") -> None:
        try:
            answer.set_result(self._ping())
        except BaseException as error:
            answer.set_exception(error)
