"""The socket of a forwarded connection on a transport in memory, and the choice of addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from tests.support.memory_transport import MemoryTransport

from exec_server.errors import InternalError, InvalidRequest
from exec_server.net.port_socket import (
    LOOPBACK_ADDRESSES,
    WRITE_BYTES,
    PortSocket,
    PortSockets,
    connect,
    is_loopback,
)
from exec_server.net.port_stream import CHUNK_BYTES, WINDOW_BYTES, PortStream


class Peer:
    def __init__(self) -> None:
        self.messages: list[object] = []

    def send_data(self, chunk: bytes) -> None:
        self.messages.append(chunk)

    def send_credit(self, count: int) -> None:
        self.messages.append(count)

    def send_end(self) -> None:
        self.messages.append("end")

    def send_reset(self, reason: str) -> None:
        self.messages.append(f"reset: {reason}")

    def closed(self) -> None:
        self.messages.append("closed")


class Forwarded:
    """A connected socket with a stream."""

    transport_type: type[MemoryTransport] = MemoryTransport

    def __init__(self, credit: int = WINDOW_BYTES) -> None:
        self.socket = PortSocket()
        self.transport = self.transport_type(self.socket)
        self.peer = Peer()
        self.stream = PortStream(self.socket, self.peer)
        self.socket.attach(self.stream)
        self.stream.credit_received(credit)


def test_a_new_socket_reads_nothing() -> None:
    accepted: list[PortSocket] = []
    made = PortSocket(accepted.append)
    transport = MemoryTransport(made)
    assert accepted == [made]
    assert transport.is_reading_paused
    assert transport.limits == (0, 0)


def test_bytes_pass_in_both_directions() -> None:
    forwarded = Forwarded()
    forwarded.transport.receive(b"to the peer")
    forwarded.stream.data_received(b"to the socket")
    assert forwarded.peer.messages == [b"to the peer"]
    assert forwarded.transport.written == b"to the socket"


def test_no_more_is_read_than_there_is_credit_for() -> None:
    forwarded = Forwarded(credit=3)
    assert len(forwarded.socket.get_buffer(-1)) == 3
    forwarded.transport.receive(b"abc")
    assert forwarded.transport.is_reading_paused


class SlowTransport(MemoryTransport):
    """The kernel takes nothing until `drain`, as the event loop reports it with limits of 0."""

    def __init__(self, protocol: PortSocket) -> None:
        self.chunks: list[bytes] = []
        super().__init__(protocol)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        self.chunks.append(bytes(data))
        if not self.buffered:
            self._protocol.pause_writing()
        self.buffered += len(data)

    def drain(self) -> None:
        self.buffered = 0
        self._protocol.resume_writing()


class Slow(Forwarded):
    """A forwarded connection to a program that does not read."""

    transport: SlowTransport
    transport_type = SlowTransport


def test_small_chunks_are_gathered_while_the_kernel_takes_none() -> None:
    slow = Slow()
    for number in range(1000):
        slow.stream.data_received(b"%03d" % number)
    assert slow.transport.chunks == [b"000"]
    assert slow.socket.unwritten() == 3000
    slow.transport.drain()
    assert len(slow.transport.chunks) == 2
    assert slow.transport.written == b"".join(b"%03d" % number for number in range(1000))
    assert slow.socket.unwritten() == 2997
    slow.transport.drain()
    slow.stream.data_received(b"at once")
    assert slow.transport.chunks[-1] == b"at once"


def test_gathered_bytes_are_written_until_the_kernel_takes_no_more() -> None:
    """Here it takes them all: nothing pauses the writing again."""
    forwarded = Forwarded()
    forwarded.socket.pause_writing()
    data = bytes(range(256)) * (WINDOW_BYTES // 256)
    forwarded.stream.data_received(data)
    assert (forwarded.transport.written, forwarded.peer.messages) == (b"", [])
    forwarded.socket.resume_writing()
    assert forwarded.transport.written == data
    assert forwarded.peer.messages == [WINDOW_BYTES]


def test_credit_returns_while_the_rest_is_written() -> None:
    slow = Slow()
    slow.stream.data_received(b"x")
    slow.stream.data_received(bytes(WINDOW_BYTES - 1))
    slow.transport.drain()
    assert [len(chunk) for chunk in slow.transport.chunks] == [1, WRITE_BYTES]
    assert slow.peer.messages == []
    slow.transport.drain()
    assert slow.peer.messages == [1 + WRITE_BYTES]


def test_gathered_bytes_precede_the_end() -> None:
    slow = Slow()
    for chunk in (b"first ", b"second ", b"third"):
        slow.stream.data_received(chunk)
    slow.stream.end_received()
    assert slow.transport.written == b"first second third"
    assert slow.transport.has_written_eof
    slow.transport.drain()
    assert slow.transport.chunks == [b"first ", b"second third"]


def test_gathered_bytes_precede_the_close() -> None:
    slow = Slow()
    slow.transport.eof()
    slow.stream.data_received(b"first ")
    slow.stream.data_received(b"second")
    slow.stream.end_received()
    assert slow.transport.written == b"first second"
    assert slow.transport.is_closing()


@pytest.mark.parametrize(
    "end", [lambda slow: slow.stream.abort(), lambda slow: slow.transport.lose()]
)
def test_gathered_bytes_end_with_the_connection(end: Callable[[Slow], None]) -> None:
    slow = Slow()
    slow.stream.data_received(b"first ")
    slow.stream.data_received(b"second")
    end(slow)
    slow.transport.drain()
    assert slow.transport.written == b"first "
    assert slow.socket.unwritten() == 0


def test_an_end_leaves_the_other_direction_open() -> None:
    forwarded = Forwarded()
    forwarded.transport.eof()
    assert not forwarded.transport.is_closing()
    forwarded.stream.data_received(b"late")
    forwarded.stream.end_received()
    assert forwarded.transport.written == b"late"
    assert forwarded.transport.is_closing()
    forwarded.transport.lose()
    assert forwarded.peer.messages == ["end", "closed"]


def test_the_end_of_the_stream_closes_the_writing_direction() -> None:
    forwarded = Forwarded()
    forwarded.stream.end_received()
    assert forwarded.transport.has_written_eof
    assert not forwarded.transport.is_closing()


def test_an_aborted_socket_is_reset() -> None:
    forwarded = Forwarded()
    forwarded.stream.reset_received()
    assert forwarded.transport.is_aborted
    [option] = forwarded.transport.socket.options
    assert option[:2] == (socket.SOL_SOCKET, socket.SO_LINGER)


def test_a_closed_descriptor_can_be_aborted() -> None:
    forwarded = Forwarded()
    with mock.patch.object(forwarded.transport.socket, "setsockopt", side_effect=OSError(9, "x")):
        forwarded.stream.abort()
    assert forwarded.transport.is_aborted


def test_a_broken_socket_resets_the_stream() -> None:
    forwarded = Forwarded()
    forwarded.transport.lose(ConnectionResetError(104, "Connection reset by peer"))
    reason = "reset: Connection reset by peer (os error 104)"
    assert forwarded.peer.messages == [reason, "closed"]


def test_a_lost_socket_takes_no_calls() -> None:
    forwarded = Forwarded()
    forwarded.transport.lose()
    for call in (
        forwarded.socket.pause_reading,
        forwarded.socket.resume_reading,
        forwarded.socket.write_eof,
        forwarded.socket.abort,
    ):
        call()
    forwarded.socket.write(b"x")
    assert forwarded.socket.unwritten() == 0
    assert not forwarded.transport.is_aborted
    assert not forwarded.transport.has_written_eof


def test_a_socket_may_be_lost_before_it_has_a_stream() -> None:
    lost = PortSocket()
    transport = MemoryTransport(lost)
    assert len(lost.get_buffer(-1)) == CHUNK_BYTES
    lost.resume_writing()
    transport.lose()
    peer = Peer()
    lost.attach(PortStream(lost, peer))
    assert peer.messages == ["reset: connection closed", "closed"]


def _read_early(early: PortSocket, data: bytes) -> None:
    """Let the loop read although the reading is paused, as uvloop does for a new socket."""
    early.get_buffer(-1)[: len(data)] = data
    early.buffer_updated(len(data))


@pytest.mark.parametrize("credit", [3, 5])
def test_data_that_is_read_too_early_is_kept(credit: int) -> None:
    early = PortSocket()
    transport = MemoryTransport(early)
    transport.resume_reading()
    _read_early(early, b"early")
    assert transport.is_reading_paused
    transport.eof()
    peer = Peer()
    stream = PortStream(early, peer)
    early.attach(stream)
    assert peer.messages == []
    stream.credit_received(credit)
    assert peer.messages == [b"early"[:credit], "end"][: 1 + (credit == 5)]
    stream.credit_received(2)
    assert b"".join(each for each in peer.messages if isinstance(each, bytes)) == b"early"
    assert peer.messages[-1] == "end"


@pytest.mark.parametrize(("credit", "is_paused"), [(5, True), (6, False)])
def test_reading_goes_on_after_early_data_while_there_is_credit(
    credit: int, is_paused: bool
) -> None:
    early = PortSocket()
    transport = MemoryTransport(early)
    _read_early(early, b"early")
    peer = Peer()
    stream = PortStream(early, peer)
    early.attach(stream)
    stream.credit_received(credit)
    assert (peer.messages, transport.is_reading_paused) == ([b"early"], is_paused)


def test_a_socket_without_a_transport_takes_no_calls() -> None:
    unconnected = PortSocket()
    for call in (
        unconnected.pause_reading,
        unconnected.resume_reading,
        unconnected.write_eof,
        unconnected.close,
        unconnected.abort,
    ):
        call()
    unconnected.write(b"x")
    assert unconnected.unwritten() == 0


# ---- addresses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_which_addresses_are_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


class Loop:
    """An event loop that records connections; `hosts` are the names that it knows."""

    def __init__(self, outcomes: dict[str, Any], hosts: dict[str, list[str]]) -> None:
        self.tried: list[str] = []
        self._outcomes = outcomes
        self._hosts = hosts

    async def create_connection(
        self, make: Callable[[], PortSocket], address: str, port: int
    ) -> tuple[MemoryTransport, PortSocket]:
        self.tried.append(address)
        outcome = self._outcomes.get(address, ConnectionRefusedError(111, "Connection refused"))
        if isinstance(outcome, OSError):
            raise outcome
        made = make()
        transport = MemoryTransport(made, peer=(address, port))
        transport._extra["sockname"] = outcome  # type: ignore[attr-defined]
        return transport, made

    async def getaddrinfo(self, host: str, port: None, *, type: int) -> list[Any]:  # noqa: A002
        if host not in self._hosts:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in self._hosts[host]]


def use(
    monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, Any], hosts: dict[str, list[str]]
) -> Loop:
    loop = Loop(outcomes, hosts)
    monkeypatch.setattr("exec_server.net.port_socket.asyncio.get_running_loop", lambda: loop)
    return loop


def test_loopback_is_tried_in_both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = use(monkeypatch, {"::1": ("::1", 9)}, {})
    for host in (None, "localhost", "LOCALHOST"):
        asyncio.run(PortSockets().connect(host, 80))
    assert loop.tried == [*LOOPBACK_ADDRESSES] * 3


def test_the_error_of_the_first_address_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"::1": OSError(99, "Cannot assign requested address")}, {})
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(connect(LOOPBACK_ADDRESSES, 80))


def test_a_connection_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"127.0.0.1": ("127.0.0.1", 40_000)}, {})
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(connect(["127.0.0.1"], 40_000))


def test_other_hosts_are_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"db": ["10.0.0.7"], "both": ["10.0.0.7", "127.0.0.2"]}
    loop = use(monkeypatch, dict.fromkeys(("10.0.0.7", "127.0.0.2"), ("x", 1)), hosts)
    with pytest.raises(InvalidRequest, match=r"^db is not .* \(10\.0\.0\.7\).*--allow-port-hosts"):
        asyncio.run(PortSockets().connect("db", 80))
    asyncio.run(PortSockets().connect("both", 80))
    assert loop.tried == ["127.0.0.2"]
    asyncio.run(PortSockets(allow_other_hosts=True).connect("db", 80))
    assert loop.tried == ["127.0.0.2", "10.0.0.7"]


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {}, {})
    with pytest.raises(InternalError, match=r"^cannot resolve nowhere: Name or service not known"):
        asyncio.run(PortSockets(allow_other_hosts=True).connect("nowhere", 80))
    refusal = r"^cannot resolve nowhere: Name or service not known; .*--allow-port-hosts"
    with pytest.raises(InvalidRequest, match=refusal):
        asyncio.run(PortSockets().connect("nowhere", 80))


def test_names_that_cannot_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = use(monkeypatch, {}, {})
    with (
        mock.patch.object(loop, "getaddrinfo", side_effect=UnicodeError("label too long")),
        pytest.raises(InternalError, match="label too long"),
    ):
        asyncio.run(PortSockets(allow_other_hosts=True).connect("x" * 70, 80))
