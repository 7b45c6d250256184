"""Upstream: routes, addresses in turn, the time to connect, and the server's own proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
from tests.support.clock import run_in_virtual_time
from tests.support.memory_transport import stream_pair

from exec_server.protocol.network import Protocol
from exec_server.proxy import upstream as module
from exec_server.proxy.policy import NetworkAccess
from exec_server.proxy.stream import SocketStream, Stream, TransportStream
from exec_server.proxy.upstream import Route, Upstream

Connect = Callable[[str, int], Coroutine[Any, Any, Stream]]
_PROXY = {"HTTP_PROXY": "http://user@proxy.test:3128", "https_proxy": "http://8.8.4.4"}


def _use(monkeypatch: pytest.MonkeyPatch, connect: Connect) -> None:
    monkeypatch.setattr(SocketStream, "connect", connect)


async def _refuse(address: str, port: int) -> Stream:
    raise ConnectionRefusedError(f"{address}:{port}")


async def _hang(address: str, port: int) -> Stream:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("unreachable")


def test_the_first_address_that_accepts_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        one, two = stream_pair()

        async def connect(address: str, port: int) -> Stream:
            return one if address == "8.8.4.4" else await _refuse(address, port)

        _use(monkeypatch, connect)
        assert await Upstream(None).connect(Route(("8.8.8.8", "8.8.4.4"), 80)) is one
        with pytest.raises(ConnectionRefusedError, match=r"8\.8\.8\.9:80"):
            await Upstream(None).connect(Route(("8.8.8.8", "8.8.8.9"), 80))
        with pytest.raises(OSError, match="no address"):
            await Upstream(None).connect(Route((), 80))
        for end in (one, two):
            end.close()

    asyncio.run(run())


def test_connecting_is_limited_for_all_addresses_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        one, two = stream_pair()

        async def connect(address: str, port: int) -> Stream:
            await asyncio.sleep(module.CONNECT_SECONDS - 1)
            return one if address == "8.8.4.4" else await _refuse(address, port)

        _use(monkeypatch, connect)
        assert await Upstream(None).connect(Route(("8.8.4.4",), 80)) is one
        began = loop.time()
        with pytest.raises(OSError, match="connecting took too long"):
            await Upstream(None).connect(Route(("8.8.8.8", "8.8.4.4"), 80))
        assert loop.time() == began + module.CONNECT_SECONDS == began + 30
        for end in (one, two):
            end.close()

    run_in_virtual_time(run())


@pytest.mark.parametrize(
    ("host", "is_direct"),
    [
        ("10.0.0.1", False),
        ("fd00::1", False),
        ("a.test", False),
        *(
            (host, True)
            for host in ("localhost", "127.8.8.8", "::1", "0.0.0.0", "::ffff:127.0.0.1")
        ),
    ],
)
def test_private_addresses_may_be_reached_through_the_proxy(host: str, is_direct: bool) -> None:
    upstream = Upstream(_PROXY, private=True)
    for tunnel in (False, True):
        assert upstream.route(host, 80, ("8.8.8.8",), tunnel=tunnel).is_proxy != is_direct
    assert not Upstream({}, private=True).route(host, 80, ("8.8.8.8",), tunnel=False).is_proxy


@pytest.mark.parametrize(
    ("variables", "host", "tunnel", "route"),
    [
        (None, "a.test", False, Route(("8.8.8.8",), 80)),
        (_PROXY, "a.test", False, Route(("proxy.test",), 3128, True, b"Basic dXNlcjo=")),
        (_PROXY, "a.test", True, Route(("8.8.4.4",), 80, is_proxy=True)),
        (_PROXY, "localhost", True, Route(("8.8.8.8",), 80)),
        (_PROXY, "10.0.0.1", False, Route(("8.8.8.8",), 80)),
        ({"ALL_PROXY": "http://p.test"}, "a.test", True, Route(("p.test",), 80, is_proxy=True)),
        ({"ALL_PROXY": "socks5://p.test"}, "a.test", True, Route(("8.8.8.8",), 80)),
        ({"HTTP_PROXY": "http://p.test"}, "a.test", True, Route(("p.test",), 80, True)),
        ({"HTTP_PROXY": " p.test:3128\n"}, "a.test", False, Route(("p.test",), 3128, True)),
        ({"HTTP_PROXY": " ", "http_proxy": "p.test"}, "a.test", True, Route(("p.test",), 80, True)),
        (
            {"HTTPS_PROXY": "socks5://a.test", "HTTP_PROXY": "http://[", "ALL_PROXY": "p.test"},
            *("a.test", True, Route(("p.test",), 80, True)),
        ),
        (
            {"HTTP_PROXY": "http://me:p%40%3Ax@p.test", "HTTPS_PROXY": "http://q.test"},
            *("a.test", False, Route(("p.test",), 80, True, b"Basic bWU6cEA6eA==")),
        ),
        (  # a password of bytes that are no UTF-8
            {"HTTP_PROXY": "http://me:%ff%C3%A9@p.test"},
            *("a.test", False, Route(("p.test",), 80, True, b"Basic bWU6/8Op")),
        ),
    ],
)
def test_routes(variables: Mapping[str, str] | None, host: str, tunnel: bool, route: Route) -> None:
    assert Upstream(variables).route(host, 80, ("8.8.8.8",), tunnel=tunnel) == route


@pytest.mark.parametrize(
    ("protocol", "host", "forwards"),
    [
        ("http", "a.test", False),
        ("https_connect", "a.test", True),
        ("socks5_tcp", "a.test", True),
        ("socks5_udp", "a.test", False),
        ("https_connect", "localhost", False),
        ("https_connect", "10.0.0.1", False),
    ],
)
def test_which_requests_another_proxy_gets(protocol: Protocol, host: str, forwards: bool) -> None:
    request = NetworkAccess(protocol, host, 443, "127.0.0.1:5")
    upstream = Upstream({"HTTPS_PROXY": "http://p.test"})
    assert upstream.forwards(request) == forwards
    assert not Upstream(None).forwards(request)


def _ask(
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
    *,
    ends: bool = True,
    variables: Mapping[str, str] = _PROXY,
    authorization: bytes = b"",
) -> float:
    """Ask the server's own proxy for a tunnel; returns how long that has taken."""

    async def run() -> float:
        one, proxy = stream_pair()

        async def connect(address: str, port: int) -> Stream:
            return one

        _use(monkeypatch, connect)
        proxy.writer.write(answer)
        if ends:
            proxy.writer.write_eof()
        loop = asyncio.get_running_loop()
        try:
            tunnel = await Upstream(variables).tunnel("a.test", 443, ("8.8.8.8",))
            assert isinstance(tunnel, TransportStream)
            assert await tunnel.receive() == b"SSH-2.0"
            sent = await proxy.reader.readuntil(b"\r\n\r\n")
            head = b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n"
            assert sent == head + authorization + b"\r\n"
        finally:
            for end in (one, proxy):
                end.close()
        return loop.time()

    return run_in_virtual_time(run())


def test_bytes_after_the_answer_belong_to_the_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    _ask(monkeypatch, b"HTTP/1.1 200 Fine\r\nX: y\r\n\r\nSSH-2.0")


def test_the_proxy_gets_its_user_and_password(monkeypatch: pytest.MonkeyPatch) -> None:
    _ask(
        monkeypatch,
        b"HTTP/1.1 200 Fine\r\n\r\nSSH-2.0",
        variables={"HTTPS_PROXY": "http://me:secret@proxy.test:3128"},
        authorization=b"Proxy-Authorization: Basic bWU6c2VjcmV0\r\n",
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "sent no valid answer"),
        (b"HTTP/1.1 200 OK\r\n", "sent no valid answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 8192, "sent no valid answer"),
        (b"HTTP/1.1 407 No\r\n\r\n", "refused the connection"),
        (b"\r\n\r\n", "refused the connection"),
    ],
)
def test_refused_tunnels(monkeypatch: pytest.MonkeyPatch, answer: bytes, text: str) -> None:
    with pytest.raises(OSError, match=text):
        _ask(monkeypatch, answer)


def test_a_proxy_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError):
        _ask(monkeypatch, b"HTTP/1.1 200 OK\r\n", ends=False)
