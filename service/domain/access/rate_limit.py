"""Rate limits: rates and sliding windows."""

import re
from collections import deque
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


@dataclass(frozen=True)
class Rate:
    """A limit of `amount` calls in any period of one `unit`."""

    amount: int
    unit: str

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """Parse a rate such as `600/minute`. Raises ValueError if it is invalid."""
        match = re.fullmatch(rf"([1-9]\d{{0,4}})/({'|'.join(_SECONDS)})", text.strip())
        if match is None:
            raise ValueError(
                f"invalid rate {text!r}; expected e.g. 600/minute (1 to 99999 per second, minute or hour) or none"
            )
        return cls(int(match[1]), match[2])

    @property
    def seconds(self) -> int:
        """Return the length of the period in seconds."""
        return _SECONDS[self.unit]

    def __str__(self) -> str:
        return f"{self.amount}/{self.unit}"


class Window:
    """A sliding window: the times of the newest calls, at most as many as the rate allows."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._times = deque[float](maxlen=rate.amount)
        self.refuses = False
        """True if the last call was rejected."""

    def wait(self, now: float) -> float:
        """Return the seconds until one more call is allowed."""
        full = len(self._times) == self._rate.amount
        return max(0.0, self._times[0] + self._rate.seconds - now) if full else 0.0

    def take(self, now: float) -> None:
        """Record a call, and drop the calls outside the window."""
        while self._times and self._times[0] + self._rate.seconds <= now:
            self._times.popleft()
        self._times.append(now)
        self.refuses = False


def client_network(address: str) -> str:
    """Return the network whose calls are counted together: a /64 for IPv6, where each client has 2^64 addresses."""
    try:
        found: IPv4Address | IPv6Address | None = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(ip_network((found, 64), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)
