"""The WebSocket client against our own listener, and against servers that break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from exec_server.errors import ConnectFailed
from exec_server.rpc.stream import MessageStream
from exec_server.transports import client_socket, framed_socket
from exec_server.transports.client_socket import ClientSocket, connect
from exec_server.transports.dial import tls_context
from exec_server.transports.frames import SENT_FRAME_BYTES, Event, Opcode
from exec_server.transports.websocket import Settings, WebSocketListener
from links import PATIENCE, frame_bytes, scaled
from peers import Peer, make_certificate, open_sockets, serving, upgrade_answer


class User:
    """Writes down what happens, and lets a test wait for it."""

    def __init__(self, opened: ClientSocket) -> None:
        self.socket = opened
        self.seen: list[tuple[Any, ...]] = []
        self._news = asyncio.Event()

    def _note(self, *what: Any) -> None:
        self.seen.append(what)
        self._news.set()

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        self._note("text" if is_text else "binary", message)

    def pong_received(self) -> None:
        self._note("pong")

    def sending_slow(self) -> None:
        self._note("slow")

    def sending_ready(self) -> None:
        self._note("ready")

    def socket_lost(self, reason: str) -> None:
        self._note("lost", reason)

    async def until(self, kind: str, count: int = 1) -> list[tuple[Any, ...]]:
        """Everything seen, once there are so many of a kind."""
        async with asyncio.timeout(scaled(PATIENCE)):
            while sum(what[0] == kind for what in self.seen) < count:
                self._news.clear()
                await self._news.wait()
        return self.seen


def _run(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test and see that it leaves no socket open."""

    async def checked() -> None:
        before = open_sockets()
        async with asyncio.timeout(scaled(2 * PATIENCE)):
            await body()
            while open_sockets() > before:
                await asyncio.sleep(0)

    uvloop.run(checked())


async def _open(port: int, target: str = "/relay?role=test", **options: Any) -> User:
    users: list[User] = []

    def make_user(opened: ClientSocket) -> User:
        users.append(User(opened))
        return users[0]

    opened = await connect(f"ws://127.0.0.1:{port}{target}", make_user, **options)
    assert opened is users[0].socket
    assert users[0].seen == []
    return users[0]


async def _end(user: User) -> None:
    user.socket.close(1000, "")
    await user.socket.gone
    await user.until("lost")


