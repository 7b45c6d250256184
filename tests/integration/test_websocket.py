"""The WebSocket listener on the wire: framing, close codes, liveness."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Client,
    Disconnected,
    HandshakeRefused,
    NothingArrived,
    Server,
    WebSocketLink,
    frame_bytes,
    scaled,
    start_server,
    upgrade_request,
    uri,
)
from tests.support.raw_links import try_send
from tests.support.server_internals import eventually, start_patched, start_prepared

_MIB = 1_048_576
_STATUS = b'{"id":9,"method":"environment/status"}'
_READY = b'{"id":9,"result":{"status":"ready"}}'


@pytest.fixture
def link(client: Client) -> WebSocketLink:
    return client.websocket


@pytest.fixture
def bare(server: Server) -> Iterator[WebSocketLink]:
    """A connection before its handshake."""
    link = server.link()
    yield link
    link.close()


def _end(link: WebSocketLink) -> tuple[int | None, str]:
    """How the server ends the connection: its close frame, and then TCP too."""
    with pytest.raises(Disconnected) as end:
        link.receive(scaled(10))
    if end.value.close_code is not None:
        with pytest.raises(Disconnected):
            link.receive_frame(scaled(1))
    return end.value.close_code, end.value.reason


# ---- framing --------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [TEXT, BINARY])
def test_messages_in_one_frame_or_many(link: WebSocketLink, opcode: int) -> None:
    link.send_frame(opcode, _STATUS)
    link.send_fragments([_STATUS[:5], b"", _STATUS[5:]], opcode=opcode)
    link.send_fragments([bytes([byte]) for byte in _STATUS], opcode=opcode)
    assert [link.receive(scaled(5)) for _ in range(3)] == [_READY] * 3


def _padded(size: int) -> bytes:
    return _STATUS + b" " * (size - len(_STATUS))


def test_largest_message_in_one_frame(link: WebSocketLink) -> None:
    link.send_text(_padded(64 * _MIB))
    assert link.receive(scaled(30)) == _READY


@pytest.mark.parametrize("size", [60_000, _MIB, 16 * _MIB])
def test_largest_message_in_fragments(link: WebSocketLink, size: int) -> None:
    message = _padded(64 * _MIB)
    frame = frame_bytes(CONTINUATION, b" " * size, fin=False)
    link.send_frame(TEXT, message[: 64 * _MIB % size + size], fin=False)
    for _ in range(64 * _MIB // size - 1):
        link.send_bytes(frame)
    link.send_frame(CONTINUATION, b"")
    assert link.receive(scaled(30)) == _READY


@pytest.mark.parametrize(
    "head",
    [
        bytes((0x81, 0xFF)) + struct.pack(">Q", 64 * _MIB + 1),
        bytes((0x81, 0xFF)) + struct.pack(">Q", 65 * _MIB),
        bytes((0x82, 0xFF)) + struct.pack(">Q", 2**63),
    ],
)
def test_larger_messages_are_refused_when_announced(link: WebSocketLink, head: bytes) -> None:
    link.send_bytes(head + b"mask")
    assert _end(link) == (1009, "message exceeds 67108864 bytes")


def test_larger_messages_in_fragments_are_refused_when_announced(link: WebSocketLink) -> None:
    link.send_frame(TEXT, b" " * _MIB, fin=False)
    link.send_bytes(bytes((0x80, 0xFF)) + struct.pack(">Q", 64 * _MIB) + b"mask")
    assert _end(link) == (1009, "message exceeds 67108864 bytes")


def test_large_answers_come_in_frames_that_clients_accept(client: Client, tmp_path: Path) -> None:
    """The newest client refuses frames above 16 MiB; the reference sends it larger ones."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4096 * 20)
    result = client.call("fs/readFile", {"path": uri(tmp_path / "file")}, timeout=30)
    assert len(result["dataBase64"]) > 26 * _MIB
    frames = client.websocket.frames
    assert max(len(frame.payload) for frame in frames) < 16 * _MIB
    assert frames[-1].fin
    assert client.call("environment/status") == {"status": "ready"}


def test_many_small_entries_are_fragmented_too(client: Client, tmp_path: Path) -> None:
    """An answer that is made at once, not streamed: process/read of a full log is 1.4 MB."""
    for number in range(3000):
        (tmp_path / f"{number:0200}").touch()
    result = client.call("fs/readDirectory", {"path": uri(tmp_path)})
    assert len(result["entries"]) == 3000


