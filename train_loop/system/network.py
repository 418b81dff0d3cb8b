"""The network interface that ranks use to reach each other."""

import ipaddress
from collections.abc import Iterable, Mapping

import psutil

Interfaces = Mapping[str, Iterable[str]]
"""Addresses by interface name."""


def interface_of(address: str, interfaces: Interfaces | None = None) -> str | None:
    """Return the name of the interface with an address; None if this host does not have the address."""
    wanted = ipaddress.ip_address(address)
    for name, addresses in (interfaces if interfaces is not None else _interfaces()).items():
        if any(_parse(one) == wanted for one in addresses):
            return name
    return None


def socket_settings(
    address: str, environment: Mapping[str, str], interfaces: Interfaces | None = None
) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the interface of an address.

    Without them gloo binds the address to which the hostname resolves, which is 127.0.1.1 on Debian. Variables that
    the operator has set in `environment` are left out.
    """
    name = interface_of(address, interfaces)
    if name is None:
        return {}
    chosen = {
        "GLOO_SOCKET_IFNAME": name,
        # NCCL treats a name as a prefix unless it begins with "=".
        "NCCL_SOCKET_IFNAME": f"={name}",
    }
    if ipaddress.ip_address(address).version == 6:
        chosen["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return {variable: value for variable, value in chosen.items() if variable not in environment}


def _interfaces() -> Interfaces:
    return {name: [one.address for one in found] for name, found in psutil.net_if_addrs().items()}


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        # Link-local addresses contain their interface: fe80::1%eth0.
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
