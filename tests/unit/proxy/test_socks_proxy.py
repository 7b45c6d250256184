"""SocksProxy over connections in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
from tests.support.clock import run_in_virtual_time
from tests.support.memory_transport import stream_pair
from tests.support.network import launch

from exec_server.protocol.network import DecisionParams, PolicyParams
from exec_server.proxy import socks_proxy as module
from exec_server.proxy.decider import Decider
from exec_server.proxy.policy import NetworkPolicy
from exec_server.proxy.socks_proxy import SocksProxy, UdpAssociation
from exec_server.proxy.stream import Stream, TransportStream
from exec_server.proxy.upstream import Route, Upstream

_HELLO = b"\x05\x01\x00"
_REFUSED = b"\x05\x00\x05\x02\x00\x01" + bytes(6)


class FakeUpstream(Upstream):
    """Origins in memory that repeat what they get; also a Controller and a resolver."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.policy = NetworkPolicy(launch(domains={"a.test": "allow", "1.1.1.1": "allow"}))
        super().__init__(None)

    def report(self, decision: DecisionParams) -> None:
        self.hosts.append(f"{decision.host}:{decision.port}")

    async def ask(self, question: PolicyParams) -> object:
        raise AssertionError("nobody is asked")

    async def resolve(self, host: str) -> Sequence[str]:
        return ("8.8.8.8",)

    async def connect(self, route: Route) -> TransportStream:
        if route.port == 1:
            raise OSError("nothing there")
        inner, outer = stream_pair()
        outer.writer.write(b"welcome")
        outer.writer.close()
        return inner


def _exchange(sent: bytes) -> tuple[bytes, list[str]]:
    """The bytes that the process gets for these, and the hosts that were decided about."""

    async def run() -> tuple[bytes, list[str]]:
        upstream = FakeUpstream()
        client, served = stream_pair()
        decider = Decider("p", upstream.policy, upstream, upstream.resolve, upstream.forwards)
        client.writer.write(sent)
        client.writer.write_eof()
        async with asyncio.timeout(10):
            await SocksProxy(served, "127.0.0.1:5", decider, upstream).serve()
            for end in (served, client):
                end.writer.close()
            return await client.reader.read(), upstream.hosts

    return asyncio.run(run())


def _named(host: bytes, port: int = 443, command: int = 1) -> bytes:
    return _HELLO + bytes([5, command, 0, 3, len(host)]) + host + port.to_bytes(2)


def test_tunnel_to_a_name() -> None:
    received, asked = _exchange(_named(b"A.test."))
    assert received == b"\x05\x00\x05\x00\x00\x01\x7f\x00\x00\x01\x00\x06welcome"
    assert asked == ["a.test:443"]


def test_tunnel_to_an_address() -> None:
    received, asked = _exchange(_HELLO + b"\x05\x01\x00\x01\x01\x01\x01\x01\x00\x50")
    assert received.endswith(b"welcome")
    assert asked == ["1.1.1.1:80"]


@pytest.mark.parametrize(
    ("sent", "received", "asked"),
    [
        (_named(b"b.test"), _REFUSED, ["b.test:443"]),
        (_named(b"::1"), _REFUSED, ["::1:443"]),
        (_named(b"a.test:80"), _REFUSED, ["a.test:80:443"]),
        (_named(b"\xe9"), _REFUSED, ["\\xe9:443"]),
        (_named(b""), _REFUSED, [":443"]),
        (_named(b"a.test", 0), _REFUSED, []),
        (_named(b"a.test", 1), b"\x05\x00\x05\x05\x00\x01" + bytes(6), ["a.test:1"]),
        (_named(b"a.test", command=2), b"\x05\x00\x05\x07\x00\x01" + bytes(6), []),
        (_named(b"a.test", command=3), b"\x05\x00\x05\x07\x00\x01" + bytes(6), []),
        (_HELLO + b"\x05\x01\x00\x04" + bytes(15) + b"\x01\x00\x50", _REFUSED, ["::1:80"]),
        (_HELLO + b"\x05\x01\x00\x09", b"\x05\x00\x05\x08\x00\x01" + bytes(6), []),
        (_HELLO + b"\x04\x01\x00\x01", b"\x05\x00", []),
        (b"\x05\x01\x02", b"\x05\xff", []),
        (b"\x04\x01\x00\x50", b"", []),
        (b"\x05", b"", []),
        (_named(b"a.test")[:-1], b"\x05\x00", []),
    ],
)
def test_refusals(sent: bytes, received: bytes, asked: list[str]) -> None:
    assert _exchange(sent) == (received, asked)


@pytest.mark.parametrize("sent", [b"", b"\x05", _HELLO, _named(b"a.test")[:-1]])
def test_slow_handshakes_are_cut_off(sent: bytes) -> None:
    async def run() -> float:
        upstream = FakeUpstream()
        client, served = stream_pair()
        decider = Decider("p", upstream.policy, upstream, upstream.resolve, upstream.forwards)
        client.writer.write(sent)
        await SocksProxy(served, "127.0.0.1:5", decider, upstream).serve()
        for end in (served, client):
            end.writer.close()
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(run()) == module.HANDSHAKE_SECONDS == 30


def _associate(kind: int, *, is_full: bool = False) -> bytes:
    """The answer to UDP ASSOCIATE, without datagrams."""

    class FakeAssociation:
        address = ("127.0.0.1", 7)

        async def serve(self, stream: Stream) -> None:
            assert await stream.receive() == b""

    @contextlib.contextmanager
    def associate(client: str, port: int) -> Iterator[UdpAssociation]:
        assert (client, port) == ("127.0.0.1:5", 9)
        if is_full:
            raise OSError("too many")
        yield cast(UdpAssociation, FakeAssociation())

    async def run() -> bytes:
        upstream = FakeUpstream()
        client, served = stream_pair()
        decider = Decider("p", upstream.policy, upstream, upstream.resolve, upstream.forwards)
        address = b"\x01a" if kind == 3 else bytes(4)
        client.writer.write(_HELLO + bytes([5, 3, 0, kind]) + address + b"\x00\x09")
        client.writer.write_eof()
        async with asyncio.timeout(10):
            proxy = SocksProxy(served, "127.0.0.1:5", decider, upstream, associate=associate)
            await proxy.serve()
        for end in (served, client):
            end.writer.close()
        return await client.reader.read()

    return asyncio.run(run())


def test_associations() -> None:
    assert _associate(1) == b"\x05\x00\x05\x00\x00\x01\x7f\x00\x00\x01\x00\x07"
    assert _associate(3) == b"\x05\x00\x05\x08\x00\x01" + bytes(6)
    assert _associate(1, is_full=True) == b"\x05\x00\x05\x01\x00\x01" + bytes(6)
