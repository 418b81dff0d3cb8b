"""The network interface of ranks."""

import pytest

from train_loop.system.network import interface_of, socket_settings

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fe80::1%eth0", "00:00:5e:00:53:01"],
    "eth1": ["192.168.7.5", "fd77::5"],
}


@pytest.mark.parametrize(
    ("address", "name"),
    [("10.0.0.5", "eth0"), ("fd77::5", "eth1"), ("127.0.0.1", "lo"), ("fe80::1", "eth0"), ("10.0.0.6", None)],
)
def test_interface_of_address_is_the_one_that_holds_it(address: str, name: str | None) -> None:
    assert interface_of(address, INTERFACES) == name


def test_interface_of_loopback_is_found_on_this_host() -> None:
    assert interface_of("127.0.0.1") == "lo"


def test_socket_settings_name_the_interface_for_gloo_and_nccl() -> None:
    assert socket_settings("10.0.0.5", {}, INTERFACES) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_socket_settings_of_an_ipv6_address_choose_the_family() -> None:
    assert socket_settings("fd77::5", {}, INTERFACES)["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_socket_settings_of_the_operator_take_precedence() -> None:
    found = socket_settings("10.0.0.5", {"GLOO_SOCKET_IFNAME": "bond0"}, INTERFACES)
    assert found == {"NCCL_SOCKET_IFNAME": "=eth0"}


def test_socket_settings_of_an_unknown_address_are_empty() -> None:
    assert socket_settings("10.9.9.9", {}, INTERFACES) == {}
