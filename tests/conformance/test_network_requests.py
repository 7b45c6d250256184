"""Requests to the HTTP proxy of a process: what both servers forward, tunnel or refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client import Server, start_server
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


@pytest.mark.parametrize("by_variable", [False, True])
def test_private_addresses_through_the_upstream_proxy(
    kind: str, origin: WebOrigin, by_variable: bool
) -> None:
    """Without the flag they would be dialled; loopback always is."""
    variable = {"CODEX_EXEC_SERVER_PROXY_PRIVATE_IPS_VIA_UPSTREAM": "true"} if by_variable else {}
    flags = () if by_variable else ("--proxy-private-ips-via-upstream",)
    rules = network_proxy(
        domains={"10.1.2.3": "allow", "127.0.0.1": "allow"},
        allowUpstreamProxy=True,
        allowLocalBinding=True,
    )
    with (
        start_server(kind, *flags, env={"HTTP_PROXY": origin.url, **variable}) as server,
        server.connect() as client,
    ):
        proxies = start_proxies(client, rules)
        for host, line in (
            ("10.1.2.3", "GET http://10.1.2.3/private HTTP/1.1"),
            (f"127.0.0.1:{origin.port}", "GET /private HTTP/1.1"),
        ):
            sent = f"GET http://{host}/private HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
            assert exchange(proxies.http, sent, until=b"origin").startswith(b"HTTP/1.1 200 ")
            assert origin.requests[-1].startswith(f"{line}\n")
