"""How often somebody may do something: rates, and a window of time that moves over what was done."""

import re
from collections import deque
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


@dataclass(frozen=True)
class Rate:
    """So many in every stretch of time of this length, wherever it begins."""

    amount: int
    unit: str

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """From `600/minute`. Raises ValueError."""
        match = re.fullmatch(rf"([1-9]\d{{0,4}})/({'|'.join(_SECONDS)})", text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no rate; write 1 to 99999 per second, minute or hour: 600/minute, or none")
        return cls(int(match[1]), match[2])

    @property
    def seconds(self) -> int:
        """How long its stretch of time is."""
        return _SECONDS[self.unit]

    def __str__(self) -> str:
        return f"{self.amount}/{self.unit}"


class Window:
    """When the last ones were done: as many of them as a rate allows at once."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._times = deque[float](maxlen=rate.amount)
        self.refuses = False
        """Whether the last one who asked was refused."""

    def wait(self, now: float) -> float:
        """Seconds until there is room for one more."""
        full = len(self._times) == self._rate.amount
        return max(0.0, self._times[0] + self._rate.seconds - now) if full else 0.0

    def take(self, now: float) -> None:
        """Note that one more was done, and forget what is over."""
        while self._times and self._times[0] + self._rate.seconds <= now:
            self._times.popleft()
        self._times.append(now)
        self.refuses = False


def neighbourhood(address: str) -> str:
    """What calls from an address are counted together with: IPv6 gives everybody a network of 2^64 addresses."""
    try:
        found: IPv4Address | IPv6Address | None = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(ip_network((found, 64), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)
