"""WebSockets, HTTP, JSON-RPC lines and the relay: bytes from the network."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import h11
from tests.fuzz.target import Target, as_text, halves
from tests.support.raw_links import frame_bytes, upgrade_request

from exec_server.errors import ConnectFailed, ProtocolError, RelayError
from exec_server.net import auth, http_client
from exec_server.net.lines import LineSplitter
from exec_server.net.websocket import handshake, upgrade
from exec_server.net.websocket.frames import FrameReader
from exec_server.protocol.urls import InvalidUrl, parse_host, parse_http_url, parse_url
from exec_server.relay import frames
from exec_server.relay.frames import Frame, Kind
from exec_server.relay.multiplexer import EncryptedMultiplexer, PendingHandshake
from exec_server.relay.noise import Identity, Initiator, Responder, prologue
from exec_server.relay.records import MessageAssembler, PlainChannel, ReorderWindow


def _events(pieces: tuple[bytes, ...], *, from_client: bool) -> list[object]:
    reader = FrameReader(from_client=from_client)
    seen: list[object] = []
    for piece in pieces:
        reader.feed(piece)
        try:
            while (event := reader.next_event()) is not None:
                seen.append(event)
        except ProtocolError as error:
            return [*seen, (error.close_code, error.reason)]
    return seen


def _frames(data: bytes) -> None:
    for from_client in (True, False):
        whole = _events((data,), from_client=from_client)
        assert _events(halves(data), from_client=from_client) == whole


def _request_head(data: bytes) -> None:
    try:
        head = handshake.parse_head(data)
        handshake.check_browser(head, frozenset({"example.org"}))
        for authenticate in _AUTHENTICATORS:
            with suppress(handshake.HttpRefusal):
                authenticate(head.headers)
        handshake.check_upgrade(head)
        handshake.upgrade_answer(head.headers)
    except handshake.HttpRefusal as refusal:
        handshake.refusal_answer(refusal, None)


_AUTHENTICATORS: Final = (
    auth.capability_token(bytes(32)),
    auth.signed_bearer_token(auth.SignedTokens(bytes(32), None, None, 30, lambda: 0.0)),
)


def _response_head(data: bytes) -> None:
    with suppress(ConnectFailed):
        upgrade.check_answer(data, b"AAAAAAAAAAAAAAAAAAAAAA==")


class _Transport(asyncio.Transport):
    """Takes anything and sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._is_closing = False

    def write(self, data: object) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        self._is_closing = True


async def _fetch(pieces: tuple[bytes, ...]) -> object:
    """The response to a request as the HTTP client reads it from these bytes."""
    connection = http_client._Connection(parse_url("http://127.0.0.1/", frozenset({"http"})))
    connection.connection_made(_Transport())
    head = h11.Request(method="GET", target="/", headers=[("Host", "x")])
    asking = asyncio.get_running_loop().create_task(connection.request(head, b"", "failed"))
    await asyncio.sleep(0)
    for piece in filter(None, pieces):
        connection.data_received(piece)
    connection.eof_received()
    connection.connection_lost(None)
    try:
        response = await asking
        body = b""
        while piece := await connection.read():
            body += piece
        return response.status_code, bytes(body)
    except http_client.HttpFailed:
        return "failed"


def _http_response(data: bytes) -> None:
    loop = asyncio.new_event_loop()
    try:
        whole = loop.run_until_complete(_fetch((data,)))
        assert loop.run_until_complete(_fetch(halves(data))) == whole
    finally:
        loop.close()


def _http_url(data: bytes) -> None:
    text = as_text(data)
    base = parse_http_url("http://example.org/a/b?c")
    for parent in (None, base):
        try:
            found = parse_http_url(text, parent)
        except InvalidUrl:
            continue
        assert parse_http_url(found.root).root == found.root


def _url_host(data: bytes) -> None:
    with suppress(ValueError):
        host = parse_host(as_text(data))
        assert parse_host(host) == host


def _lines(data: bytes) -> None:
    def split(pieces: tuple[bytes, ...]) -> list[object]:
        splitter = LineSplitter(1000)
        found: list[object] = []
        try:
            for piece in pieces:
                splitter.feed(piece)
                while (line := splitter.next_line()) is not None:
                    found.append(line)
        except ProtocolError as error:
            found.append(error.close_code)
        return found

    whole, cut = split((data,)), split(halves(data))
    assert whole == cut


def _relay_frame(data: bytes) -> None:
    try:
        frame = frames.decode(data)
    except RelayError:
        return
    assert frames.decode(frames.encode(frame)) == frame


