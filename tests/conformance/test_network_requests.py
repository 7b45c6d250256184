"""Requests to the HTTP proxy of a process: what both servers forward, tunnel or refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client import Server
from tests.support.network import (
    Proxies,
    WebOrigin,
    exchange,
    network_proxy,
    start_proxies,
    web_origin,
)


@pytest.fixture(scope="module")
def origin() -> Iterator[WebOrigin]:
    with web_origin() as running:
        yield running


@pytest.fixture(scope="module")
def proxies(server: Server) -> Iterator[Proxies]:
    rules = network_proxy(domains={"127.0.0.1": "allow", "bad.test": "deny"})
    with server.connect() as client:
        yield start_proxies(client, rules)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("GET http://ORIGIN/x HTTP/1.1", "200 origin"),
        ("GET /x HTTP/1.1", "400 missing host"),
        ("GET http://bad.test/x HTTP/1.1", "403 denied"),
        ("CONNECT bad.test:443 HTTP/1.1", "403 Domain denied by the sandbox policy."),
        ("GET http://ORIGIN/é?ü=1 HTTP/1.1\r\nHost: ORIGIN", "200 origin"),
        ("GET /é HTTP/1.1\r\nHost: ORIGIN", "200 origin"),
        ("GET http://é.test/ HTTP/1.1\r\nHost: é.test", "400 "),
    ],
)
def test_requests(proxies: Proxies, origin: WebOrigin, head: str, expected: str) -> None:
    sent = f"{head}\r\nConnection: close\r\n\r\n".replace("ORIGIN", origin.url[len("http://") :])
    answer = exchange(proxies.http, sent.encode()).decode()
    status, _, text = expected.partition(" ")
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert text in answer.partition("\r\n\r\n")[2]


def test_a_tunnel_needs_no_host(proxies: Proxies, origin: WebOrigin) -> None:
    sent = f"CONNECT 127.0.0.1:{origin.port} HTTP/1.1\r\n\r\n".encode()
    answer = exchange(proxies.http, sent, until=b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


def test_limited_mode_and_socks(server: Server) -> None:
    """Tunnels for TLS are refused after the host, others before it."""
    rules = network_proxy(
        domains={"127.0.0.1": "allow", "bad.test": "deny"}, mode="limited", allowLocalBinding=True
    )
    with server.connect() as client:
        proxies = start_proxies(client, rules)
        assert proxies.socks is not None
        for host, port in ((b"bad.test", 80), (b"bad.test", 443), (b"127.0.0.1", 443)):
            sent = b"\x05\x01\x00\x05\x01\x00\x03%c%b%b" % (len(host), host, port.to_bytes(2))
            assert exchange(proxies.socks, sent)[2:4] == b"\x05\x02"
        client.run(["true"])
        assert [each["reason"] for each in proxies.decisions()] == [
            *("method_not_allowed", "denied"),
            *("allow", "mitm_required"),
        ]
