"""The server's WebSocket over a transport in memory: upgrade, messages and end."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Coroutine, Mapping
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.clock import Clock
from tests.support.raw_links import frame_bytes
from tests.support.websocket_server import (
    MIB,
    UPGRADE,
    Connection,
    Server,
    close_event,
    large_frame,
    text_event,
)

from exec_server.errors import ProtocolError
from exec_server.net.admission import PendingConnections
from exec_server.net.http1 import HEAD_BYTES
from exec_server.net.inbox import BURST
from exec_server.net.websocket import server
from exec_server.net.websocket.frames import (
    FRAGMENTS_IN_A_ROW,
    SENT_FRAME_BYTES,
    Event,
    Opcode,
    close_payload,
    text_frame,
)
from exec_server.net.websocket.handshake import HttpRefusal
from exec_server.net.websocket.server import HANDSHAKE_SECONDS, LARGE_BYTES, REFUSED_BYTES
from exec_server.net.websocket.socket import (
    CLOSE_SECONDS,
    DIRECT_BYTES,
    GATHERED_BYTES,
    SEND_HIGH_BYTES,
    SEND_LOW_BYTES,
)

# ---- the upgrade ----------------------------------------------------------------------


def test_upgrade_may_arrive_in_pieces_and_with_the_first_message(listener: Server) -> None:
    stream, transport = listener.accept(peer=("::1", 7))
    for byte in UPGRADE[:-1]:
        transport.receive(bytes([byte]))
    assert transport.take_written() == b""
    transport.receive(UPGRADE[-1:] + frame_bytes(Opcode.TEXT, b"{}"))
    assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in transport.take_written()
    assert listener.receivers[0].seen == [b"{}"]
    assert stream.origin == "websocket JSON-RPC message from exec-server websocket [::1]:7"


def test_sockets_with_and_without_a_port(listener: Server) -> None:
    stream, transport = listener.accept(family=socket.AF_UNIX)
    assert transport.socket.options == []
    assert stream.origin.endswith("websocket of uid 0")
    stream, _ = listener.accept()
    assert stream.origin.endswith("websocket unknown:0")
    _, transport = listener.accept(peer=("127.0.0.1", 80))
    assert transport.socket.options == [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    assert transport.limits == (SEND_HIGH_BYTES, SEND_LOW_BYTES)


def test_a_unix_socket_is_for_one_user_and_root(
    listener: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 7)
    for uid in (0, 7):
        stream, transport = listener.accept(family=socket.AF_UNIX, peer="", peer_user=uid)
        transport.receive(UPGRADE)
        assert transport.take_written().startswith(b"HTTP/1.1 101 ")
        assert stream.origin.endswith(f"websocket of uid {uid}")
    _, transport = listener.accept(family=socket.AF_UNIX, peer="", peer_user=8)
    written = transport.take_written()
    assert written.startswith(b"HTTP/1.1 403 ")
    assert written.endswith(b"the socket is for the user of the server only")
    transport.receive(UPGRADE)
    assert transport.written == b""
    assert len(listener.receivers) == 2


def test_a_client_that_expects_tls_is_answered_at_once(listener: Server) -> None:
    _, transport = listener.accept()
    transport.receive(b"\x16\x03\x01\x02\x00\x01")
    assert transport.take_written().startswith(b"HTTP/1.1 400 ")
    assert transport.has_written_eof


def test_tls_has_no_half_closed_connection(listener: Server, clock: Clock) -> None:
    stream, transport = listener.accept(is_tls=True)
    transport.receive(UPGRADE)
    stream.close(1001, "bye")
    assert transport.is_closing()
    assert not transport.is_aborted
    clock.advance(CLOSE_SECONDS)
    assert transport.is_aborted
    _, transport = listener.accept(is_tls=True)
    transport.receive(b"x" * (HEAD_BYTES + 1))
    assert transport.take_written().startswith(b"HTTP/1.1 431 ")
    assert transport.is_closing()


def test_refused_client_may_ask_again(listener: Server, clock: Clock) -> None:
    _, transport = listener.accept()
    transport.receive(b"GET /readyz HTTP/1.1\r\n\r\n" + UPGRADE)
    clock.run_soon()
    written = transport.take_written()
    assert written.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 101 " in written


def test_other_connections_get_a_turn_between_two_requests(listener: Server, clock: Clock) -> None:
    _, transport = listener.accept()
    answers = []
    transport.receive(b"GET /nowhere HTTP/1.1\r\n\r\n" * 5 + b"GET / HTT")
    while transport.is_reading_paused:
        answers.append(transport.written.count(b"HTTP/1.1 404 "))
        clock.run_next()
    assert answers == [1, 2, 3, 4, 5]
    transport.receive(b"P/1.1\r\n\r\n")
    assert b"HTTP/1.1 400 " in transport.written


def test_requests_after_the_end_of_a_connection_are_not_answered(
    listener: Server, clock: Clock
) -> None:
    _, transport = listener.accept()
    transport.receive(b"GET /nowhere HTTP/1.1\r\n\r\n" * 3)
    transport.take_written()
    transport.lose()
    clock.run_soon()
    assert transport.written == b""


@pytest.mark.parametrize("head", [b"x" * (HEAD_BYTES + 1), b"GET / HTTP/1.1\r\n\0\r\n\r\n"])
def test_refused_client_that_does_not_stop_sending_is_cut_off(
    listener: Server, head: bytes
) -> None:
    _, transport = listener.accept()
    transport.receive(head)
    assert transport.take_written().startswith(b"HTTP/1.1 4")
    transport.receive(bytes(REFUSED_BYTES))
    assert not transport.is_aborted
    transport.receive(b"x")
    assert transport.is_aborted


def test_refused_client_that_does_not_read_is_disconnected(listener: Server) -> None:
    stream, transport = listener.accept()
    stream.pause_writing()
    transport.receive(b"GET /nowhere HTTP/1.1\r\n\r\n" + UPGRADE)
    assert transport.take_written().startswith(b"HTTP/1.1 404 ")
    assert transport.has_written_eof
    assert listener.receivers == []


def test_request_without_keep_alive_is_the_last(listener: Server, clock: Clock) -> None:
    stream, transport = listener.accept()
    transport.receive(b"GET /readyz HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert transport.has_written_eof
    transport.take_written()
    transport.receive(UPGRADE)  # read and dropped: unread bytes would reset the connection
    assert transport.take_written() == b""
    assert not transport.is_aborted
    clock.advance(CLOSE_SECONDS)
    assert transport.is_aborted
    transport.lose()
    assert stream.closed.done()
    assert clock.waiting == []


def test_useless_requests_are_refused(listener: Server) -> None:
    for request, status in ((b"?\r\n\r\n", b"400"), (b"x" * 20_000, b"431")):
        _, transport = listener.accept()
        transport.receive(request)
        assert transport.take_written().startswith(b"HTTP/1.1 " + status)
        assert transport.has_written_eof


def test_clients_are_authenticated(listener: Server) -> None:
    def authenticate(headers: Mapping[str, str]) -> None:
        if headers.get("authorization") != "good":
            raise HttpRefusal(401, "no")

    listener.settings = replace(listener.settings, authenticate=authenticate)
    _, transport = listener.accept()
    transport.receive(UPGRADE)
    assert transport.take_written().startswith(b"HTTP/1.1 401 ")
    transport.receive(UPGRADE.replace(b"\r\n\r\n", b"\r\nAuthorization: good\r\n\r\n"))
    assert transport.take_written().startswith(b"HTTP/1.1 101 ")


def test_silent_client_is_cut_off_before_the_upgrade(listener: Server, clock: Clock) -> None:
    _, transport = listener.accept()
    clock.advance(HANDSHAKE_SECONDS - 1)
    assert not transport.is_aborted
    clock.advance(HANDSHAKE_SECONDS)
    assert transport.is_aborted


def test_the_oldest_connection_without_an_upgrade_gives_way(listener: Server) -> None:
    listener.settings.admission.pending = PendingConnections(2)
    upgraded = listener.open()
    transports = [listener.accept()[1] for _ in range(3)]
    assert [each.is_closing() for each in transports] == [True, False, False]
    transports[1].receive(UPGRADE)
    assert listener.accept()[1].is_closing() is False
    assert [each.is_closing() for each in transports[1:]] == [False, False]
    assert not upgraded.transport.is_closing()
    assert len(listener.settings.admission.pending) == 2


def test_too_many_upgraded_connections(listener: Server) -> None:
    listener.settings.admission.max_connections = 1
    _, idle = listener.accept()
    first = listener.open()
    idle.receive(UPGRADE)
    assert idle.written.startswith(b"HTTP/1.1 503 ")
    first.transport.lose()
    _, second = listener.accept()
    second.receive(UPGRADE)
    assert second.written.startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize("end", ["close", "eof", "lose"])
def test_connection_that_ends_before_the_upgrade(listener: Server, clock: Clock, end: str) -> None:
    stream, transport = listener.accept()
    if end == "close":
        stream.close(1001, "server is shutting down")
        stream.close(1001, "server is shutting down")
    elif end == "eof":
        transport.eof()
    stream.tick(1000.0)
    assert transport.is_closing() is (end != "lose")
    transport.lose()
    clock.run_soon()
    assert transport.written == b""
    assert (listener.receivers, listener.streams, clock.waiting) == ([], set(), [])


# ---- messages -------------------------------------------------------------------------


def test_messages_of_all_sizes_arrive(opened: Connection) -> None:
    messages = [b"x" * size for size in (0, 1, 125, 126, 65_535, 65_536, 300_000)]
    for message in messages:
        opened.receive(Opcode.TEXT, message)
        opened.receive(Opcode.BINARY, message)
    assert opened.receiver.seen == [message for each in messages for message in (each, each)]


def test_long_message_is_received_into_its_place(opened: Connection) -> None:
    message = bytes(range(128)) * 8000
    data = frame_bytes(Opcode.TEXT, message) + frame_bytes(Opcode.TEXT, b"next")
    for start in range(0, len(data), 50_000):
        opened.transport.receive(data[start : start + 50_000])
        if start == 50_000:
            assert opened.transport.get_protocol() is not opened.stream
    assert opened.transport.get_protocol() is opened.stream
    assert opened.receiver.seen == [message, b"next"]


def test_fragments_with_a_ping_between_them(opened: Connection) -> None:
    opened.receive(Opcode.TEXT, b"one ", fin=False)
    opened.receive(Opcode.PING, b"!")
    opened.receive(Opcode.PONG, b"?")
    opened.receive(Opcode.CONTINUATION, b"two")
    assert opened.receiver.seen == [b"one two"]
    assert opened.events() == [Event(Opcode.PONG, b"!")]


def test_answer_is_written_inside_the_callback(opened: Connection, clock: Clock) -> None:
    opened.receiver.replies = [b"answer"]
    opened.receive(Opcode.TEXT, b"question")
    assert opened.events() == [text_event(b"answer")]
    clock.run_soon()


def test_long_messages_are_gathered_in_order(opened: Connection, clock: Clock) -> None:
    long = b"x" * (DIRECT_BYTES + 1)
    opened.stream.send(long)
    opened.stream.send(b"short")
    assert opened.transport.written == b""
    assert opened.stream.unsent() > len(long)
    clock.run_soon()
    assert opened.events() == [text_event(long), text_event(b"short")]
    opened.stream.send(b"y" * GATHERED_BYTES)
    assert opened.events() == [text_event(b"y" * GATHERED_BYTES)]  # enough for one write


@pytest.mark.parametrize("seed", range(20))
def test_pipelined_messages_and_single_ones_get_the_same_answers(
    opened: Connection, clock: Clock, seed: int
) -> None:
    """However the kernel cuts the bytes of the client."""
    random = Random(seed)
    received, sent, frames = [], [], b""
    for number in range(200):
        message = b"%d " % number + b"x" * random.choice([0, 10, 200, 5000])
        received.append(message)
        frames += frame_bytes(Opcode.TEXT, message)
        reply = b"%d " % number + b"y" * random.choice([0, 50, 3000, DIRECT_BYTES + 1])
        opened.receiver.replies.append(reply)
        sent.append(text_event(reply))
        if random.random() < 0.05:
            frames += frame_bytes(Opcode.PING, b"%d" % number)
            sent.append(Event(Opcode.PONG, b"%d" % number))
    while frames:
        size = random.choice([1, 60, 500, 20_000])
        opened.transport.receive(frames[:size])
        frames = frames[size:]
        while opened.transport.is_reading_paused:
            clock.run_soon()  # after a burst the rest is delivered later
    clock.run_soon()
    assert opened.receiver.seen == received
    assert opened.events() == sent
    assert opened.stream.unsent() == 0


def test_answers_to_pipelined_messages_are_written_together(opened: Connection) -> None:
    opened.receiver.replies = [b"one", b"two", b"three"]
    writes: list[bytes] = []
    opened.transport.write = writes.append  # type: ignore[assignment]
    opened.transport.receive(frame_bytes(Opcode.TEXT, b"?") * 3)
    assert writes == [text_frame(b"one") + text_frame(b"two") + text_frame(b"three")]
    opened.receiver.replies = [b"four"]
    opened.transport.receive(frame_bytes(Opcode.TEXT, b"?"))
    assert writes[1:] == [text_frame(b"four")]


@pytest.mark.parametrize("seed", range(20))
def test_messages_in_pieces_and_whole_ones_arrive_in_order(
    opened: Connection, clock: Clock, seed: int
) -> None:
    random = Random(seed)
    sent = []
    for _ in range(60):
        size = random.choice([1, 100, DIRECT_BYTES, 11_000, 65_536, SENT_FRAME_BYTES + 1])
        message = random.randbytes(random.randint(3, size + 3)).hex().encode()[: size + 3]
        cuts = sorted(random.sample(range(len(message)), 2))
        if random.random() < 0.6:
            first, second = cuts
            opened.stream.send_pieces(message[:first], message[first:second], message[second:])
        else:
            opened.stream.send(message)
        sent.append(text_event(message))
        if random.random() < 0.2:
            clock.run_soon()
    clock.run_soon()
    assert opened.events() == sent
    assert opened.stream.unsent() == 0


def test_binary_messages_of_all_sizes_arrive_in_order(opened: Connection, clock: Clock) -> None:
    sizes = [0, 3, DIRECT_BYTES, 3, DIRECT_BYTES + 1, 3, 70_000, SENT_FRAME_BYTES + 1, 3]
    for size in sizes:
        opened.stream.send_binary(b"head", bytes(size))
    clock.run_soon()
    assert opened.events() == [Event(Opcode.BINARY, b"head" + bytes(size)) for size in sizes]


def test_a_short_binary_message_is_written_at_once(opened: Connection) -> None:
    opened.stream.send_binary(b"head", b"data")
    assert opened.events() == [Event(Opcode.BINARY, b"headdata")]


def test_control_frame_does_not_overtake_gathered_messages(opened: Connection) -> None:
    opened.stream.send(b"x" * 5000)
    opened.receive(Opcode.PING)
    assert opened.events() == [text_event(b"x" * 5000), Event(Opcode.PONG, b"")]


def test_largest_messages_are_sent_in_fragments(opened: Connection) -> None:
    message = b"x" * (2 * SENT_FRAME_BYTES + 1)
    opened.stream.send(message)
    assert opened.transport.written[0] == Opcode.TEXT  # without FIN
    assert opened.events() == [text_event(message)]


def _finish(sending: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(StopIteration):
        sending.send(None)


async def _parts(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def test_message_in_parts(opened: Connection) -> None:
    _finish(opened.stream.send_parts(_parts(b"1", b"2"), 2))
    assert opened.events() == [text_event(b"12")]
    assert opened.receiver.seen == ["pause", "resume"]


def test_message_that_breaks_off_half_way_cuts_the_connection_off(
    opened: Connection, clock: Clock
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"1"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match=r"^no more$"):
        opened.stream.send_parts(parts(), 2).send(None)
    assert opened.transport.is_aborted
    clock.run_soon()
    opened.transport.lose()
    assert opened.receiver.seen == ["pause", "lost"]


# ---- the end --------------------------------------------------------------------------


def test_close_of_the_peer_is_answered(opened: Connection, clock: Clock) -> None:
    opened.receive(Opcode.CLOSE, close_payload(1000, "done"))
    assert opened.events() == [close_event(1000)]
    assert opened.transport.is_closing()
    opened.stream.send(b"late")
    opened.stream.close(1000, "")
    opened.stream.probe()
    clock.run_soon()
    opened.transport.lose()
    assert opened.receiver.seen == ["lost"]
    assert clock.waiting == []


def test_own_close_waits_for_that_of_the_peer(opened: Connection, clock: Clock) -> None:
    opened.stream.pause_reading()
    opened.stream.close(1001, "server is shutting down")
    assert opened.events() == [close_event(1001, "server is shutting down")]
    assert opened.transport.has_written_eof
    assert not opened.transport.is_reading_paused
    opened.receive(Opcode.TEXT, b"dropped")
    opened.receive(Opcode.PING)
    assert not opened.transport.is_closing()
    opened.receive(Opcode.CLOSE)
    assert opened.transport.is_closing()
    opened.receive(Opcode.TEXT, b"dropped")
    clock.run_soon()
    opened.transport.lose()
    assert (opened.receiver.seen, clock.waiting) == (["lost"], [])


def test_close_frame_that_was_buffered_already_counts(opened: Connection, clock: Clock) -> None:
    def message_received(message: bytes) -> None:
        opened.stream.close(1000, "")

    opened.receiver.message_received = message_received  # type: ignore[method-assign]
    opened.transport.receive(frame_bytes(Opcode.TEXT, b"") + frame_bytes(Opcode.CLOSE, b""))
    assert not opened.transport.is_closing()
    clock.run_soon()
    assert opened.transport.is_closing()


def test_close_frame_behind_messages_of_a_paused_receiver_counts(
    opened: Connection, clock: Clock
) -> None:
    opened.receiver.message_received = lambda message: opened.stream.pause_reading()  # type: ignore[method-assign]
    opened.transport.receive(frame_bytes(Opcode.TEXT, b"") * 3 + frame_bytes(Opcode.CLOSE, b""))
    opened.stream.close(1000, "")
    assert not opened.transport.is_closing()
    clock.run_soon()
    assert opened.transport.is_closing()


@pytest.mark.parametrize("is_closing", [False, True])
def test_other_connections_get_a_turn_between_tiny_frames(
    opened: Connection, clock: Clock, is_closing: bool
) -> None:
    """Empty fragments and control frames; also while the peer's close frame is looked for."""
    if is_closing:
        opened.stream.close(1000, "")
        clock.run_soon()
    fragment = frame_bytes(Opcode.CONTINUATION, b"", fin=False)
    opened.receive(Opcode.TEXT, fin=False)
    opened.transport.receive(fragment * (FRAGMENTS_IN_A_ROW * BURST * 2))
    turns = 0
    while opened.transport.is_reading_paused:
        turns += 1
        clock.run_next()
    assert turns == 2
    opened.transport.receive(frame_bytes(Opcode.PING, b"") * BURST)
    assert opened.transport.is_reading_paused


