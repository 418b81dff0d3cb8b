"""How often callers may call: whoever does so too often is refused before anybody has looked who it is."""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from service.domain.access import OPERATOR, Caller
from service.domain.rates import Rate, Window, neighbourhood
from service.errors import RateLimited

K = TypeVar("K")
V = TypeVar("V")
_MOST_NAMES = 10_000
"""Keys and addresses of which something is remembered; beyond, whoever was silent longest is forgotten."""
_STREAM_SECONDS = 5
"""After which one may ask again for a stream: nobody knows when one ends."""


class Kind(StrEnum):
    """What is counted; the name of its setting."""

    READS = "reads_per_key"
    WRITES = "writes_per_key"
    STRANGERS = "strangers_per_address"


@dataclass(frozen=True)
class Limits:
    """How much of each is too much; what is not named is not counted."""

    rates: Mapping[Kind, Rate] = field(default_factory=dict)
    streams_per_key: int | None = None


@dataclass(frozen=True)
class Attempt:
    """Somebody asks to be let in."""

    secret: str
    address: str
    kind: Kind

    @property
    def digest(self) -> bytes:
        """What is remembered in place of the secret."""
        return hashlib.sha256(self.secret.encode()).digest()


class Rates:
    """Counts what callers do, in this process alone; to be asked from the event loop alone, so it needs no lock."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._windows = OrderedDict[tuple[Kind, str], Window]()
        self._known = OrderedDict[bytes, str]()
        self._streams = Counter[str]()

    def admit(self, attempt: Attempt) -> bool:
        """Let somebody ask who has not asked too often; whether it is counted already. Raises RateLimited."""
        # Who was let in before is not shut out by strangers that come from the same address.
        known = self._known.get(attempt.digest)
        if known is None:
            self._must_have_room(Kind.STRANGERS, neighbourhood(attempt.address))
            return False
        # At once: of many who come together, none knows yet what becomes of the others.
        self._known.move_to_end(attempt.digest)
        self._take(attempt.kind, known)
        return True

    def let_in(self, attempt: Attempt, caller: Caller) -> None:
        """Remember a caller, and count what was not counted before. Raises RateLimited."""
        self._known[attempt.digest] = caller.id
        _keep_newest(self._known, attempt.digest)
        self._take(attempt.kind, caller.id)

    def turned_away(self, attempt: Attempt) -> None:
        """Count a stranger."""
        self._known.pop(attempt.digest, None)
        self._count(Kind.STRANGERS, neighbourhood(attempt.address))

    @contextmanager
    def stream(self, caller: Caller) -> Iterator[None]:
        """While it lasts, the caller has one stream more. Raises RateLimited."""
        most = self._limits.streams_per_key
        if most is not None and caller.id != OPERATOR.id and self._streams[caller.id] >= most:
            raise RateLimited(
                f"{most} streams are open with this key, and no more may be (TRAINSHED_STREAMS_PER_KEY={most}); close "
                "one, or ask the operator for more",
                _STREAM_SECONDS,
            )
        self._streams[caller.id] += 1
        try:
            yield
        finally:
            self._streams[caller.id] -= 1
            if not self._streams[caller.id]:
                del self._streams[caller.id]

    def _must_have_room(self, kind: Kind, name: str) -> None:
        window = self._windows.get((kind, name))
        if window is not None and (wait := window.wait(self._clock())) > 0:
            first, window.refuses = not window.refuses, True
            raise RateLimited(_told(kind, self._limits.rates[kind], wait), math.ceil(wait), first=first)

    def _take(self, kind: Kind, name: str) -> None:
        self._must_have_room(kind, name)
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


def _told(kind: Kind, rate: Rate, wait: float) -> str:
    who, remedy = {
        Kind.READS: ("reads with one key", "ask less often"),
        Kind.WRITES: ("writes with one key", "ask less often"),
        Kind.STRANGERS: ("calls with keys that open nothing, from one address", "send a key that opens"),
    }[kind]
    rule = f"{rate} is the most {who} (TRAINSHED_{kind.upper()}={rate})"
    return f"{rule}; wait {math.ceil(wait)} s and {remedy}, or ask the operator for more"
