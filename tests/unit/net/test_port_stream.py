"""Forwarded connections without sockets: credit, half-close, resets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.net.port_stream import CHUNK_BYTES, CREDIT_BYTES, WINDOW_BYTES, PortStream


class Socket:
    """A socket whose kernel is the test."""

    def __init__(self) -> None:
        self.is_reading = False
        self.written = b""
        self.kept = 0  # bytes that the kernel does not take
        self.calls: list[str] = []

    def pause_reading(self) -> None:
        assert self.is_reading
        self.is_reading = False

    def resume_reading(self) -> None:
        assert not self.is_reading
        self.is_reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.calls.append("write_eof")

    def unwritten(self) -> int:
        return min(self.kept, len(self.written))

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")


class Peer:
    """The other end; it records the messages."""

    def __init__(self) -> None:
        self.data = b""
        self.sizes: list[int] = []
        self.messages: list[object] = []

    def send_data(self, chunk: bytes) -> None:
        self.data += chunk
        self.sizes.append(len(chunk))

    def send_credit(self, count: int) -> None:
        self.messages.append(count)

    def send_end(self) -> None:
        self.messages.append("end")

    def send_reset(self, reason: str) -> None:
        self.messages.append(f"reset: {reason}")

    def closed(self) -> None:
        self.messages.append("closed")


class End:
    """A stream between the test's socket and the test's peer."""

    def __init__(self, *, credit: int = WINDOW_BYTES, is_link_paused: bool = False) -> None:
        self.socket = Socket()
        self.peer = Peer()
        self.stream = PortStream(self.socket, self.peer, is_link_paused=is_link_paused)
        if credit:
            self.stream.credit_received(credit)


def test_nothing_is_read_before_there_is_credit() -> None:
    end = End(credit=0)
    assert not end.socket.is_reading
    end.stream.credit_received(5)
    assert end.socket.is_reading
    assert end.stream.readable_bytes == 5


def test_reading_stops_when_the_credit_is_used_up() -> None:
    end = End(credit=5)
    end.stream.data_read(b"abcde")
    assert (end.peer.data, end.socket.is_reading) == (b"abcde", False)
    assert end.stream.readable_bytes == CHUNK_BYTES
    end.stream.credit_received(WINDOW_BYTES)
    assert end.socket.is_reading
    assert end.stream.readable_bytes == CHUNK_BYTES


def test_bytes_read_without_credit_are_held() -> None:
    end = End(credit=3)
    end.stream.data_read(b"abcde")
    end.stream.eof_read()
    assert (end.peer.data, end.peer.messages) == (b"abc", [])
    end.stream.credit_received(1)
    assert (end.peer.data, end.peer.messages) == (b"abcd", [])
    end.stream.credit_received(9)
    assert (end.peer.data, end.peer.messages) == (b"abcde", ["end"])


def test_data_is_sent_in_chunks() -> None:
    end = End()
    end.stream.data_read(bytes(2 * CHUNK_BYTES + 1))
    assert end.peer.sizes == [CHUNK_BYTES, CHUNK_BYTES, 1]


def test_a_congested_link_stops_reading() -> None:
    end = End(is_link_paused=True)
    assert not end.socket.is_reading
    end.stream.resume_reading()
    assert end.socket.is_reading
    end.stream.pause_reading()
    end.stream.pause_reading()
    assert not end.socket.is_reading


def test_credit_returns_when_the_socket_has_taken_the_bytes() -> None:
    end = End()
    end.socket.kept = WINDOW_BYTES
    end.stream.data_received(bytes(WINDOW_BYTES))
    assert end.peer.messages == []
    end.socket.kept = WINDOW_BYTES - CREDIT_BYTES + 1
    end.stream.return_credit()
    assert end.peer.messages == []
    end.socket.kept -= 1
    end.stream.return_credit()
    assert end.peer.messages == [CREDIT_BYTES]
    end.socket.kept = 0
    end.stream.return_credit()
    assert end.peer.messages == [CREDIT_BYTES, WINDOW_BYTES - CREDIT_BYTES]


def test_more_data_than_credit_resets_the_stream() -> None:
    end = End()
    end.socket.kept = WINDOW_BYTES
    end.stream.data_received(bytes(WINDOW_BYTES))
    end.stream.data_received(b"x")
    assert end.peer.messages == ["reset: more data than there was credit for"]
    assert end.socket.calls == ["abort"]
    assert len(end.socket.written) == WINDOW_BYTES


def test_each_direction_ends_on_its_own() -> None:
    end = End()
    end.stream.end_received()
    assert end.socket.calls == ["write_eof"]
    end.stream.data_read(b"still")
    end.stream.eof_read()
    assert (end.peer.data, end.peer.messages) == (b"still", ["end"])
    assert end.socket.calls == ["write_eof", "close"]
    assert end.stream.is_closed
    end.stream.socket_lost("connection closed")
    assert end.peer.messages == ["end", "closed"]


def test_the_other_direction_ends_first() -> None:
    end = End()
    end.stream.eof_read()
    end.stream.data_received(b"late")
    assert end.socket.written == b"late"
    end.stream.end_received()
    assert end.socket.calls == ["close"]


def test_no_credit_is_given_after_the_end() -> None:
    end = End()
    end.socket.kept = WINDOW_BYTES
    end.stream.data_received(bytes(WINDOW_BYTES))
    end.stream.end_received()
    end.socket.kept = 0
    end.stream.return_credit()
    assert end.peer.messages == []


def test_the_end_is_received_once() -> None:
    end = End()
    end.stream.end_received()
    end.stream.end_received()
    assert end.socket.calls == ["write_eof"]


def test_data_after_the_end_resets_the_stream() -> None:
    end = End()
    end.stream.end_received()
    end.stream.data_received(b"x")
    assert end.peer.messages == ["reset: data after the end of the stream"]
    assert end.socket.calls == ["write_eof", "abort"]


def test_a_socket_that_breaks_resets_the_stream() -> None:
    end = End()
    end.stream.socket_lost("Connection reset by peer (os error 104)")
    reason = "reset: Connection reset by peer (os error 104)"
    assert end.peer.messages == [reason, "closed"]


def test_both_ends_are_reset_once() -> None:
    end = End()
    end.stream.reset("the port was closed")
    end.stream.reset("again")
    assert end.peer.messages == ["reset: the port was closed"]
    assert end.socket.calls == ["abort"]


@pytest.mark.parametrize(
    "event",
    [
        lambda stream: stream.data_received(b"x"),
        lambda stream: stream.end_received(),
        lambda stream: stream.credit_received(1),
        lambda stream: stream.reset_received(),
        lambda stream: stream.data_read(b"x"),
        lambda stream: stream.eof_read(),
        lambda stream: stream.pause_reading(),
        lambda stream: stream.resume_reading(),
        lambda stream: stream.abort(),
    ],
)
def test_events_after_a_reset_have_no_effect(event: Callable[[PortStream], None]) -> None:
    end = End(credit=0)
    end.stream.reset_received()
    event(end.stream)
    assert end.socket.calls == ["abort"]
    assert (end.peer.messages, end.peer.data) == ([], b"")


class Wire:
    """A peer that leads to another stream; messages are delivered by the test, in order."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[PortStream], None]] = deque()
        self.in_flight = 0

    def send_data(self, chunk: bytes) -> None:
        assert 0 < len(chunk) <= CHUNK_BYTES
        self.queue.append(lambda stream: stream.data_received(chunk))

    def send_credit(self, count: int) -> None:
        self.queue.append(lambda stream: stream.credit_received(count))

    def send_end(self) -> None:
        self.queue.append(lambda stream: stream.end_received())

    def send_reset(self, reason: str) -> None:
        raise AssertionError(reason)

    def closed(self) -> None: ...


