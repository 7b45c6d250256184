"""Any bytes to a proxy of a process: an answer or an end, and nothing reaches a forbidden host."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address

import h11
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.memory_transport import stream_pair
from tests.support.network import launch

from exec_server.protocol.network import DecisionParams, PolicyParams
from exec_server.protocol.urls import MAX_PORT, parse_address
from exec_server.proxy import datagrams, hosts
from exec_server.proxy.decider import Decider
from exec_server.proxy.policy import NetworkPolicy
from exec_server.proxy.process_proxy import HttpProxy
from exec_server.proxy.socks_proxy import SocksProxy
from exec_server.proxy.stream import TransportStream
from exec_server.proxy.upstream import Route, Upstream

_POLICY = NetworkPolicy(launch(domains={"*": "allow", "bad.test": "deny"}))

_HOSTS = st.sampled_from(
    ["a.test", "bad.test", "BAD.test.", "127.0.0.1", "localhost", "[::1]", "8.8.8.8", "x@bad.test"]
)
_TARGETS = st.one_of(
    st.builds("http://{}/{}".format, _HOSTS, st.sampled_from(["", "x?y", "%00", "#"])),
    st.builds("{}:{}".format, _HOSTS, st.sampled_from(["443", "0", "80x", ""])),
    st.sampled_from(["/", "*", "//bad.test/", "https://bad.test/"]),
)
_HEADERS = st.lists(
    st.one_of(
        st.builds("Host: {}".format, _HOSTS),
        st.sampled_from(
            [
                "Content-Length: 3",
                "Transfer-Encoding: chunked",
                "Connection: close, Host",
                "Expect: 100-continue",
                "X-Unix-Socket: /x",
                " folded",
                "A:\tb",
            ]
        ),
    ),
    max_size=5,
)
_METHODS = st.sampled_from(["GET", "POST", "CONNECT", "get", "G T"])
_REQUESTS = st.builds(
    lambda method, target, headers, end: (
        f"{method} {target} HTTP/1.1\r\n"
        + "".join(f"{header}\r\n" for header in headers)
        + f"\r\n{end}"
    ),
    _METHODS,
    _TARGETS,
    _HEADERS,
    st.sampled_from(["", "abc", "3\r\nabc\r\n0\r\n\r\n", "GET / HTTP/1.1\r\n\r\n"]),
)


class _Recorder(Upstream):
    """An upstream that records the hops, and answers nothing; also a Controller."""

    def __init__(self) -> None:
        super().__init__(None)
        self.hops: list[str] = []
        self.denied: list[str] = []

    def report(self, decision: DecisionParams) -> None:
        if decision.decision == "deny":
            self.denied.append(decision.host)

    async def ask(self, question: PolicyParams) -> object:
        raise AssertionError("the client is not asked")

    async def resolve(self, host: str) -> Sequence[str]:
        if host == "bad.test":
            raise AssertionError("a denied name is looked up")
        return ("127.0.0.1",) if "localhost" in host else ("8.8.4.4",)

    async def connect(self, route: Route) -> TransportStream:
        self.hops += route.addresses
        raise OSError("nothing is dialled")


def _serve(kind: type[HttpProxy] | type[SocksProxy], sent: bytes) -> _Recorder:
    async def run() -> _Recorder:
        upstream = _Recorder()
        client, served = stream_pair()
        decider = Decider("p", _POLICY, upstream, upstream.resolve, upstream.forwards)
        client.writer.write(sent)
        client.writer.write_eof()
        async with asyncio.timeout(10):
            await kind(served, "127.0.0.1:5", decider, upstream).serve()
        for end in (client, served):
            end.writer.close()
        return upstream

    return asyncio.run(run())


@given(_REQUESTS.map(str.encode) | st.binary(max_size=300))
def test_http(sent: bytes) -> None:
    assert all(hosts.is_public(hop) for hop in _serve(HttpProxy, sent).hops)


_RESPONSE_HEADERS = st.lists(
    st.sampled_from(
        [
            *(
                "Content-Length: 3",
                "Content-Length: 0",
                "Content-Length: x",
                "Content-Length: 3, 4",
            ),
            *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "X: a\rb"),
            *("Connection: content-length", "Connection: Transfer-Encoding", "content-length: 007"),
            *("Connection: close, X-A", "X-A: b", " folded", "Date: now", "Upgrade: x", "A\t: b"),
        ]
    ),
    max_size=4,
)
_RESPONSES = st.builds(
    lambda interim, version, status, headers, body: (
        interim
        + f"{version} {status}\r\n"
        + "".join(f"{header}\r\n" for header in headers)
        + f"\r\n{body}"
    ),
    st.sampled_from(["", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 x\r\n\r\n" * 70]),
    st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2", "http/1.1"]),
    st.sampled_from(["200 OK", "204 No Content", "304 Same", "101 Switching", "200", "99 x", "x"]),
    _RESPONSE_HEADERS,
    st.sampled_from(
        ["", "abc", "abcdef", "3\r\nabc\r\n0\r\n\r\n", "3\r\nab", "zz\r\n", "1\r\nx\r\n" * 90]
    ),
)


class _OneAnswer(_Recorder):
    """An upstream whose origins send the same bytes, and end."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self._answer = answer
        self.ends: list[TransportStream] = []

    async def connect(self, route: Route) -> TransportStream:
        inner, outer = stream_pair()
        self.ends += (inner, outer)
        outer.writer.write(self._answer)
        outer.writer.write_eof()
        return inner


