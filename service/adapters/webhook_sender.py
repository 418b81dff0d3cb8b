"""Sender of signed messages over HTTP: only to checked addresses, without redirects or proxies, with a timeout."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime

import anyio
import httpcore
import httpx
import standardwebhooks

from service.domain.webhooks.delivery import Answer, Message, Webhook, answered
from service.domain.webhooks.ssrf import AllowList, Endpoint, parse_target

LookUp = Callable[[str], Sequence[str]]
_CONNECT_SECONDS = 3.0
"""Timeout in seconds to connect to each address except the last."""
# Invalid host names raise UnicodeError.
_FAULTS = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError, UnicodeError)


def look_up(host: str) -> list[str]:
    """Resolve a host with the system's resolver. Raises OSError or UnicodeError if that fails."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class WebhookSender:
    """A Sender that any thread may use. `seconds` limits the whole attempt, including the DNS lookup."""

    def __init__(
        self, allowed: AllowList, *, look_up: LookUp = look_up, tls: ssl.SSLContext | None = None, seconds: float = 10.0
    ) -> None:
        self._allowed = allowed
        self._look_up = look_up
        # Trusts certifi's certificate authorities, or the ones in SSL_CERT_FILE.
        self._tls = tls or httpx.create_ssl_context()
        self._seconds = seconds
        self._underway = dict[anyio.CancelScope, asyncio.AbstractEventLoop]()
        self._closed = False
        self._lock = threading.Lock()

    def send(self, webhook: Webhook, message: Message, *, now: float) -> Answer | None:
        """Send a signed message once. Return None if the service stops first: then the result is unknown."""
        return anyio.run(self._send, webhook, message, now)

    def close(self) -> None:
        """Cancel in-flight messages. From then on, send nothing."""
        with self._lock:
            self._closed = True
            for scope, loop in self._underway.items():
                loop.call_soon_threadsafe(scope.cancel)

    async def _send(self, webhook: Webhook, message: Message, now: float) -> Answer | None:
        with anyio.CancelScope() as scope:
            with self._lock:
                if self._closed:
                    return None
                self._underway[scope] = asyncio.get_running_loop()
            try:
                with anyio.fail_after(self._seconds):
                    return await self._post(webhook, message, now)
            except TimeoutError:
                return Answer(None, f"no answer within {self._seconds:g} s")
            except _FAULTS as error:
                return Answer(None, f"{type(error).__name__}: {error}"[:500])
            finally:
                with self._lock:
                    del self._underway[scope]
        return None

    async def _post(self, webhook: Webhook, message: Message, now: float) -> Answer:
        target = parse_target(webhook.url)
        addresses = await _in_thread(self._look_up, target.host)
        # All addresses must be allowed: the next lookup may return any of them first.
        if not addresses or not all(self._allowed.permits(target, address) for address in addresses):
            return Answer(None, _refusal(target))
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
        async with (
            httpcore.AsyncConnectionPool(ssl_context=self._tls, network_backend=_Pinned(addresses)) as pool,
            pool.stream(
                "POST", url, headers=_headers(target, webhook, message, now), content=message.body.encode()
            ) as it,
        ):
            # Only the status and the headers matter, so a body of any length is not read.
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in it.headers}
            return answered(it.status, headers, now=now)


class _Pinned(httpcore.AsyncNetworkBackend):
    """A network backend that connects only to the checked addresses, even if DNS now returns others.

    TLS still verifies the host name.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._plain = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that accepts the connection."""
        for address in self._addresses[:-1]:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._plain.connect_tcp(address, port, _CONNECT_SECONDS)
        return await self._plain.connect_tcp(self._addresses[-1], port)


def _headers(target: Endpoint, webhook: Webhook, message: Message, now: float) -> dict[bytes | str, bytes | str]:
    """Return the headers of Standard Webhooks, with one signature for each valid secret."""
    stamp = datetime.fromtimestamp(int(now), UTC)
    signatures = [
        standardwebhooks.Webhook(secret).sign(message.id, stamp, message.body) for secret in webhook.secrets(now)
    ]
    host = f"[{target.host}]" if ":" in target.host else target.host
    return {
        "host": f"{host}:{target.port}",
        "user-agent": "Trainshed",
        "content-type": "application/json",
        "webhook-id": message.id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": " ".join(signatures),
    }


def _refusal(target: Endpoint) -> str:
    return (
        f"{target.host} has an address that is not on the public internet, so nothing was sent; the operator can add "
        "the host to TRAINSHED_WEBHOOK_ALLOWED"
    )


async def _in_thread(function: LookUp, host: str) -> Sequence[str]:
    """Run the lookup in a daemon thread, which a timeout abandons: a resolver may take arbitrarily long."""
    answer = Future[Sequence[str]]()

    def work() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(function(host))
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="look-up", daemon=True).start()
    return await asyncio.wrap_future(answer)
