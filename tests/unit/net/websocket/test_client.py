"""The WebSocket client opens connections, and refuses servers that break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from pathlib import Path

import pytest
from tests.support.raw_links import frame_bytes
from tests.support.raw_servers import Peer, make_certificate, serving, upgrade_answer
from tests.support.websocket_server import User, end_client, open_client, run_checked

from exec_server.errors import CertificateRejected, ConnectFailed
from exec_server.net.client_tls import tls_context
from exec_server.net.websocket.client import ClientSocket, connect
from exec_server.net.websocket.frames import Opcode


def test_request_has_what_it_needs_and_nothing_else() -> None:
    heads: list[list[str]] = []

    async def handle(peer: Peer) -> None:
        heads.append(await peer.upgrade())
        await peer.answer_close()

    async def body() -> None:
        async with serving(handle) as port:
            user = await open_client(port, headers=[("X-Request-ID", "req_1"), ("x-other", "é")])
            await end_client(user)
            assert heads[0][:5] == [
                "GET /relay?role=test HTTP/1.1",
                f"Host: 127.0.0.1:{port}",
                "Connection: Upgrade",
                "Upgrade: websocket",
                "Sec-WebSocket-Version: 13",
            ]
            assert re.fullmatch(r"Sec-WebSocket-Key: [A-Za-z0-9+/]{22}==", heads[0][5])
            assert heads[0][6:] == ["X-Request-ID: req_1", "x-other: é"]

    run_checked(body)


def test_what_follows_the_answer_is_delivered_after_connect() -> None:
    following = frame_bytes(Opcode.BINARY, b"first", mask=False)
    following += frame_bytes(Opcode.TEXT, b"second", mask=False)

    async def handle(peer: Peer) -> None:
        await peer.upgrade(following)
        peer.send(Opcode.BINARY, b"third")
        await peer.answer_close()

    async def body() -> None:
        async with serving(handle) as port:
            user = await open_client(port)  # sees that nothing was delivered yet
            seen = await user.until("binary", 2)
            assert seen == [("binary", b"first"), ("text", b"second"), ("binary", b"third")]
            await end_client(user)

    run_checked(body)


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
            await end_client(await open_client(port))

    run_checked(body)


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
                await open_client(port)
            assert failed.value.status == status
            assert failed.value.headers == [("x-why", "because")]

    run_checked(body)


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
                await open_client(port)

    run_checked(body)


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
                await open_client(port)
            assert failed.value.status is None

    run_checked(body)


def test_reset_during_the_upgrade_is_refused() -> None:
    async def handle(peer: Peer) -> None:
        await peer.reader.readexactly(1)  # the rest stays unread, so that closing resets
        peer.reset()

    async def body() -> None:
        async with serving(handle) as port:
            with pytest.raises(ConnectFailed, match=r"^IO error: .*reset|^connection ended$"):
                await open_client(port)

    run_checked(body)


def test_texts_without_a_server() -> None:
    async def body() -> None:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            port = reserved.getsockname()[1]
            refused = r"^IO error: Connection refused \(os error 111\)$"
            with pytest.raises(ConnectFailed, match=refused):
                await open_client(port)
        with pytest.raises(ConnectFailed, match=r"^URL error: relative URL without a base$"):
            await connect("relay", User)
        with pytest.raises(ConnectFailed, match=r"^the value of the header 'x' cannot be sent$"):
            await connect("ws://127.0.0.1:1", User, headers=[("x", "secret\r\nx: y")])
        with pytest.raises(ConnectFailed, match=r"cannot be sent$"):
            await connect("ws://127.0.0.1:1", User, headers=[("x y", "")])

    run_checked(body)


def test_cancelled_connect_leaves_no_socket() -> None:
    async def body() -> None:
        asked = asyncio.Event()

        async def handle(peer: Peer) -> None:
            await peer.read_head()
            asked.set()
            with contextlib.suppress(OSError):
                assert await peer.reader.read() == b""

        async with serving(handle) as port, asyncio.TaskGroup() as group:
            opening = group.create_task(open_client(port))
            await asked.wait()
            opening.cancel()
            await asyncio.wait([opening])
            assert opening.cancelled()

    run_checked(body)


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

    run_checked(body)


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
            await end_client(users[0])
            with pytest.raises(ConnectFailed, match=r"^TLS error: certificate verify failed: self"):
                await connect(address, make_user)

    run_checked(body)


def test_the_other_kind_of_server_is_named(tmp_path: Path) -> None:
    """A server without TLS answers in the clear, one with TLS answers in the clear by an alert."""
    roots, _ = make_certificate(tmp_path, "localhost")

    async def answer(peer: Peer) -> None:
        hello = await peer.reader.read(65_536)
        if hello.startswith(b"\x16\x03"):
            peer.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        else:
            peer.writer.write(b"\x15\x03\x03\r\n\r\n")

    async def body() -> None:
        async with serving(answer) as port:
            with pytest.raises(ConnectFailed, match="does not speak TLS at this port"):
                await connect(f"wss://localhost:{port}", User, tls=tls_context(roots))
            with pytest.raises(ConnectFailed, match="the server speaks TLS: use wss://"):
                await connect(f"ws://127.0.0.1:{port}", User)

    run_checked(body)


def test_a_certificate_for_another_host_is_rejected(tmp_path: Path) -> None:
    roots, served = make_certificate(tmp_path, "other.test")

    async def handle(peer: Peer) -> None:
        with contextlib.suppress(OSError):
            assert await peer.reader.read() == b""

    async def body() -> None:
        async with serving(handle, tls=served) as port:
            with pytest.raises(CertificateRejected, match="not valid for 'localhost'"):
                await connect(f"wss://localhost:{port}", User, tls=tls_context(roots))

    run_checked(body)


def test_frames_that_complete_no_message_are_told() -> None:
    told: list[str] = []

    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        await peer.receive()
        peer.send(Opcode.PING)
        peer.send(Opcode.PONG)
        peer.send(Opcode.TEXT, fin=False)
        peer.send(Opcode.CONTINUATION, b"one")
        await peer.answer_close()

    async def body() -> None:
        async with serving(handle) as port:
            user = await open_client(port)
            user.socket.on_useless = lambda: told.append("useless")
            user.socket.send(b"begin", is_text=True)
            await user.until("text")
            await end_client(user)

    run_checked(body)
    assert told == ["useless"] * 3