def test_peer_that_does_not_hang_up_is_cut_off(opened: Connection, clock: Clock) -> None:
    opened.stream.close(1000, "")
    opened.transport.receive(large_frame()[:100_000])  # dropped as well
    clock.advance(CLOSE_SECONDS)
    assert opened.transport.is_aborted


def test_violation_after_the_own_close_is_ignored(opened: Connection, clock: Clock) -> None:
    opened.stream.close(1000, "")
    opened.events()
    opened.transport.receive(frame_bytes(Opcode.TEXT, b"", mask=False))
    opened.receive(Opcode.CLOSE)
    assert opened.events() == []


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        (frame_bytes(Opcode.TEXT, b"", mask=False), 1002, "frames of a client must be masked"),
        (frame_bytes(Opcode.TEXT, b"\xff"), 1007, "text message is not UTF-8"),
        (b"\x81\xff" + (64 * MIB + 1).to_bytes(8, "big"), 1009, "message exceeds 67108864 bytes"),
    ],
)
def test_violation_ends_the_connection(
    opened: Connection, clock: Clock, data: bytes, code: int, reason: str
) -> None:
    opened.transport.receive(data)
    opened.receive(Opcode.TEXT, b"dropped")
    assert opened.events() == [close_event(code, reason)]
    assert opened.transport.has_written_eof
    clock.run_soon()
    assert opened.receiver.seen == ["lost"]