def _records(data: bytes) -> None:
    """Numbered records of any content: the first byte is the number, the second the size."""
    window, assembler, plain = ReorderWindow(), MessageAssembler(), PlainChannel("s")
    with suppress(RelayError):
        while len(data) > 2:
            seq, size, data = data[0], data[1], data[2:]
            record, data = data[:size], data[size:]
            for ready in window.push(seq, record):
                assembler.feed(ready)
            if record:
                index, count = seq % 8, seq // 8
                plain.receive(
                    Frame("s", Kind.DATA, record, segment_index=index, segment_count=count)
                )


_IDENTITY: Final = Identity.generate()


_PROLOGUE: Final = prologue("e", "r", "s")


def _noise(data: bytes) -> None:
    """Both halves of a handshake with anything as the peer's message."""
    with suppress(RelayError):
        Responder(_IDENTITY, _PROLOGUE).read_first(data)
    initiator = Initiator(_IDENTITY, _IDENTITY.public, _PROLOGUE)
    initiator.write_first(b"")
    with suppress(RelayError):
        initiator.read_second(data)


class _Link:
    """The owner of a multiplexer, which answers nothing."""

    def send_frame(self, frame: bytes) -> None:
        frames.decode(frame)

    def validate(self, handshake: PendingHandshake) -> None:
        pass

    def stream_opened(self, channel: object) -> Any:
        raise AssertionError("a stream was opened without a handshake")

    def stream_revoked(self, stream_id: str) -> None:
        pass


def _multiplexer(data: bytes) -> None:
    """Frames of a link, each after a byte with its size."""
    streams = EncryptedMultiplexer(_IDENTITY, "e", "r", _Link(), lambda: 0.0)
    while data:
        size, data = data[0], data[1:]
        streams.frame_received(data[:size])
        data = data[size:]
    streams.link_lost()


_RELAY_SEEDS: Final = (
    frames.encode(Frame("stream", Kind.DATA, b"payload", seq=3)),
    frames.encode(Frame("stream", Kind.HANDSHAKE, b"payload")),
    frames.encode(Frame("stream", Kind.RESET, reason="why")),
    frames.encode(Frame("stream", Kind.RESUME)),
)


_HEAD_WORDS: Final = (b"\r\n", b": ", b"Host", b"Upgrade", b"websocket", b"HTTP/1.1", b"\t", b",")


TARGETS: Final = (
    Target(
        "websocket-frames",
        _frames,
        (
            frame_bytes(1, b"hello"),
            frame_bytes(2, b"x" * 200, fin=False),
            frame_bytes(8, b"\x03\xe8"),
        ),
        (b"\x81\x85", b"\x80\x80", b"\x89\x00", b"\x81\xfe", b"\x81\xff"),
    ),
    Target(
        "request-head",
        _request_head,
        (
            upgrade_request()[:-4],
            upgrade_request(headers=[("Authorization", "Bearer eyJhbGciOiJIUzI1NiJ9.e30.x")])[:-4],
        ),
        (*_HEAD_WORDS, b"Authorization: Bearer ", b"eyJhbGciOiJub25lIn0", b"."),
    ),
    Target(
        "response-head",
        _response_head,
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade",),
        _HEAD_WORDS,
    ),
    Target(
        "http-responses",
        _http_response,
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 404 No\r\n\r\nbody",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2;x=y\r\nab\r\n0\r\nA: b\r\n\r\n",
        ),
        (*_HEAD_WORDS, b"Content-Length", b"Transfer-Encoding: chunked", b"0\r\n\r\n", b"204"),
    ),
    Target(
        "http-url",
        _http_url,
        (b"http://user@example.org:80/a/../b?c#d", b"//[::1]:8/", b"\\\\1.2.3.4/%zz"),
        (b"http:", b"https:", b"//", b"..", b"%2e", b"@", b"[", b"]", b"xn--", b"0x7f"),
    ),
    Target(
        "url-host",
        _url_host,
        ("münchen.de".encode(), b"0x7f.1", b"[::ffff:1.2.3.4]", b"xn--mnchen-3ya.de"),
        (b"xn--", b".", b"0x", b"%", b":", "\u200d".encode(), "。".encode()),
    ),
    Target("stdio-lines", _lines, (b'{"id":1}\n\r\n{"id":2}\r\n',), (b"\n", b"\r", b"\r\n", b" ")),
    Target("relay-frames", _relay_frame, _RELAY_SEEDS, (b"\x08\x01", b"\x12\x06stream")),
    Target(
        "relay-records", _records, (b"\0\x08\0\0\0\x04abcd", b"\x01\x05\0\0\0\x01x\0\x03\0\0\0")
    ),
    Target(
        "relay-handshakes",
        _noise,
        (bytes(1200), Initiator(_IDENTITY, _IDENTITY.public, _PROLOGUE).write_first(b"payload")),
    ),
    Target(
        "relay-links",
        _multiplexer,
        (b"".join(bytes([len(each)]) + each for each in _RELAY_SEEDS),),
        _RELAY_SEEDS,
    ),
)
