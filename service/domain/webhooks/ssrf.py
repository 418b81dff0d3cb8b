"""SSRF protection: a user's URL may lead to the public internet and to hosts that the operator allows. Pure.

The operator's machines, their metadata services and addresses disguised as public ones are blocked.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

Network = IPv4Network | IPv6Network
# IANA's special-purpose addresses, and addresses that embed another address. `is_global` of the standard library is
# checked too, but its result for these has changed between Python versions.
_SHUT = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            # Azure serves its virtual machines here, including their secrets.
            "168.63.129.16/32",
            # Teredo and other IETF protocol assignments, documentation, 6to4.
            *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
        ),
    )
)
_UNICAST = ip_network("2000::/3")
"""All public unicast IPv6 addresses. Loopback, mapped IPv4, NAT64, local and multicast addresses are outside."""
_PORTS = {"https": 443, "http": 80}
_LABEL = r"[a-z0-9_]([-a-z0-9_]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?", re.ASCII)


@dataclass(frozen=True)
class Endpoint:
    """The parts of a URL, parsed once: the request goes to exactly the host that was checked."""

    scheme: str
    host: str
    port: int
    path: str
    """Path with the query."""

    @property
    def literal(self) -> IPv4Address | IPv6Address | None:
        """Return the host as an IP address; None if it is a name."""
        return _address(self.host)


@dataclass(frozen=True)
class AllowList:
    """The addresses and host names that the operator allows besides the public internet."""

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> "AllowList":
        """Parse the operator's entries. Raises ValueError if an entry is neither a CIDR nor a host name."""
        networks, hosts = list[Network](), set[str]()
        for entry in entries:
            try:
                networks.append(ip_network(entry))
            except ValueError:
                if "/" in entry or not _HOST.fullmatch(entry.lower()):
                    raise ValueError(
                        f"{entry!r} is not a CIDR or host name; expected e.g. 10.1.0.0/16 or hooks.internal"
                    ) from None
                hosts.add(entry.lower())
        return cls(tuple(networks), frozenset(hosts))

    def names(self, target: Endpoint) -> bool:
        """Return whether the operator has allowed this host explicitly."""
        return target.host in self.hosts or (target.literal is not None and self._holds(target.literal))

    def permits(self, target: Endpoint, address: str) -> bool:
        """Return whether a request to this host may connect to `address`."""
        found = _address(address)
        return found is not None and (target.host in self.hosts or self._holds(found) or is_public(found))

    def _holds(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self.networks)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether the address is public and unicast, and does not embed another address."""
    if isinstance(address, IPv6Address) and (address not in _UNICAST or address.scope_id is not None):
        return False
    return address.is_global and not address.is_multicast and not any(address in network for network in _SHUT)


def parse_target(url: str) -> Endpoint:
    """Parse an http or https URL. Raises ValueError, with the problem in its message."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ValueError("the URL contains an invalid character; percent-encode it, or write the host in punycode")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise ValueError(
            f"invalid URL {url!r} ({error}); expected https://host/path or https://host:port/path"
        ) from None
    if parts.scheme not in _PORTS:
        raise ValueError(f"invalid scheme {parts.scheme!r}; the URL must begin with https://")
    if "@" in parts.netloc:
        raise ValueError("the URL contains a user or password; remove them, each request is signed instead")
    if "#" in url:
        raise ValueError("the URL contains a fragment, which is never sent; remove the part from # on")
    if port == 0 or (_address(host) is None and not _HOST.fullmatch(host)):
        raise ValueError(f"invalid host or port {parts.netloc!r}; expected https://host/path or https://host:port/path")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Endpoint(parts.scheme, host, port or _PORTS[parts.scheme], path)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
