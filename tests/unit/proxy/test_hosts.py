"""Hosts as requests name them, and which addresses are public."""

from __future__ import annotations

import pytest

from exec_server.proxy import hosts


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("example.com..:80", "example.com"),
        ("example.com:80", "example.com"),
        ("[::1]:80", "::1"),
        ("::1", "::1"),
        ("0:0::0:1", "::1"),
        ("127.0.0.1.", "127.0.0.1"),
        (" a ", "a"),
        ("", ""),
        (".", ""),
    ],
)
def test_normal_form(text: str, host: str) -> None:
    assert hosts.normalize(text) == host


@pytest.mark.parametrize("host", ["a", "a.b", "::1", "a_b", "x" * 253, "127.1"])
def test_usable_hosts(host: str) -> None:
    assert hosts.is_usable(host)


@pytest.mark.parametrize(
    "host",
    [
        *("", "x" * 254, "a b", "a\tb", "a\0b", "a/b", "a@b", "a%b", "fe80::1%lo", "é", "[a]"),
        # Separators of other parsers: an upstream proxy may take the first part for the host.
        *("a,b.test", "a;b.test", "a:1", "a|b", "a&b", "a=b", "a'b", "a*", "a~b", "a!b", "a{b}"),
    ],
)
def test_hosts_that_are_never_asked_about(host: str) -> None:
    assert not hosts.is_usable(host)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "2606:4700::1111"])
def test_public_addresses(address: str) -> None:
    assert hosts.is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254"),
        *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1"),
        *("192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9"),
        *("224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fc00::1", "fd12::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1"),
        *("2001:db8::1", "100::1", "64:ff9b:1::1"),
        # Addresses that contain one of those above.
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1"),
        *("::ffff:0:127.0.0.1", "64:ff9b:1::808:808"),
        *("2002:7f00:1::", "2002:a00:1::1", "2001:0:a00:1::", "2001:0:808:808::80ff:fffe"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not hosts.is_public(address)


@pytest.mark.parametrize("address", ["::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"])
def test_addresses_that_contain_a_public_one(address: str) -> None:
    assert hosts.is_public(address)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b:8080", ("a.b", 8080)),
        ("A.B.", ("a.b", 80)),
        ("[::1]", ("::1", 80)),
        ("[0::1]:443", ("::1", 443)),
    ],
)
def test_authorities(text: str, expected: tuple[str, int]) -> None:
    assert hosts.split_authority(text, 80) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", ":80", "a:", "a:0", "a:65536", "a:99999", "a:123456", "a:-1", "a:+1", "a:\u0661"),
        *("[::1", "[a]:1", "[127.0.0.1]", "[::1]x", "[fe80::1%25lo]:1", "a b:1", "a:1:2", "a%:1"),
    ],
)
def test_invalid_authorities(text: str) -> None:
    assert hosts.split_authority(text, 80) is None


def test_a_port_may_be_required() -> None:
    assert hosts.split_authority("a", None) is None
    assert hosts.split_authority("a:1", None) == ("a", 1)


@pytest.mark.parametrize(
    ("address", "forms"),
    [
        ("8.8.8.8", ("8.8.8.8",)),
        ("2001:4860::0", ("2001:4860::",)),
        ("fe80::1%lo", ("fe80::1",)),
        ("::ffff:8.8.8.8", ("::ffff:8.8.8.8", "8.8.8.8")),
        ("64:ff9b::808:808", ("64:ff9b::808:808", "8.8.8.8")),
        ("64:ff9b:1::808:808", ("64:ff9b:1::808:808", "8.8.8.8")),
        ("64:ff9b:1:2::808:808", ("64:ff9b:1:2::808:808", "8.8.8.8")),
        ("::ffff:0:808:808", ("::ffff:0:808:808", "8.8.8.8")),
        ("0.0.0.0", ("0.0.0.0", "127.0.0.1")),
        ("::ffff:0.0.0.0", ("::ffff:0.0.0.0", "0.0.0.0", "127.0.0.1")),
        ("::", ("::", "0.0.0.0", "::1", "127.0.0.1")),
    ],
)
def test_forms_of_an_address(address: str, forms: tuple[str, ...]) -> None:
    assert tuple(map(hosts.normalize, hosts.address_forms(address))) == tuple(
        map(hosts.normalize, forms)
    )
