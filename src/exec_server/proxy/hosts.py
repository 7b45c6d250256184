"""Hosts as requests name them, and which addresses are public. Pure."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

from exec_server.protocol import urls
from exec_server.protocol.urls import HOST_CHARACTERS, REMEMBERED_ADDRESSES, parse_address

# Addresses that lead to this machine, to its networks, to many machines or to none.
_LOCAL_V4: Final = tuple(
    map(
        IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
            *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16"),
            *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        ),
    )
)
_LOCAL_V6: Final = tuple(
    map(
        IPv6Network,
        (
            *("::/128", "::1/128", "64:ff9b:1::/48", "100::/64", "2001:db8::/32"),
            *("fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
        ),
    )
)
# Prefixes of IPv6 addresses whose last 32 bits are an IPv4 address: compatible, translated (RFC
# 2765), and NAT64 (RFC 6052, and RFC 8215 for networks of one's own).
_EMBEDDING: Final = tuple(
    map(IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"))
)
# Linux connects an address that means "any" to the loopback address of its family.
_ANY_TO_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# Names in DNS and /etc/hosts; another proxy might read other characters as the end of a host.
_is_name = re.compile(r"[a-z0-9._-]+").fullmatch


def normalize(text: str) -> str:
    """The host as it is compared, without brackets, one `:port` and trailing dots; may be empty."""
    host = text.strip()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    host = host.rstrip(".").lower()
    address = parse_address(host)
    return host if address is None else str(address)


def is_usable(host: str) -> bool:
    """Whether a normal host can be asked about and looked up."""
    if len(host) > HOST_CHARACTERS:
        return False
    return _is_name(host) is not None or parse_address(host) is not None


@lru_cache(REMEMBERED_ADDRESSES)
def is_public(address: str) -> bool:
    """Whether an address of the resolver leads to another machine of the internet."""
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv4Address):
        return not any(parsed in network for network in _LOCAL_V4)
    if any(parsed in network for network in _LOCAL_V6):
        return False
    return all(is_public(str(embedded)) for embedded in _embedded(parsed))


def _embedded(address: IPv6Address) -> list[IPv4Address]:
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _EMBEDDING):
        found.append(IPv4Address(int(address) & 0xFFFF_FFFF))
    return [each for each in found if each is not None]


def address_forms(address: str) -> tuple[str, ...]:
    """A resolved address without scope, its IPv4 addresses, and loopback if one leads there."""
    parsed = ip_address(address.partition("%")[0])
    embedded = _embedded(parsed) if isinstance(parsed, IPv6Address) else []
    forms = (str(parsed), *map(str, embedded))
    return (*forms, *(_ANY_TO_LOOPBACK[form] for form in forms if form in _ANY_TO_LOOPBACK))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its own name."""
    if parse_address(host) is None:
        return host == "localhost"
    return any(ip_address(form).is_loopback for form in address_forms(host))


def split_authority(text: str, default_port: int | None) -> tuple[str, int] | None:
    """Host and port of `HOST[:PORT]`; None if either is missing or invalid."""
    try:
        host, port = urls.split_authority(text)
    except ValueError:
        return None
    host, port = normalize(host), default_port if port is None else port
    return (host, port) if port is not None and is_usable(host) else None
