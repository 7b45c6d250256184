"""Frames to a transport: at once by the descriptor, through the transport, or gathered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest
from tests.support.clock import Clock
from tests.support.memory_transport import MemoryTransport

from exec_server.net.websocket.socket import (
    GATHERED_BYTES,
    LONG_PIECE_BYTES,
    MAX_PIECES,
    FrameWriter,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


@pytest.fixture
def transport() -> MemoryTransport:
    return MemoryTransport(asyncio.Protocol())


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The peer's socket and the transport's."""
    peer, own = socket.socketpair()
    with peer, own:
        peer.setblocking(False)
        own.setblocking(False)
        yield peer, own


def test_bytes_go_to_the_descriptor_first(
    clock: Clock, transport: MemoryTransport, pair: tuple[socket.socket, socket.socket]
) -> None:
    writer = FrameWriter(transport, pair[1].fileno())
    writer.write(b"frame")
    assert pair[0].recv(100) == b"frame"
    assert transport.written == b""


def test_bytes_that_the_descriptor_does_not_take_go_to_the_transport(
    clock: Clock, transport: MemoryTransport, pair: tuple[socket.socket, socket.socket]
) -> None:
    writer = FrameWriter(transport, pair[1].fileno())
    data = bytes(range(256)) * 1024
    writer.write(data)
    taken = pair[0].recv(len(data))
    assert 0 < len(taken) < len(data)
    assert taken + transport.take_written() == data
    with contextlib.suppress(BlockingIOError):
        while True:
            pair[1].send(data)
    writer.write(b"full")
    assert transport.take_written() == b"full"


def test_bytes_wait_behind_those_of_the_transport(
    clock: Clock, transport: MemoryTransport, pair: tuple[socket.socket, socket.socket]
) -> None:
    transport.buffered = 1
    writer = FrameWriter(transport, pair[1].fileno())
    writer.write(b"frame")
    assert transport.written == b"frame"
    assert writer.unsent() == 1


def test_closing_transport_is_not_written_to(
    clock: Clock, transport: MemoryTransport, pair: tuple[socket.socket, socket.socket]
) -> None:
    transport.close()
    FrameWriter(transport, pair[1].fileno()).write(b"frame")
    assert transport.written == b""
    with pytest.raises(BlockingIOError):
        pair[0].recv(1)


def test_gathered_frames_are_written_together_in_the_next_iteration(
    clock: Clock, transport: MemoryTransport
) -> None:
    writer = FrameWriter(transport, -1)
    writer.gather(b"one")
    writer.gather(b"two")
    assert (transport.written, writer.unsent(), len(clock.waiting)) == (b"", 6, 1)
    assert writer.is_flush_scheduled
    clock.run_soon()
    assert (transport.take_written(), writer.unsent()) == (b"onetwo", 0)
    assert not writer.is_flush_scheduled


def test_many_gathered_bytes_are_written_at_once(clock: Clock, transport: MemoryTransport) -> None:
    writer = FrameWriter(transport, -1)
    writer.gather(b"x")
    writer.gather(b"y" * GATHERED_BYTES)
    assert transport.take_written() == b"x" + b"y" * GATHERED_BYTES
    clock.run_soon()
    assert transport.written == b""


def test_pieces_are_written_without_being_joined(
    clock: Clock, transport: MemoryTransport, pair: tuple[socket.socket, socket.socket]
) -> None:
    writer = FrameWriter(transport, pair[1].fileno())
    writer.gather(b"head", b"body", b"tail")
    writer.gather(b"next")
    assert writer.gathered == [b"head", b"body", b"tail", b"next"]
    assert writer.unsent() == 16
    clock.run_soon()
    assert (pair[0].recv(100), writer.unsent()) == (b"headbodytailnext", 0)
    assert transport.written == b""


def test_pieces_that_the_descriptor_does_not_take_go_to_the_transport(
    clock: Clock, transport: MemoryTransport, pair: tuple[socket.socket, socket.socket]
) -> None:
    writer = FrameWriter(transport, pair[1].fileno())
    body = bytes(range(256)) * 4096
    writer.gather(b"head", body, b"tail")
    taken = pair[0].recv(len(body))
    assert 0 < len(taken) < len(body)
    assert taken + transport.take_written() == b"head" + body + b"tail"
    transport.buffered = 1
    writer.gather(b"head", body, b"tail")
    assert transport.take_written() == b"head" + body + b"tail"
    transport.close()
    writer.gather(b"head", body, b"tail")
    assert transport.take_written() == b""


def test_long_pieces_are_left_to_the_transport_one_by_one(
    clock: Clock, transport: MemoryTransport, pair: tuple[socket.socket, socket.socket]
) -> None:
    writer = FrameWriter(transport, pair[1].fileno())
    transport.buffered = 1
    for _ in range(2):
        writer.gather(b"head", bytes(2 * LONG_PIECE_BYTES))
        writer.flush()
    assert transport.take_written() == 2 * (b"head" + bytes(2 * LONG_PIECE_BYTES))


def test_a_full_descriptor_leaves_the_pieces_to_the_transport(
    clock: Clock, transport: MemoryTransport, pair: tuple[socket.socket, socket.socket]
) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            pair[1].send(bytes(65_536))
    writer = FrameWriter(transport, pair[1].fileno())
    writer.gather(b"head", b"body", b"tail")
    writer.flush()
    assert transport.take_written() == b"headbodytail"


def test_more_pieces_than_the_kernel_takes_are_joined(
    clock: Clock, transport: MemoryTransport, pair: tuple[socket.socket, socket.socket]
) -> None:
    writer = FrameWriter(transport, pair[1].fileno())
    for _ in range(MAX_PIECES + 1):
        writer.gather(b"xy")
    writer.flush()
    assert pair[0].recv(10_000) == b"xy" * (MAX_PIECES + 1)


def test_frame_in_order_follows_gathered_ones(clock: Clock, transport: MemoryTransport) -> None:
    writer = FrameWriter(transport, -1)
    writer.gather(b"one")
    writer.write_in_order(b"two")
    assert transport.written == b"onetwo"


def test_discarded_frames_are_not_written(clock: Clock, transport: MemoryTransport) -> None:
    writer = FrameWriter(transport, -1)
    writer.gather(b"one")
    writer.discard()
    clock.run_soon()
    assert (transport.written, writer.unsent()) == (b"", 0)