@pytest.mark.parametrize("payload", [b"", b"x", bytes(125)])
def test_pings_are_answered(link: WebSocketLink, payload: bytes) -> None:
    link.send_frame(PING, payload)
    frame = link.receive_frame(scaled(5))
    assert (frame.opcode, frame.payload, frame.fin) == (PONG, payload, True)
    link.send_frame(PONG, b"nobody asked")
    link.send_text(_STATUS)
    assert link.receive(scaled(5)) == _READY


def test_pings_are_answered_inside_a_long_answer(client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(30 * _MIB))
    read = client.request("fs/readFile", {"path": uri(tmp_path / "file")})
    client.websocket.send_frame(PING, b"now")
    assert len(client.result(read, timeout=30)["dataBase64"]) == 40 * _MIB
    client.websocket.ping(b"after")
    assert b"now" in client.websocket.pongs or b"now" in {
        frame.payload for frame in client.websocket.frames
    }


# ---- how connections end --------------------------------------------------------------


@pytest.mark.parametrize(
    ("opcode", "payload", "rules", "reason"),
    [
        (TEXT, _STATUS, {"mask": False}, "frames of a client must be masked"),
        (TEXT, _STATUS, {"rsv": 4}, "reserved bits are set"),
        (BINARY, _STATUS, {"rsv": 1}, "reserved bits are set"),
        (3, b"", {}, "unknown opcode"),
        (11, b"", {}, "unknown opcode"),
        (CONTINUATION, b"x", {}, "fragments out of order"),
        (PING, b"x" * 126, {}, "control frame too long or fragmented"),
        (PING, b"x", {"fin": False}, "control frame too long or fragmented"),
        (CLOSE, b"x" * 126, {}, "control frame too long or fragmented"),
    ],
)
def test_broken_frames(
    link: WebSocketLink, opcode: int, payload: bytes, rules: dict[str, Any], reason: str
) -> None:
    link.send_frame(opcode, payload, **rules)
    assert _end(link) == (1002, reason)


def test_message_within_a_message(link: WebSocketLink) -> None:
    link.send_frame(TEXT, b"{", fin=False)
    link.send_frame(TEXT, _STATUS)
    assert _end(link) == (1002, "fragments out of order")


def test_text_that_is_not_utf_8(link: WebSocketLink) -> None:
    link.send_text(b'{"id":"\xff"}')
    assert _end(link) == (1007, "text message is not UTF-8")


def test_binary_that_is_not_utf_8_is_only_malformed(client: Client) -> None:
    client.websocket.send_binary(b'{"id":"\xff"}')
    assert client.receive()["id"] == -1
    assert client.call("environment/status") == {"status": "ready"}


def test_stray_response(client: Client) -> None:
    client.send({"id": 5, "result": None})
    assert _end(client.websocket) == (1008, "response to a request that was never made")


def test_early_initialized(bare: WebSocketLink) -> None:
    bare.send_text(b'{"method":"initialized"}')
    assert _end(bare) == (1008, "initialized before initialize")


def test_answers_made_before_an_offence_arrive(client: Client) -> None:
    client.websocket.send_bytes(
        frame_bytes(TEXT, _STATUS) * 100 + frame_bytes(TEXT, b"x", mask=False)
    )
    for _ in range(100):
        assert client.link.receive(scaled(5)) == _READY
    assert _end(client.websocket)[0] == 1002


def test_reason_arrives_although_the_client_goes_on_sending(bare: WebSocketLink) -> None:
    """Closing TCP with unread bytes resets it, and a reset overtakes what was sent before."""
    bare.send_frame(3, b"")
    for _ in range(100):
        bare.send_bytes(frame_bytes(BINARY, bytes(100_000)))
    assert _end(bare)[0] == 1002


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        (b"", b""),
        (struct.pack(">H", 1000), struct.pack(">H", 1000)),
        (struct.pack(">H", 1001) + "tschüß".encode(), struct.pack(">H", 1001)),
        (struct.pack(">H", 4321), struct.pack(">H", 4321)),
        (struct.pack(">H", 1005), struct.pack(">H", 1002)),
        (b"\x03", struct.pack(">H", 1002)),
        (struct.pack(">H", 1000) + b"\xff", struct.pack(">H", 1007)),
    ],
)
def test_close_frames_are_answered(link: WebSocketLink, payload: bytes, answer: bytes) -> None:
    link.send_frame(CLOSE, payload)
    frame = link.receive_frame(scaled(5))
    assert (frame.opcode, frame.payload) == (CLOSE, answer)
    with pytest.raises(Disconnected) as end:
        link.receive_frame(scaled(5))
    assert end.value.close_code is None


