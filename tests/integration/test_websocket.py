"""The WebSocket listener on the wire: HTTP, framing, close codes, liveness."""

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

from inside import eventually, start_patched
from wire import (
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
    http,
    scaled,
    start_server,
    upgrade_request,
    uri,
)

_MIB = 1_048_576
_STATUS = b'{"id":9,"method":"environment/status"}'
_READY = b'{"id":9,"result":{"status":"ready"}}'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all tests that need no other."""
    with start_server("ours") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.connect() as connected:
        yield connected


@pytest.fixture
def link(client: Client) -> WebSocketLink:
    return client.websocket


@pytest.fixture
def bare(server: Server) -> Iterator[WebSocketLink]:
    """A connection before its handshake."""
    link = server.link()
    yield link
    link.close()


def _dial(server: Server) -> socket.socket:
    port = int(server.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), scaled(10))


def _end(link: WebSocketLink) -> tuple[int | None, str]:
    """How the server ends the connection: its close frame, and then TCP too."""
    with pytest.raises(Disconnected) as end:
        link.receive(scaled(10))
    if end.value.close_code is not None:
        with pytest.raises(Disconnected):
            link.receive_frame(scaled(1))
    return end.value.close_code, end.value.reason


# ---- HTTP -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_line", "headers", "status", "body"),
    [
        ("GET /readyz", [], 200, b""),
        ("HEAD /readyz", [], 200, b""),
        ("GET /readyz?x=1", [], 200, b""),
        ("POST /readyz", [], 405, b""),
        ("GET /healthz", [], 404, b""),
        ("POST /healthz", [], 404, b""),
        ("POST /", [], 405, b"Request method must be `GET`"),
        ("GET /", [], 400, b"Connection header did not include 'upgrade'"),
        ("HEAD /", [], 405, b""),
        (
            "GET /",
            ["Connection: upgrade"],
            400,
            b"`Upgrade` header did not include 'websocket'",
        ),
        (
            "GET /",
            ["Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 12"],
            400,
            b"`Sec-WebSocket-Version` header did not include '13'",
        ),
        (
            "GET /",
            ["Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"],
            400,
            b"`Sec-WebSocket-Key` header missing",
        ),
        ("GET /readyz", ["Origin: http://127.0.0.1"], 403, b""),
        ("GET /nope", ["Origin: null"], 403, b""),
        ("POST /", ["Origin:"], 403, b""),
        ("GET /", ["no header at all"], 400, b""),
        ("GET", [], 400, b""),
    ],
)
def test_http_answers(
    server: Server, request_line: str, headers: list[str], status: int, body: bytes
) -> None:
    lines = [f"{request_line} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]
    reply = server.http("\r\n".join(lines).encode())
    assert (reply.status, reply.body) == (status, body)
    if not request_line.startswith("HEAD"):
        assert reply.header("content-length") == str(len(body))
    if body:
        assert reply.header("content-type") == "text/plain; charset=utf-8"
    if request_line == "POST /readyz":
        assert reply.header("allow") == "GET,HEAD"


def test_several_requests_on_one_connection(server: Server) -> None:
    with _dial(server) as sock:
        sock.sendall(b"GET /readyz HTTP/1.1\r\n\r\n" * 3 + b"GET /x HTTP/1.1\r\n\r\n")
        received = b""
        while received.count(b"HTTP/1.1 ") < 4 or not received.endswith(b"\r\n\r\n"):
            received += sock.recv(65536)
        assert received.count(b"HTTP/1.1 200 OK") == 3
        sock.sendall(upgrade_request() + frame_bytes(TEXT, _STATUS))
        answer = b""
        while b"client must call initialize" not in answer:
            answer += sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 101 ")


def test_thousands_of_requests_at_once_are_no_burden(server: Server) -> None:
    """Enough for any recursion to show; and who does not read the answers is hung up on."""
    request = b"GET /readyz HTTP/1.1\r\n\r\n"
    with _dial(server) as sock:
        sock.sendall(request * 5000)
        received = 0
        while received < 5000:
            received += sock.recv(_MIB).count(b"HTTP/1.1 200")
    with _dial(server) as sock:
        eventually("hung up on", lambda: not _sends(sock, request * 1000))
    assert server.http(request).status == 200


def _sends(sock: socket.socket, data: bytes) -> bool:
    try:
        sock.sendall(data)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1", "null", ""])
def test_origin_is_refused_before_anything_else(server: Server, origin: str) -> None:
    reply = http(server.url, upgrade_request("/", [("Origin", origin)]))
    assert (reply.status, reply.body) == (403, b"")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "localhost:7700", "[::1]:1"])
def test_own_hosts_are_accepted(server: Server, host: str) -> None:
    assert server.http(upgrade_request(host=host)).status == 101


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7700", "127.0.0.1.evil.example"])
def test_foreign_hosts_are_refused(server: Server, host: str) -> None:
    """A web page that rebinds its name to our address is its own origin, and may send none."""
    assert server.http(upgrade_request(host=host)).status == 403
    readyz = f"GET /readyz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    assert server.http(readyz).status == 403


def test_allowed_hosts_are_accepted() -> None:
    with start_server("ours", "--allow-host", "Box.Example", "--allow-host", "two") as server:
        for host in ("box.example", "BOX.example:7700", "two:1"):
            assert server.http(upgrade_request(host=host)).status == 101
        assert server.http(upgrade_request(host="three")).status == 403


@pytest.mark.parametrize("ended", [True, False])
def test_long_heads_are_refused(server: Server, ended: bool) -> None:
    """The answer arrives although the client is still sending, and sends no end."""
    head = b"GET / HTTP/1.1\r\nX: " + b"x" * 400_000 + (b"\r\n\r\n" if ended else b"")
    assert server.http(head).status == 431


def test_head_in_small_pieces(server: Server) -> None:
    with _dial(server) as sock:
        for byte in upgrade_request():
            sock.send(bytes([byte]))
        assert sock.recv(1000).startswith(b"HTTP/1.1 101 ")


def test_no_extension_or_subprotocol_is_agreed_on(server: Server) -> None:
    headers = [
        ("Sec-WebSocket-Extensions", "permessage-deflate"),
        ("Sec-WebSocket-Protocol", "chat"),
    ]
    link = server.link(headers=headers)
    assert link.handshake.header("sec-websocket-extensions") is None
    assert link.handshake.header("sec-websocket-protocol") is None
    link.close()


def test_delays_of_the_kernel_are_switched_off(client: Client) -> None:
    """Without TCP_NODELAY each exchange of two small messages waits for 40 ms."""
    began = time.monotonic()
    for _ in range(50):
        client.request("environment/status")
        client.call("environment/status")
    assert time.monotonic() - began < scaled(1)


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

    seen = -1
    while True:
        buffer = bytearray(4)
        fcntl.ioctl(client.websocket.sock.fileno(), termios.FIONREAD, buffer)
        now = struct.unpack("i", buffer)[0]
        if now == seen and now > 100_000:
            return
        seen = now
        time.sleep(0.05)


# ---- time -----------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n", b"GET /readyz HTTP/1.1\r\n\r\n"])
def test_unfinished_handshakes_are_cut(sent: bytes) -> None:
    with start_patched({"transports.websocket.HANDSHAKE_SECONDS": 0.3}) as server:
        upgraded = server.connect()
        with _dial(server) as sock:
            sock.sendall(sent)
            eventually("cut", lambda: _is_dead(sock), timeout=3)
        # Nobody who made it is affected.
        assert upgraded.call("environment/status") == {"status": "ready"}
        upgraded.close()


def test_trickling_a_head_gains_no_time() -> None:
    constants = {"transports.websocket.HANDSHAKE_SECONDS": 0.3}
    with start_patched(constants) as server, _dial(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX: ")
        eventually("cut", lambda: not _sends(sock, b"x"), timeout=3)


_QUICK_PINGS = {
    "transports.websocket.PING_SECONDS": 0.2,
    "transports.websocket._TICK_SECONDS": 0.05,
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


def test_slow_clients_are_not_taken_for_dead(python: Callable[[str], list[str]]) -> None:
    with start_patched(_QUICK_PINGS) as server, server.connect() as client:
        size = 20_000_000
        process = client.start(python(f"import os, sys; sys.stdout.write('x' * {size})"))
        _wait_until_stuck(client)
        time.sleep(1.5)  # several times the patience with a quiet client
        assert len(client.collect(process, timeout=30).stdout) == size


def test_stalled_large_message_gives_its_room_back() -> None:
    constants = {
        "transports.websocket.STALL_SECONDS": 0.3,
        "transports.websocket._TICK_SECONDS": 0.05,
        "transports.websocket.RECEIVING_BYTES": 70 * _MIB,
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
        "transports.websocket.STALL_SECONDS": 0.5,
        "transports.websocket.TRICKLE_BYTES_PER_SECOND": 1000 * _MIB,
        "transports.websocket._TICK_SECONDS": 0.05,
        "transports.websocket.RECEIVING_BYTES": 70 * _MIB,
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
            _sends(trickler.websocket.sock, b"x")
        sender.join()
        assert trickler.websocket.close_code == 1008
        assert other.link.receive(scaled(10)) == _READY
        trickler.close()


def test_too_many_connections_are_told_so() -> None:
    constants = {
        "transports.websocket.MAX_CONNECTIONS": 3,
        "transports.websocket.REFUSED_CONNECTIONS": 2,
    }
    with start_patched(constants) as server:
        clients = [server.connect() for _ in range(3)]
        with pytest.raises(HandshakeRefused) as refused:
            server.link()
        assert (refused.value.status, refused.value.reply.body) == (503, b"too many connections")
        refused_sockets = [_dial(server) for _ in range(6)]
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
            with _dial(server) as sock:
                sock.sendall(data)
        for payload in (b"\x81", b"\x81\x80", frame_bytes(TEXT, b"{")):
            link = server.link()
            link.send_bytes(payload)
            link.abort()
        for _ in range(20):
            sock = _dial(server)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        with server.connect() as client:
            deep = "[" * 200
            client.link.send_text(f'{{"id":1,"method":{deep}')
            assert json.loads(client.link.receive(scaled(5)))["id"] == -1
        server.stop()
        assert server.stderr() == ""
