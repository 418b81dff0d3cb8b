"""SSRF protection: parsing of user-supplied URLs and the addresses they may resolve to."""

from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.webhooks.ssrf import AllowList, Endpoint, is_public, parse_target

PUBLIC = ["1.1.1.1", "93.184.216.34", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::200e"]
# fmt: off
NOT_PUBLIC = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.9.9.9", "169.254.169.254",
    "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1",
    "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "168.63.129.16", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1",
    "64:ff9b::808:808", "64:ff9b:1::1", "100::1", "2001::1", "2001:0:a::1", "2001:20::1", "2001:db8::1",
    "2002:7f00:1::1", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1",
    "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1", "2606:4700::1111%eth0",
]
# fmt: on
LOCAL = [ip_network(text) for text in ("127.0.0.0/8", "10.0.0.0/8", "192.168.0.0/16", "169.254.0.0/16")]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_address_is_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_non_public_address_is_blocked(address: str) -> None:
    assert not is_public(ip_address(address))
    assert not AllowList().permits(Endpoint("https", "hooks.example", 443, "/"), address)


@given(st.sampled_from(LOCAL).flatmap(lambda network: st.ip_addresses(v=4, network=str(network))))
def test_local_address_embedded_in_ipv6_is_not_public(address: IPv4Address | IPv6Address) -> None:
    number = int(address)
    embeddings = [
        IPv6Address((0xFFFF << 32) | number),
        IPv6Address(number),
        IPv6Address((0x64FF9B << 96) | number),
        IPv6Address((0x2002 << 112) | (number << 80)),
        IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF)),
    ]
    assert not any(is_public(one) for one in (address, *embeddings))


@given(st.ip_addresses())
def test_public_address_is_global_unicast(address: IPv4Address | IPv6Address) -> None:
    if is_public(address):
        assert address.is_global
        assert not any((address.is_multicast, address.is_private, address.is_loopback, address.is_link_local))


def test_allow_list_opens_networks_and_host_names() -> None:
    allowed = AllowList.parse(["10.1.0.0/16", "fd00::/8", "Hooks.Internal", "127.0.0.1"])
    named, other = Endpoint("http", "hooks.internal", 80, "/"), Endpoint("https", "hooks.example", 443, "/")
    assert allowed.names(named)
    assert allowed.permits(named, "192.168.1.1")
    assert not allowed.names(other)
    assert [allowed.permits(other, address) for address in ("10.1.2.3", "fd00::1", "127.0.0.1")] == [True] * 3
    assert [allowed.permits(other, address) for address in ("10.2.0.1", "::ffff:10.1.2.3", "127.0.0.2", "x")] == [
        False
    ] * 4
    assert allowed.names(Endpoint("http", "10.1.9.9", 80, "/"))
    assert not allowed.names(Endpoint("http", "10.2.9.9", 80, "/"))


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "10.0.0.0/33", "-x", "a b", "http://x", ""])
def test_invalid_allow_list_entry_raises_value_error(entry: str) -> None:
    with pytest.raises(ValueError, match=r"expected e\.g\. 10"):
        AllowList.parse([entry])


def test_parse_target_splits_url() -> None:
    assert parse_target("HTTPS://Hooks.Example/a/b?c=d") == Endpoint("https", "hooks.example", 443, "/a/b?c=d")
    assert parse_target("http://[::1]:8080") == Endpoint("http", "::1", 8080, "/")
    assert parse_target("https://2130706433/").literal is None


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("ftp://x", "must begin with https"),
        ("hooks.example", "must begin with https"),
        ("https://", "expected https"),
        ("https:///path", "expected https"),
        ("https://me:secret@x/", "remove them"),
        ("https://x/#y", "remove the part from #"),
        ("https://x:0/", "expected https"),
        ("https://x:99999/", "expected https"),
        ("https://x:y/", "expected https"),
        ("https://[::1", "expected https"),
        ("https://[1.2.3.4]/", "expected https"),
        ("https://%6cocalhost/", "expected https"),
        ("https://a..b/", "expected https"),
        (f"https://{'x' * 64}.example/", "expected https"),
        ("https://ex\u2025ample/", "punycode"),
        ("https://x\\@y/", "percent-encode"),
        ("https://x/a b", "percent-encode"),
        ("https://x/\r\nhost: y", "percent-encode"),
        ("https://x/\ty", "percent-encode"),
    ],
)
def test_parse_target_of_invalid_or_ambiguous_url_raises_value_error(url: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_target(url)


@given(st.text())
def test_parse_target_of_any_text_returns_target_or_raises_value_error(text: str) -> None:
    for url in (text, f"https://{text}"):
        with suppress(ValueError):
            target = parse_target(url)
            assert (target.host, 0 < target.port < 65536, target.path.isascii()) == (target.host or "some", True, True)
            assert target.path[0] in "/?"