@given(
    st.lists(st.integers(1, 3 * CHUNK_BYTES), max_size=30),
    st.lists(st.sampled_from(["deliver", "return", "take", "pause", "resume"]), max_size=60),
)
def test_every_byte_arrives_in_any_order_of_events(sizes: list[int], events: list[str]) -> None:
    """One direction of a stream: what is read at one end is written at the other."""
    source, sink = Socket(), Socket()
    there, back = Wire(), Wire()
    sender, receiver = PortStream(source, there), PortStream(sink, back)
    sender.credit_received(WINDOW_BYTES)
    sink.kept = 10**9
    expected = b"".join(bytes([number % 256]) * size for number, size in enumerate(sizes))
    left = expected

    def step(event: str) -> None:
        nonlocal left
        if event == "deliver" and there.queue:
            there.queue.popleft()(receiver)
        elif event == "return" and back.queue:
            back.queue.popleft()(sender)
        elif event == "take":
            sink.kept = 0
            receiver.return_credit()
            sink.kept = 10**9
        elif event == "pause":
            sender.pause_reading()
        elif event == "resume":
            sender.resume_reading()
        while source.is_reading and left:
            size = sender.readable_bytes
            sender.data_read(left[:size])
            left = left[size:]

    # The kernel of the sink keeps everything, until "take" empties it.
    sink.unwritten = lambda: receiver._unreturned if sink.kept else 0  # type: ignore[method-assign]
    for event in events:
        step(event)
        assert receiver._unreturned <= WINDOW_BYTES
    while len(sink.written) < len(expected):
        for event in ("resume", "deliver", "take", "return"):
            step(event)
    sender.eof_read()
    while there.queue:
        step("deliver")
    assert sink.written == expected
    assert sink.calls == ["write_eof"]