def _parse_responses(received: bytes, method: str, count: int) -> int:
    """Parse responses and count them; an end before the end of a body is all that may be wrong."""
    parser = h11.Connection(h11.CLIENT)
    parser.receive_data(received)
    parser.receive_data(b"")
    for number in range(count):
        parser.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
        parser.send(h11.EndOfMessage())
        while not isinstance(event := parser.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.ConnectionClosed):
                return number
        if parser.their_state is not h11.DONE:
            return number + 1
        parser.start_next_cycle()
    return count


@given(_RESPONSES.map(str.encode) | st.binary(max_size=300), st.sampled_from(["GET", "HEAD"]))
@example(b"HTTP/1.1 200 OK\r\nConnection: content-length\r\nContent-Length: 3\r\n\r\nabc", "GET")
def test_origins(answer: bytes, method: str) -> None:
    """Whatever an origin sends, the process gets well-formed responses, one for each request."""
    request = f"{method} http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n".encode()

    async def run() -> bytes:
        upstream = _OneAnswer(answer)
        client, served = stream_pair()
        decider = Decider("p", _POLICY, upstream, upstream.resolve, upstream.forwards)
        client.writer.write(request * 2)
        client.writer.write_eof()
        async with asyncio.timeout(10):
            await HttpProxy(served, "127.0.0.1:5", decider, upstream).serve()
            served.writer.close()
            received = await client.reader.read()
        for end in (client, *upstream.ends):
            end.writer.close()
        return received

    received = asyncio.run(run())
    assert received.startswith(b"HTTP/1.1 ")
    try:
        # No response is hidden in the body of the one before it.
        assert _parse_responses(received, method, 2) == received.count(b"HTTP/1.1 ")
    except h11.RemoteProtocolError as error:
        if "closed" not in str(error):
            raise


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda rest: b"\0\0\0" + rest))
def test_datagrams(data: bytes) -> None:
    datagram = datagrams.decode(data)
    if datagram is not None:
        assert 0 < datagram.place.port <= MAX_PORT
        assert data.endswith(datagram.payload)


@given(
    st.one_of(
        st.binary(max_size=60),
        st.builds(
            lambda command, kind, rest: b"\x05\x01\x00\x05" + bytes([command, 0, kind]) + rest,
            st.integers(0, 4),
            st.integers(0, 5),
            st.binary(max_size=40),
        ),
    )
)
def test_socks(sent: bytes) -> None:
    assert all(hosts.is_public(hop) for hop in _serve(SocksProxy, sent).hops)


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
def test_an_ipv4_address_in_ipv6_is_as_public_as_itself(address: IPv4Address) -> None:
    public = hosts.is_public(str(address))
    for prefix in (0xFFFF << 32, 0x64FF9B << 96, 0):
        embedded = IPv6Address(prefix | int(address))
        assert hosts.is_public(str(embedded)) <= public
    assert hosts.is_public(str(IPv6Address(0xFFFF << 32 | int(address)))) == public


@given(st.text(max_size=40))
def test_any_host_gets_a_verdict(text: str) -> None:
    host = hosts.normalize(text)
    verdict = _POLICY.verdict(host)
    address = parse_address(host)
    if address is not None and not hosts.is_public(str(address)):
        assert verdict in ("not_allowed_local", "not_allowed")
    if hosts.split_authority(text, 80) is not None:
        assert hosts.is_usable(host)
