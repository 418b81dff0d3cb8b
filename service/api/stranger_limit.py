"""Rate limit of calls without a valid key, whatever their path: also of the API description and of unknown paths."""

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.authentication import Guard, secret_of
from service.api.problems import answer_error
from service.errors import RateLimited

PROBES = frozenset({"/healthz", "/readyz"})
"""Paths that are never refused: a refused probe makes an orchestrator restart the service."""
_CLOSE = (b"connection", b"close")


class StrangerLimit:
    """Middleware that limits the calls of each address without a valid key (ASGI).

    Over the limit, the answer also closes the connection, so that requests behind it in the connection end with it.
    """

    def __init__(self, app: ASGIApp, *, guard: Guard) -> None:
        self.app = app
        self.guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or answer that its address has no calls left."""
        if scope["type"] != "http" or self.guard.knows(secret := secret_of(Headers(scope=scope))):
            await self.app(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else ""
        over, status = self._refusal(address), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if over is not None:
                    message["headers"] = [*message["headers"], _CLOSE]
            await send(message)

        if over is not None and scope["path"] not in PROBES:
            await answer_error(Request(scope), over)(scope, receive, answer)
            return
        await self.app(scope, receive, answer)
        # An outage is not the caller's fault. A guess of a key was counted when it failed.
        if status < 500 and not scope["state"].keys() & {"key_id", "counted"} and not self.guard.knows(secret):
            self.guard.rates.count_stranger(address)

    def _refusal(self, address: str) -> RateLimited | None:
        try:
            self.guard.rates.check_stranger(address)
        except RateLimited as error:
            return error
        return None