class _Echo:
    """The receiver of a listener that sends everything back."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream

    def message_received(self, message: bytes) -> None:
        self._stream.send(message)

    def sending_slow(self) -> None: ...

    def sending_ready(self) -> None: ...

    def link_lost(self) -> None: ...


@contextlib.asynccontextmanager
async def _listening() -> AsyncIterator[int]:
    bound = socket.create_server(("127.0.0.1", 0))
    listener = WebSocketListener(bound, Settings(_Echo))
    await listener.open()
    try:
        yield bound.getsockname()[1]
    finally:
        await listener.close()


# ---- opening --------------------------------------------------------------------------


def test_request_has_what_it_needs_and_nothing_else() -> None:
    heads: list[list[str]] = []

    async def handle(peer: Peer) -> None:
        heads.append(await peer.upgrade())
        await peer.answer_close()

    async def body() -> None:
        async with serving(handle) as port:
            user = await _open(port, headers=[("X-Request-ID", "req_1"), ("x-other", "é")])
            await _end(user)
            assert heads[0][:5] == [
                "GET /relay?role=test HTTP/1.1",
                f"Host: 127.0.0.1:{port}",
                "Connection: Upgrade",
                "Upgrade: websocket",
                "Sec-WebSocket-Version: 13",
            ]
            assert re.fullmatch(r"Sec-WebSocket-Key: [A-Za-z0-9+/]{22}==", heads[0][5])
            assert heads[0][6:] == ["X-Request-ID: req_1", "x-other: é"]

    _run(body)


def test_what_follows_the_answer_is_delivered_after_connect() -> None:
    following = frame_bytes(Opcode.BINARY, b"first", mask=False)
    following += frame_bytes(Opcode.TEXT, b"second", mask=False)

    async def handle(peer: Peer) -> None:
        await peer.upgrade(following)
        peer.send(Opcode.BINARY, b"third")
        await peer.answer_close()

    async def body() -> None:
        async with serving(handle) as port:
            user = await _open(port)  # sees that nothing was delivered yet
            seen = await user.until("binary", 2)
            assert seen == [("binary", b"first"), ("text", b"second"), ("binary", b"third")]
            await _end(user)

    _run(body)


def test_answer_may_come_in_pieces() -> None:
    async def handle(peer: Peer) -> None:
        request = await peer.read_head()
        answer = upgrade_answer(request, connection="keep-alive, upgrade", upgrade="WebSocket")
        for byte in answer:
            peer.writer.write(bytes([byte]))
            await peer.writer.drain()
            await asyncio.sleep(0)
        await peer.answer_close()

    async def body() -> None:
        async with serving(handle) as port:
            await _end(await _open(port))

    _run(body)


@pytest.mark.parametrize(
    ("answer", "text", "status"),
    [
        (b"HTTP/1.1 401 Nope\r\nX-Why:  because \r\n\r\n", "HTTP error: 401 Unauthorized", 401),
        (b"HTTP/1.0 503\r\nx-why: because\r\n\r\nbody", "HTTP error: 503 Service Unavailable", 503),
        (b"HTTP/1.1 302 Found\r\nx-why: because\r\n\r\n", "HTTP error: 302 Found", 302),
        (
            b"HTTP/1.1 599 Hm\r\nx-why: because\r\n\r\n",
            "HTTP error: 599 <unknown status code>",
            599,
        ),
    ],
)
def test_refusal_is_told_with_its_status(answer: bytes, text: str, status: int) -> None:
    async def handle(peer: Peer) -> None:
        await peer.read_head()
        peer.writer.write(answer)
        with contextlib.suppress(OSError):
            await peer.reader.read()

    async def body() -> None:
        async with serving(handle) as port:
            with pytest.raises(ConnectFailed, match=f"^{re.escape(text)}$") as failed:
                await _open(port)
            assert failed.value.status == status
            assert failed.value.headers == [("x-why", "because")]

    _run(body)


@pytest.mark.parametrize(
    ("replaced", "flaw"),
    [
        ({"sec_websocket_accept": "AAAA"}, 'key mismatch in "Sec-WebSocket-Accept" header'),
        ({"sec_websocket_accept": ""}, 'key mismatch in "Sec-WebSocket-Accept" header'),
        ({"upgrade": "h2c"}, 'no "Upgrade: websocket" header'),
        ({"upgrade": ""}, 'no "Upgrade: websocket" header'),
        ({"connection": "close"}, 'no "Connection: upgrade" header'),
        (
            {"sec_websocket_extensions": "permessage-deflate"},
            "the server chose an extension or a subprotocol that was not offered",
        ),
        (
            {"sec_websocket_protocol": "chat"},
            "the server chose an extension or a subprotocol that was not offered",
        ),
    ],
)
def test_upgrade_to_something_else_is_refused(replaced: dict[str, str], flaw: str) -> None:
    async def handle(peer: Peer) -> None:
        peer.writer.write(upgrade_answer(await peer.read_head(), **replaced))
        with contextlib.suppress(OSError):
            assert await peer.reader.read() == b""

    async def body() -> None:
        async with serving(handle) as port:
            with pytest.raises(ConnectFailed, match=f"^WebSocket protocol error: {flaw}$"):
                await _open(port)

    _run(body)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"hello\r\n\r\n", "WebSocket protocol error: the answer is not HTTP"),
        (b"HTTP/1.1 101\r\nno colon\r\n\r\n", "WebSocket protocol error: the answer is not HTTP"),
        (b"HTTP/1.1 101 Switching", "connection ended"),
        (b"", "connection ended"),
        (
            b"HTTP/1.1 101 X\r\nX: " + b"x" * 40_000,
            "WebSocket protocol error: the head of the answer is too long",
        ),
        (
            b"HTTP/1.1 101 X\r\nX: " + b"x" * 16_384 + b"\r\n\r\n",
            "WebSocket protocol error: the head of the answer is too long",
        ),
    ],
)
def test_useless_answer_is_refused(answer: bytes, text: str) -> None:
    async def handle(peer: Peer) -> None:
        await peer.read_head()
        peer.writer.write(answer)
        peer.writer.write_eof()
        with contextlib.suppress(OSError):
            await peer.reader.read()

    async def body() -> None:
        async with serving(handle) as port:
            with pytest.raises(ConnectFailed, match=f"^{text}$") as failed:
                await _open(port)
            assert failed.value.status is None

    _run(body)


def test_reset_during_the_upgrade_is_refused() -> None:
    async def handle(peer: Peer) -> None:
        await peer.reader.readexactly(1)  # the rest stays unread, so that closing resets
        peer.reset()

    async def body() -> None:
        async with serving(handle) as port:
            with pytest.raises(ConnectFailed, match=r"^IO error: .*reset|^connection ended$"):
                await _open(port)

    _run(body)


def test_texts_without_a_server() -> None:
    async def body() -> None:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            port = reserved.getsockname()[1]
            refused = r"^IO error: Connection refused \(os error 111\)$"
            with pytest.raises(ConnectFailed, match=refused):
                await _open(port)
        with pytest.raises(ConnectFailed, match=r"^URL error: relative URL without a base$"):
            await connect("relay", User)
        with pytest.raises(ConnectFailed, match=r"^the value of the header 'x' cannot be sent$"):
            await connect("ws://127.0.0.1:1", User, headers=[("x", "secret\r\nx: y")])
        with pytest.raises(ConnectFailed, match=r"cannot be sent$"):
            await connect("ws://127.0.0.1:1", User, headers=[("x y", "")])

    _run(body)


def test_cancelled_connect_leaves_no_socket() -> None:
    async def body() -> None:
        asked = asyncio.Event()

        async def handle(peer: Peer) -> None:
            await peer.read_head()
            asked.set()
            with contextlib.suppress(OSError):
                assert await peer.reader.read() == b""

        async with serving(handle) as port, asyncio.TaskGroup() as group:
            opening = group.create_task(_open(port))
            await asked.wait()
            opening.cancel()
            await asyncio.wait([opening])
            assert opening.cancelled()

    _run(body)


def test_user_that_cannot_be_made_leaves_no_socket() -> None:
    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        with contextlib.suppress(OSError):
            assert await peer.reader.read() == b""

    def make_user(opened: ClientSocket) -> User:
        raise RuntimeError("no user")

    async def body() -> None:
        async with serving(handle) as port:
            with pytest.raises(RuntimeError, match=r"^no user$"):
                await connect(f"ws://127.0.0.1:{port}", make_user)

    _run(body)


def test_tls(tmp_path: Path) -> None:
    roots, served = make_certificate(tmp_path, "localhost")

    async def handle(peer: Peer) -> None:
        await peer.upgrade(frame_bytes(Opcode.BINARY, b"hello", mask=False))
        while (event := await peer.receive()) is not None:
            if event.opcode is Opcode.CLOSE:
                peer.send(Opcode.CLOSE, event.payload)
                return
            peer.send(event.opcode, event.payload)

    async def body() -> None:
        async with serving(handle, tls=served) as port:
            users: list[User] = []

            def make_user(opened: ClientSocket) -> User:
                users.append(User(opened))
                return users[0]

            address = f"wss://localhost:{port}"
            await connect(address, make_user, tls=tls_context(roots))
            messages = [b"hello", b"small", b"m" * 20_000, b"l" * 300_000, b"tiny"]
            for message in messages[1:]:
                users[0].socket.send(message, is_text=False)
            seen = await users[0].until("binary", len(messages))
            assert [what[1] for what in seen if what[0] == "binary"] == messages
            await _end(users[0])
            with pytest.raises(ConnectFailed, match=r"^TLS error: certificate verify failed: self"):
                await connect(address, make_user)

    _run(body)


# ---- messages -------------------------------------------------------------------------


def test_messages_of_all_sizes_come_back_from_our_listener() -> None:
    sizes = [0, 1, 125, 126, 4_090, 4_096, 32_768, 65_535, 65_536, 100_000, SENT_FRAME_BYTES + 1]
    messages = [bytes([65 + size % 26]) * size for size in sizes]

    async def body() -> None:
        async with _listening() as port:
            user = await _open(port, "/")
            for message in messages:
                user.socket.send(message, is_text=True)
            await user.until("text", len(messages))
            received = [what[1] for what in user.seen if what[0] == "text"]
            assert received == messages
            await _end(user)

    _run(body)


def test_messages_keep_their_order_and_kind() -> None:
    """Short ones are written at once or gathered, large ones directly, in whatever mixture."""
    kinds = [(size, index % 3 == 0) for index, size in enumerate([5, 40_000, 6, 5_000, 7] * 40)]
    expected = [
        Event(Opcode.TEXT if is_text else Opcode.BINARY, b"%06d" % number * (size // 6 + 1))
        for number, (size, is_text) in enumerate(kinds)
    ]

    async def body() -> None:
        received: list[Event] = []

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            while (event := await peer.receive()) is not None:
                received.append(event)
                if event.opcode is Opcode.CLOSE:
                    peer.send(Opcode.CLOSE, event.payload)
                    return

        async with serving(handle) as port:
            user = await _open(port)
            for number, event in enumerate(expected):
                user.socket.send(event.payload, is_text=event.opcode is Opcode.TEXT)
                if number % 50 == 0:
                    await asyncio.sleep(0)
            await _end(user)
        assert received[:-1] == expected

    _run(body)


def test_every_frame_has_a_mask_of_its_own() -> None:
    async def body() -> None:
        got = asyncio.get_running_loop().create_future()
        count = 2_000  # more than one pool of random bytes

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            got.set_result(await peer.reader.readexactly(count * 10))
            await peer.answer_close()

        async with serving(handle) as port:
            user = await _open(port)
            for _ in range(count):
                user.socket.send(b"same", is_text=False)
            data = await got
            masks = [data[start + 2 : start + 6] for start in range(0, len(data), 10)]
            assert len(set(masks)) > count - 5
            await _end(user)

    _run(body)


def test_more_than_a_burst_arrives_in_order() -> None:
    count = 5 * framed_socket.BURST + 3
    following = b"".join(
        frame_bytes(Opcode.BINARY, b"%d" % number, mask=False) for number in range(count)
    )

    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        peer.writer.write(following)
        peer.writer.write_eof()
        await peer.reader.read()

    async def body() -> None:
        async with serving(handle) as port:
            user = await _open(port)
            seen = await user.until("lost")
            assert seen[:-1] == [("binary", b"%d" % number) for number in range(count)]

    _run(body)


def test_fragments_with_a_ping_between_them() -> None:
    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        peer.send(Opcode.TEXT, b"one ", fin=False)
        peer.send(Opcode.PING, b"between")
        peer.send(Opcode.CONTINUATION, "zwö".encode())
        assert await peer.receive() == Event(Opcode.PONG, b"between")
        await peer.answer_close()

    async def body() -> None:
        async with serving(handle) as port:
            user = await _open(port)
            assert await user.until("text") == [("text", "one zwö".encode())]
            await _end(user)

    _run(body)


def test_ping_brings_a_pong() -> None:
    async def body() -> None:
        async with _listening() as port:
            user = await _open(port, "/")
            user.socket.ping()
            assert await user.until("pong") == [("pong",)]
            await _end(user)

    _run(body)


def test_nothing_is_delivered_while_held() -> None:
    async def body() -> None:
        async with _listening() as port:
            user = await _open(port, "/")
            user.socket.send(b"before", is_text=True)
            await user.until("text")
            user.socket.hold(receiving=False)
            for number in range(200):
                user.socket.send(b"%d" % number, is_text=True)
            other = await _open(port, "/")
            other.socket.send(b"later", is_text=True)
            await other.until("text")  # by now the answers to the first have come as well
            assert user.seen == [("text", b"before")]
            user.socket.hold(receiving=True)
            seen = await user.until("text", 201)
            assert seen[1:] == [("text", b"%d" % number) for number in range(200)]
            await _end(user)
            await _end(other)

    _run(body)


def test_slow_peer_is_told_and_taken_back() -> None:
    async def body() -> None:
        go = asyncio.Event()

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await go.wait()
            peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
            await peer.answer_close()

        async with serving(handle) as port:
            user = await _open(port)
            sent = 0
            while ("slow",) not in user.seen:
                user.socket.send(b"x" * 60_000, is_text=False)
                sent += 60_000
                await asyncio.sleep(0)
            assert user.socket.unsent() > framed_socket.SEND_LOW_BYTES
            assert sent > framed_socket.SEND_HIGH_BYTES
            go.set()
            assert await user.until("ready") == [("slow",), ("ready",)]
            await _end(user)
            assert user.socket.unsent() == 0

    _run(body)


def test_pings_of_a_slow_peer_get_one_pong() -> None:
    async def body() -> None:
        pongs: list[Event] = []

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await stuck.wait()
            for number in range(3):
                peer.send(Opcode.PING, b"%d" % number)
            peer.send(Opcode.TEXT, b"pinged")
            await go.wait()
            peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
            while (event := await peer.receive()) is not None:
                if event.opcode is Opcode.PONG:
                    pongs.append(event)
                elif event.opcode is Opcode.CLOSE:
                    peer.send(Opcode.CLOSE)
                    return

        stuck, go = asyncio.Event(), asyncio.Event()
        async with serving(handle) as port:
            user = await _open(port)
            while ("slow",) not in user.seen:
                user.socket.send(b"x" * 60_000, is_text=False)
                await asyncio.sleep(0)
            stuck.set()
            await user.until("text")
            go.set()
            await user.until("ready")
            await _end(user)
        assert pongs == [Event(Opcode.PONG, b"2")]

    _run(body)


# ---- messages in parts ----------------------------------------------------------------


async def _parts(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


def test_parts_make_one_message_and_others_wait_behind() -> None:
    async def body() -> None:
        async with _listening() as port:
            user = await _open(port, "/")
            async with asyncio.TaskGroup() as group:
                group.create_task(user.socket.send_parts(_parts(b"1", b"2"), is_text=True))
                group.create_task(user.socket.send_parts(_parts(b"3", b"4"), is_text=True))
                group.create_task(user.socket.send_parts(_parts(), is_text=True))
                await user.until("slow")
                user.socket.send(b"behind", is_text=True)
                assert user.socket.unsent() >= 6
            await user.until("text", 4)
            texts = [what[1] for what in user.seen if what[0] == "text"]
            assert texts == [b"12", b"behind", b"34", b""]
            await _end(user)

    _run(body)


def test_parts_wait_for_a_slow_peer() -> None:
    async def body() -> None:
        go = asyncio.Event()
        whole = asyncio.get_running_loop().create_future()
        made = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal made
            for _ in range(1_000):
                made += 1
                yield b"x" * 60_000

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await go.wait()
            peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
            event = await peer.receive()
            assert event is not None
            whole.set_result(event.payload)
            await peer.answer_close()

        async with serving(handle) as port:
            user = await _open(port)
            async with asyncio.TaskGroup() as group:
                group.create_task(user.socket.send_parts(pieces(), is_text=False))
                await user.until("slow", 2)  # for the parts, then for the peer
                assert made < 1_000
                go.set()
            assert await whole == b"x" * 60_000_000
            await _end(user)

    _run(body)


def test_parts_end_with_the_connection() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 60_000

    async def body() -> None:
        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await gone.wait()

        gone = asyncio.Event()
        async with serving(handle) as port:
            user = await _open(port)
            async with asyncio.TaskGroup() as group:
                group.create_task(user.socket.send_parts(endless(), is_text=False))
                await user.until("slow", 2)
                user.socket.send(b"behind", is_text=False)
                user.socket.abort("enough")
            await user.socket.gone
            assert user.socket.unsent() == 0
            assert await user.until("lost") == [("slow",), ("slow",), ("lost", "enough")]
            gone.set()

    _run(body)


def test_cancelled_message_ends_the_connection() -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"half"
        started.set()
        await asyncio.Event().wait()

    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        with contextlib.suppress(OSError):
            await peer.reader.read()

    async def body() -> None:
        async with serving(handle) as port:
            user = await _open(port)
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(user.socket.send_parts(stuck(), is_text=True))
                await started.wait()
                sending.cancel()
            seen = await user.until("lost")
            assert seen[-1] == ("lost", "a message could not be completed")

    started = asyncio.Event()
    _run(body)


def test_message_that_cannot_be_completed_ends_the_connection() -> None:
    async def failing(*pieces: bytes) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        raise RuntimeError("no more")

    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        while (event := await peer.receive()) is not None:
            if event.opcode is Opcode.CLOSE:
                peer.send(Opcode.CLOSE, event.payload)
                return
            peer.send(event.opcode, event.payload)

    async def body() -> None:
        async with serving(handle) as port:
            user = await _open(port)
            with pytest.raises(RuntimeError, match=r"^no more$"):
                await user.socket.send_parts(failing(), is_text=True)
            user.socket.send(b"still alive", is_text=True)
            await user.until("text")
            with pytest.raises(RuntimeError, match=r"^no more$"):
                await user.socket.send_parts(failing(b"half"), is_text=True)
            seen = await user.until("lost")
            assert seen[-1] == ("lost", "a message could not be completed")

    _run(body)


# ---- the end --------------------------------------------------------------------------


async def _lost(handle: Callable[[Peer], Awaitable[object]], **options: Any) -> list[Any]:
    """What the user sees of a server that ends the connection; at the end exactly one loss."""
    async with serving(handle) as port:
        user = await _open(port, **options)
        await user.socket.gone
        seen = list(await user.until("lost"))
        user.socket.send(b"too late", is_text=True)
        user.socket.ping()
        user.socket.close(1000, "")
        user.socket.abort("again")
        await asyncio.sleep(0)
        assert user.seen == seen
        assert user.socket.is_closing
    return seen


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        (
            frame_bytes(Opcode.TEXT, b"masked"),
            1002,
            "frames of a server must not be masked",
        ),
        (frame_bytes(Opcode.TEXT, b"\xff", mask=False), 1007, "text message is not UTF-8"),
        (frame_bytes(Opcode.BINARY, b"x" * 1_001, mask=False), 1009, "message exceeds 1000 bytes"),
        (
            frame_bytes(Opcode.BINARY, b"x" * 900, mask=False, fin=False)
            + frame_bytes(Opcode.CONTINUATION, b"x" * 101, mask=False),
            1009,
            "message exceeds 1000 bytes",
        ),
        (frame_bytes(Opcode.TEXT, b"x", mask=False, rsv=4), 1002, "reserved bits are set"),
        (frame_bytes(Opcode.CONTINUATION, b"x", mask=False), 1002, "fragments out of order"),
        (frame_bytes(11, b"x", mask=False), 1002, "unknown opcode"),
    ],
)
def test_broken_rule_ends_the_connection(data: bytes, code: int, reason: str) -> None:
    async def body() -> None:
        said: list[Event | None] = []

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.send(Opcode.BINARY, b"x" * 1_000)
            peer.writer.write(data)
            peer.send(Opcode.TEXT, b"not delivered")
            said.append(await peer.receive())

        seen = await _lost(handle, message_bytes=1_000)
        assert seen == [("binary", b"x" * 1_000), ("lost", f"protocol violation: {reason}")]
        assert said == [Event(Opcode.CLOSE, code.to_bytes(2, "big") + reason.encode())]

    _run(body)


@pytest.mark.parametrize(
    ("payload", "answer", "reason"),
    [
        (b"", b"", "closed by the peer: no code"),
        (b"\x03\xe9bye", b"\x03\xe9", "closed by the peer: 1001 bye"),
        (b"\x0f\xa1", b"\x0f\xa1", "closed by the peer: 4001"),
        (b"\x03\xee", b"\x03\xea", "closed by the peer: 1006"),
    ],
)
def test_close_of_the_peer_is_answered(payload: bytes, answer: bytes, reason: str) -> None:
    async def body() -> None:
        said: list[Event | None] = []

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.send(Opcode.TEXT, b"before")
            peer.send(Opcode.CLOSE, payload)
            peer.send(Opcode.TEXT, b"after")
            said.extend([await peer.receive(), await peer.receive()])

        assert await _lost(handle) == [("text", b"before"), ("lost", reason)]
        assert said == [Event(Opcode.CLOSE, answer), None]

    _run(body)


def test_end_without_a_close_frame() -> None:
    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        peer.send(Opcode.TEXT, b"before")

    async def body() -> None:
        lost = ("lost", "connection ended without a close frame")
        assert await _lost(handle) == [("text", b"before"), lost]

    _run(body)


def test_reset_is_told_as_such() -> None:
    async def body() -> None:
        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            await peer.reader.readexactly(2)
            peer.reset()  # with bytes unread

        async with serving(handle) as port:
            user = await _open(port)
            user.socket.send(b"x" * 1_000, is_text=True)
            seen = await user.until("lost")
            await user.socket.gone
            assert len(seen) == 1
            assert re.search("reset|ended", seen[0][1])

    _run(body)


def test_own_close_is_a_handshake() -> None:
    async def body() -> None:
        said: list[Event | None] = []

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.send(Opcode.TEXT, b"seen")
            said.append(await peer.receive())
            peer.send(Opcode.TEXT, b"unseen")
            peer.send(Opcode.PING, b"unanswered")
            peer.send(Opcode.CLOSE, b"\x03\xe8")
            said.append(await peer.receive())

        async with serving(handle) as port:
            user = await _open(port)
            await user.until("text")
            user.socket.hold(receiving=False)  # its answer is read nevertheless
            user.socket.close(1000, "done")
            assert user.socket.is_closing
            assert user.seen == [("text", b"seen")]
            await user.socket.gone
            assert user.seen == [("text", b"seen"), ("lost", "closed: 1000 done")]
        assert said == [Event(Opcode.CLOSE, b"\x03\xe8done"), None]

    _run(body)


@pytest.mark.parametrize("half", [False, True])
def test_close_that_is_not_answered_ends_in_time(
    half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer neither answers nor hangs up; in one case it has stopped reading as well."""
    monkeypatch.setattr(client_socket, "CLOSE_SECONDS", 0.05)

    async def body() -> None:
        done = asyncio.Event()

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            if half:
                peer.writer.write_eof()
            await done.wait()

        async with serving(handle) as port:
            user = await _open(port)
            while user.socket.unsent() < 1_000_000 and not user.socket.is_closing:
                user.socket.send(b"x" * 60_000, is_text=False)
            if not half:
                user.socket.close(1000, "")
            await user.until("lost")
            await user.socket.gone
            done.set()

    _run(body)


def test_abort_says_nothing_to_the_peer() -> None:
    async def body() -> None:
        said: list[Event | None] = []

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            with contextlib.suppress(OSError):
                said.append(await peer.receive())

        async with serving(handle) as port:
            user = await _open(port)
            user.socket.abort("pong timeout")
            assert user.seen == []
            assert await user.until("lost") == [("lost", "pong timeout")]
            await user.socket.gone
        assert said in ([], [None])

    _run(body)


def test_loss_is_never_told_from_inside_send() -> None:
    async def body() -> None:
        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.reset()

        async with serving(handle) as port:
            user = await _open(port)
            user.socket.hold(receiving=False)  # so that only writing can find out
            while not user.socket.is_closing:
                before = list(user.seen)
                user.socket.send(b"x" * 60_000, is_text=False)
                assert user.seen == before or user.seen[-1] == ("slow",)
                await asyncio.sleep(0)
            await user.socket.gone
            await user.until("lost")
            assert sum(what[0] == "lost" for what in user.seen) == 1

    _run(body)