@pytest.mark.parametrize("how", ["close frame", "half closed", "reset"])
def test_unread_answers_do_not_keep_a_session_attached(
    server: Server, how: str, python: Callable[[str], list[str]]
) -> None:
    """The client is gone for good, though what it did not read is still to be sent."""
    client = server.connect()
    client.start(python("import os\nwhile True: os.write(1, bytes(65536))"))
    with server.connect() as other:
        _wait_until_stuck(client)
        if how == "close frame":
            client.websocket.close_politely()
        elif how == "half closed":
            client.websocket.sock.shutdown(socket.SHUT_WR)
        else:
            client.websocket.abort()

        def resumed() -> bool:
            params = {"clientName": "x", "resumeSessionId": client.session_id}
            with server.connect(initialize=False) as fresh:
                return "result" in fresh.answer(fresh.request("initialize", params))

        # Well before the silent client would be found out by a probe.
        eventually("resume", resumed, timeout=2.5)
        assert other.call("environment/status") == {"status": "ready"}
    client.close()


def _wait_until_stuck(client: Client) -> None:
    """Until the client's receive buffer no longer grows, because nobody reads."""
    import fcntl
    import termios

    seen, quiet = -1, 0
    while quiet < 10:
        buffer = bytearray(4)
        fcntl.ioctl(client.websocket.sock.fileno(), termios.FIONREAD, buffer)
        now = struct.unpack("i", buffer)[0]
        quiet = quiet + 1 if now == seen and now > 100_000 else 0
        seen = now
        time.sleep(0.02)


# ---- time -----------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n", b"GET /readyz HTTP/1.1\r\n\r\n"])
def test_unfinished_handshakes_are_cut(sent: bytes) -> None:
    with start_patched({"net.websocket.server.HANDSHAKE_SECONDS": 0.3}) as server:
        upgraded = server.connect()
        with server.dial() as sock:
            sock.sendall(sent)
            eventually("cut", lambda: _is_dead(sock), timeout=3)
        # Nobody who made it is affected.
        assert upgraded.call("environment/status") == {"status": "ready"}
        upgraded.close()


def test_trickling_a_head_gains_no_time() -> None:
    constants = {"net.websocket.server.HANDSHAKE_SECONDS": 0.3}
    with start_patched(constants) as server, server.dial() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX: ")
        eventually("cut", lambda: not try_send(sock, b"x"), timeout=3)


_QUICK_PINGS = {
    "net.websocket.server.PING_SECONDS": 0.2,
    "net.websocket.server._TICK_SECONDS": 0.05,
}


def test_unanswered_pings_end_the_connection() -> None:
    with start_patched(_QUICK_PINGS) as server:
        client = server.connect()
        client.websocket.answer_pings = False
        frame = client.websocket.receive_frame(scaled(5))
        assert (frame.opcode, frame.payload) == (PING, b"")
        with pytest.raises(Disconnected):
            client.websocket.receive_frame(scaled(5))
        with server.connect(resume=client.session_id) as again:
            assert again.session_id == client.session_id
        client.close()


def test_answered_pings_keep_the_connection() -> None:
    with start_patched(_QUICK_PINGS) as server, server.connect() as client:
        with pytest.raises(NothingArrived):
            client.receive(1.5)
        pings = [frame for frame in client.websocket.frames if frame.opcode == PING]
        assert len(pings) >= 3
        assert client.call("environment/status") == {"status": "ready"}


def test_talking_clients_are_not_pinged() -> None:
    with start_patched(_QUICK_PINGS) as server, server.connect() as client:
        client.websocket.answer_pings = False
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            client.call("environment/status")
            time.sleep(0.01)
        assert not [frame for frame in client.websocket.frames if frame.opcode == PING]


# Connections are checked only while a file exists.
_CHECKED_WHILE = """
import os
import exec_server.net.websocket.server as module
module.PING_SECONDS, module._TICK_SECONDS = 0.2, 0.05
tick = module.WebSocketStream.tick
def tick_if_told(stream, now):
    if os.path.exists({path!r}):
        tick(stream, now)
module.WebSocketStream.tick = tick_if_told
"""