def test_violation_in_the_middle_of_a_long_frame_drops_its_rest(
    opened: Connection, clock: Clock
) -> None:
    opened.transport.receive(large_frame()[:100_000])
    opened.stream.abort("test")
    opened.transport.receive(bytes(3 * MIB))  # into the same buffer again and again
    opened.transport.eof()
    opened.transport.lose()
    clock.run_soon()
    assert opened.receiver.seen == ["lost"]


@pytest.mark.parametrize("end", ["eof", "lose"])
def test_end_without_a_close_frame(opened: Connection, clock: Clock, end: str) -> None:
    if end == "eof":
        opened.transport.eof()
        clock.run_soon()
        assert opened.receiver.seen == ["lost"]
    opened.transport.lose(ConnectionResetError())
    assert opened.receiver.seen == ["lost"]
    assert opened.stream.closed.done()
    assert opened.transport.written == b""


def test_back_pressure_reaches_the_stream_during_a_long_frame(opened: Connection) -> None:
    opened.transport.receive(large_frame()[:100_000])
    direct = opened.transport.get_protocol()
    direct.pause_writing()
    direct.resume_writing()
    assert opened.receiver.seen == ["pause", "resume"]


def test_protocol_errors_carry_their_close_code() -> None:
    error = ProtocolError(1002, "reserved bits are set")
    assert (error.close_code, str(error)) == (1002, "reserved bits are set")


def test_large_bytes_are_less_than_the_budget() -> None:
    assert LARGE_BYTES < server.RECEIVING_BYTES


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("end", ["lost", "offence", "aborted"])
def test_bytes_of_unfinished_messages_are_dropped_with_the_connection(
    opened: Connection, end: str, is_long: bool
) -> None:
    """At once: the objects of a connection refer to each other, so they stay for a while."""
    frames = opened.stream._frames
    opened.receive(Opcode.TEXT, b"x" * 50_000, fin=False)
    opened.transport.receive(
        frame_bytes(Opcode.CONTINUATION, b"x" * (100_000 if is_long else 10_000))[:9_000]
    )
    assert len(frames._message) + len(frames._buffer) >= 59_000
    if end == "lost":
        opened.transport.lose()
    elif end == "aborted":
        opened.stream.abort("test")
    else:
        opened.transport.receive(b"x" * 100_000)
    assert len(frames._message) + len(frames._buffer) == 0
