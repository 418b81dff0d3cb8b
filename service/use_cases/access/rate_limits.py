"""Rate limits of callers, enforced before authentication."""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from service.domain.access.rate_limit import Rate, Window, client_network
from service.domain.access.roles import OPERATOR, Principal
from service.errors import RateLimited

K = TypeVar("K")
V = TypeVar("V")
_MOST_NAMES = 10_000
"""Maximum number of tracked keys and addresses; the least recently used are evicted."""
_STREAM_SECONDS = 5
"""Retry-After of a refused stream: the end of the open ones is unknown."""


class Kind(StrEnum):
    """A kind of call that is limited; the value is the name of its setting."""

    READS = "reads_per_key"
    WRITES = "writes_per_key"
    UNAUTHENTICATED = "strangers_per_address"


@dataclass(frozen=True)
class Limits:
    """Limits of each kind of call; a kind without an entry is unlimited."""

    rates: Mapping[Kind, Rate] = field(default_factory=dict)
    streams_per_key: int | None = None


@dataclass(frozen=True)
class AuthAttempt:
    """An authentication attempt."""

    secret: str
    address: str
    kind: Kind

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 digest that is stored instead of the secret."""
        return hashlib.sha256(self.secret.encode()).digest()


class Rates:
    """Call counters of this process. Call it from the event loop only: it has no lock."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._windows = OrderedDict[tuple[Kind, str], Window]()
        self._known = OrderedDict[bytes, str]()
        self._streams = Counter[str]()

    def knows(self, secret: str) -> bool:
        """Return whether this secret has authenticated a caller."""
        return hashlib.sha256(secret.encode()).digest() in self._known

    def check_stranger(self, address: str) -> None:
        """Check the rate limit of calls without a valid key. Raises RateLimited."""
        self._require_room(Kind.UNAUTHENTICATED, client_network(address))

    def count_stranger(self, address: str) -> None:
        """Count a call without a valid key."""
        self._count(Kind.UNAUTHENTICATED, client_network(address))

    def check(self, attempt: AuthAttempt) -> bool:
        """Check the rate limit before authentication; return True if the call was counted. Raises RateLimited."""
        # A known key is not limited by unauthenticated calls from the same address.
        known = self._known.get(attempt.digest)
        if known is None:
            self.check_stranger(attempt.address)
            return False
        # Counted now, because concurrent calls are not authenticated yet.
        self._known.move_to_end(attempt.digest)
        self._take(attempt.kind, known)
        return True

    def record_success(self, attempt: AuthAttempt, caller: Principal) -> None:
        """Record an authenticated caller, and count the call. Raises RateLimited."""
        self._known[attempt.digest] = caller.id
        _keep_newest(self._known, attempt.digest)
        self._take(attempt.kind, caller.id)

    def record_failure(self, attempt: AuthAttempt) -> None:
        """Count a failed authentication."""
        self._known.pop(attempt.digest, None)
        self.count_stranger(attempt.address)

    @contextmanager
    def stream(self, caller: Principal) -> Iterator[None]:
        """Count an open stream of the caller until the block ends. Raises RateLimited."""
        most = self._limits.streams_per_key
        if most is not None and caller.id != OPERATOR.id and self._streams[caller.id] >= most:
            raise RateLimited(
                f"stream limit of this key exceeded: {most} open streams (TRAINSHED_STREAMS_PER_KEY={most}); close a "
                "stream, or ask the operator for a higher limit",
                _STREAM_SECONDS,
            )
        self._streams[caller.id] += 1
        try:
            yield
        finally:
            self._streams[caller.id] -= 1
            if not self._streams[caller.id]:
                del self._streams[caller.id]

    def _require_room(self, kind: Kind, name: str) -> None:
        window = self._windows.get((kind, name))
        if window is not None and (wait := window.wait(self._clock())) > 0:
            first, window.refuses = not window.refuses, True
            raise RateLimited(_limit_message(kind, self._limits.rates[kind], wait), math.ceil(wait), first=first)

    def _take(self, kind: Kind, name: str) -> None:
        self._require_room(kind, name)
        self._count(kind, name)

    def _count(self, kind: Kind, name: str) -> None:
        rate = self._limits.rates.get(kind)
        if rate is None:
            return
        if (kind, name) not in self._windows:
            self._windows[kind, name] = Window(rate)
        self._windows[kind, name].take(self._clock())
        _keep_newest(self._windows, (kind, name))


def _keep_newest(names: OrderedDict[K, V], used: K) -> None:
    names.move_to_end(used)
    if len(names) > _MOST_NAMES:
        names.popitem(last=False)


def _limit_message(kind: Kind, rate: Rate, wait: float) -> str:
    who, remedy = {
        Kind.READS: ("reads per key", "send fewer requests"),
        Kind.WRITES: ("writes per key", "send fewer requests"),
        Kind.UNAUTHENTICATED: ("unauthenticated calls per address", "send a valid key"),
    }[kind]
    rule = f"rate limit exceeded: {rate} {who} (TRAINSHED_{kind.upper()}={rate})"
    return f"{rule}; wait {math.ceil(wait)} s and {remedy}, or ask the operator for a higher limit"
