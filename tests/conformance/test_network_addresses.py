"""The addresses of a name: `deny` and `reviewDomains` hold for them too, before a connection.

The host itself is allowed, so a refusal of its addresses is a second decision. By choice ours names
a `deny` as its reason, and refuses tunnels and SOCKS before it says that they are open.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.client import Client, Server, scaled
from tests.support.network import (
    Proxies,
    WebOrigin,
    network_proxy,
    start_proxies,
    status,
    web_origin,
)

_PROTOCOLS = ("http", "https_connect", "socks5_tcp")
# For the reference `localhost` always has both; the origin listens on the first one alone.
_LOOPBACK = ["127.0.0.1", "::1"]


class Row(NamedTuple):
    """Rules, and what they mean for a request to a name of 127.0.0.1."""

    domains: dict[str, str]
    review: list[str]
    may_ask: bool
    is_asked: bool
    refusal: str | None  # None: connected


_ROWS = {
    "reviewed": Row({"*": "allow"}, _LOOPBACK, False, False, "policy_denied"),
    "reviewed-may-ask": Row({"*": "allow"}, _LOOPBACK, True, False, "policy_denied"),
    "name-not-reviewed": Row({}, _LOOPBACK, True, True, "policy_denied"),
    "name-reviewed": Row({"*": "allow"}, ["NAME", *_LOOPBACK], True, True, None),
    "denied": Row(
        {"NAME": "allow", "127.0.0.1": "deny", "::1": "deny"}, [], False, False, "denied"
    ),
    "denied-pattern": Row(
        {"*": "allow", "127.0.0.*": "deny", "::*": "deny"}, [], False, False, "denied"
    ),
    "denied-and-asked": Row({"127.0.0.1": "deny", "::1": "deny"}, ["NAME"], True, True, "denied"),
    "other-name-reviewed": Row({"*": "allow"}, ["other.example"], False, False, None),
}


@pytest.fixture(scope="module")
def origin() -> Iterator[WebOrigin]:
    with web_origin() as running:
        yield running


def _other_name() -> str | None:
    """A name of 127.0.0.1 beside `localhost`, which the reference treats apart."""
    for line in Path("/etc/hosts").read_text().splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        for name in names:
            if address == "127.0.0.1" and not name.startswith("localhost"):
                return name
    return None


def _start(client: Client, row: Row, name: str, *, local: bool) -> Proxies:
    rules = network_proxy(
        timeout=30_000 if row.may_ask else None,
        domains={pattern.replace("NAME", name): rule for pattern, rule in row.domains.items()},
        reviewDomains=[pattern.replace("NAME", name) for pattern in row.review],
        allowLocalBinding=local,
    )
    return start_proxies(client, rules)


def _head(protocol: str, name: str, port: int) -> bytes:
    if protocol == "http":
        return f"GET http://{name}:{port}/x HTTP/1.1\r\nHost: {name}:{port}\r\n".encode()
    if protocol == "https_connect":
        return f"CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n".encode()
    encoded = name.encode()
    return b"\x05\x01\x00\x05\x01\x00\x03%c%b%b" % (len(encoded), encoded, port.to_bytes(2))


def _request(proxies: Proxies, protocol: str, place: tuple[str, int], *, asked: bool) -> bytes:
    """All that a proxy sends; the client allows the host if it is asked about it."""
    client, is_socks = proxies.client, protocol == "socks5_tcp"
    port = proxies.socks if is_socks else proxies.http
    sent = _head(protocol, *place) + (b"" if is_socks else b"Connection: close\r\n\r\n")
    received, questions = b"", len(client.requests)
    with socket.create_connection(("127.0.0.1", port), scaled(10)) as link:
        link.sendall(sent)
        if asked:
            while len(client.requests) == questions:
                client.receive()
            question = client.requests[-1]
            assert question["params"]["request"]["protocol"] == protocol
            client.send({"id": question["id"], "result": {"decision": {"type": "allow"}}})
        try:
            if protocol != "http":
                received = link.recv(1024)
                while is_socks and len(received) < 4:
                    received += link.recv(1024)
                link.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while data := link.recv(65536):
                received += data
        except (ConnectionResetError, BrokenPipeError):
            pass  # the end of a tunnel to nowhere
    assert len(client.requests) == questions + asked
    return received


def _check_refusal(kind: str, protocol: str, received: bytes, reason: str) -> None:
    if protocol == "socks5_tcp":
        assert received[2:4] == (b"\x05\x02" if kind == "ours" else b"\x05\x05")
    elif protocol == "https_connect" and kind == "reference":
        assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    else:
        assert status(received) == 403
        shown = {"denied": "blocked-by-denylist", "policy_denied": "blocked-by-policy"}[reason]
        assert f"x-proxy-error: {shown}\r\n".encode() in received
        assert protocol != "http" or f'"reason":"{reason}"'.encode() in received


def _decisions(proxies: Proxies) -> list[tuple[Any, ...]]:
    members = ("protocol", "scope", "decision", "reason")
    return [tuple(each[member] for member in members) for each in proxies.decisions()]


def _play(kind: str, proxies: Proxies, row: Row, place: tuple[str, int]) -> None:
    shown = row.refusal if kind == "ours" else "policy_denied"
    expected: list[tuple[Any, ...]] = []
    for protocol in _PROTOCOLS:
        received = _request(proxies, protocol, place, asked=row.is_asked)
        assert received.endswith(b"origin") == (row.refusal is None)
        expected.append((protocol, "domain", "allow", "not_allowed" if row.is_asked else "allow"))
        if row.refusal is not None:
            assert shown is not None
            _check_refusal(kind, protocol, received, shown)
            expected.append((protocol, "non_domain", "deny", shown))
    proxies.client.run(["true"])
    assert _decisions(proxies) == expected


@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
@pytest.mark.parametrize("name", ["localhost", "other"])
def test_with_local_binding(
    server: Server, kind: str, origin: WebOrigin, row: Row, name: str
) -> None:
    host = name if name == "localhost" else _other_name()
    if host is None:
        pytest.skip("/etc/hosts has no second name of 127.0.0.1")
    with server.connect() as client:
        proxies = _start(client, row, host, local=True)
        _play(kind, proxies, row, (host, origin.port))


@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
def test_without_local_binding(server: Server, kind: str, origin: WebOrigin, row: Row) -> None:
    """Only a name that the rules list may then be local."""
    row = row._replace(domains={**row.domains, "NAME": "allow"})
    row = row._replace(is_asked="NAME" in row.review)
    with server.connect() as client:
        proxies = _start(client, row, "localhost", local=False)
        _play(kind, proxies, row, ("localhost", origin.port))


@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
def test_the_address_itself(server: Server, kind: str, origin: WebOrigin, row: Row) -> None:
    """A request to the address is a matter of the rules alone."""
    verdict = "denied" if row.refusal == "denied" else None
    is_listed = "127.0.0.1" not in row.review and "*" in row.domains
    with server.connect() as client:
        proxies = _start(client, row, "localhost", local=True)
        asked = verdict is None and not is_listed and row.may_ask
        received = _request(proxies, "http", ("127.0.0.1", origin.port), asked=asked)
        if verdict is None and (asked or is_listed):
            assert received.endswith(b"origin")
        else:
            assert status(received) == 403
            assert f'"reason":"{verdict or "not_allowed"}"'.encode() in received