@pytest.mark.measured
def test_slow_clients_are_not_taken_for_dead(
    python: Callable[[str], list[str]], tmp_path: Path
) -> None:
    told = tmp_path / "told"
    with (
        start_prepared(_CHECKED_WHILE.format(path=str(told))) as server,
        server.connect() as client,
    ):
        size = 20_000_000
        process = client.start(python(f"import os, sys; sys.stdout.write('x' * {size})"))
        _wait_until_stuck(client)
        told.touch()
        # A quiet client is found dead three times before the slow one reads on.
        for _ in range(3):
            quiet = server.connect()
            quiet.websocket.answer_pings = False
            with pytest.raises(Disconnected):
                quiet.receive()
            quiet.close()
        told.unlink()  # a busy machine may keep this test from answering its own pings in time
        assert len(client.collect(process, timeout=30).stdout) == size


def test_stalled_large_message_gives_its_room_back() -> None:
    constants = {
        "net.websocket.server.STALL_SECONDS": 0.3,
        "net.websocket.server._TICK_SECONDS": 0.05,
        "net.websocket.server.RECEIVING_BYTES": 70 * _MIB,
    }
    with start_patched(constants) as server:
        stalled = server.connect()
        stalled.websocket.send_bytes(
            bytes((0x81, 0xFF)) + struct.pack(">Q", 60 * _MIB) + bytes(2 * _MIB)
        )
        with server.connect() as other:
            other.websocket.send_text(_padded(20 * _MIB))
            assert other.link.receive(scaled(10)) == _READY
        assert _end(stalled.websocket) == (1008, "message stalled")
        stalled.close()


def test_trickling_large_message_gives_its_room_back_to_those_who_wait() -> None:
    constants = {
        "net.websocket.server.STALL_SECONDS": 0.5,
        "net.websocket.server.TRICKLE_BYTES_PER_SECOND": 1000 * _MIB,
        "net.websocket.server._TICK_SECONDS": 0.05,
        "net.websocket.server.RECEIVING_BYTES": 70 * _MIB,
    }
    with start_patched(constants) as server, server.connect() as other:
        trickler = server.connect()
        trickler.websocket.send_bytes(bytes((0x81, 0xFF)) + struct.pack(">Q", 60 * _MIB) + b"mask")
        # As long as nobody waits it may take its time.
        for _ in range(30):
            trickler.websocket.send_bytes(b"x")
            time.sleep(0.05)
        assert other.call("environment/status") == {"status": "ready"}
        # In a thread, since sending waits for room too: the trickling must not pause for it.
        message = frame_bytes(TEXT, _padded(20 * _MIB))
        sender = threading.Thread(target=other.websocket.send_bytes, args=(message,), daemon=True)
        sender.start()
        deadline = time.monotonic() + scaled(10)
        while trickler.websocket.close_code is None:
            assert time.monotonic() < deadline, "it trickles on"
            with pytest.raises((NothingArrived, Disconnected)):
                trickler.websocket.receive(0.02)
            try_send(trickler.websocket.sock, b"x")
        sender.join()
        assert trickler.websocket.close_code == 1008
        assert other.link.receive(scaled(10)) == _READY
        trickler.close()


def test_too_many_connections_are_told_so() -> None:
    constants = {"net.admission.MAX_CONNECTIONS": 3, "net.admission.MAX_PENDING": 2}
    with start_patched(constants) as server:
        clients = [server.connect() for _ in range(3)]
        with pytest.raises(HandshakeRefused) as refused:
            server.link()
        assert (refused.value.status, refused.value.reply.body) == (503, b"too many connections")
        refused_sockets = [server.dial() for _ in range(6)]
        eventually("hung up on", lambda: any(_is_dead(sock) for sock in refused_sockets))
        for sock in refused_sockets:
            sock.close()
        assert clients[0].call("environment/status") == {"status": "ready"}
        clients.pop().close()

        def admitted() -> bool:
            try:
                clients.append(server.connect())
            except (HandshakeRefused, Disconnected, OSError):
                return False
            return True

        eventually("a place that became free", admitted)
        for client in clients:
            client.close()


def _is_dead(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_broken_clients_leave_no_trace_in_the_log() -> None:
    """What a client does wrong is no error of ours: nothing at the default level."""
    with start_server("ours") as server:
        for data in (b"", b"\x00" * 100, b"GET / HTTP/1.1\r\n", upgrade_request()[:-2]):
            with server.dial() as sock:
                sock.sendall(data)
        for payload in (b"\x81", b"\x81\x80", frame_bytes(TEXT, b"{")):
            link = server.link()
            link.send_bytes(payload)
            link.abort()
        for _ in range(20):
            sock = server.dial()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        with server.connect() as client:
            deep = "[" * 200
            client.link.send_text(f'{{"id":1,"method":{deep}')
            assert json.loads(client.link.receive(scaled(5)))["id"] == -1
        server.stop()
        assert server.stderr() == ""
