"""The WebSocket client ends: closed by either side, broken off, or lost."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support.raw_links import frame_bytes
from tests.support.raw_servers import Peer, serving
from tests.support.websocket_server import open_client, run_checked

from exec_server.net.websocket import socket as websocket_socket
from exec_server.net.websocket.frames import Event, Opcode


async def _lost(handle: Callable[[Peer], Awaitable[object]], **options: Any) -> list[Any]:
    """What the user sees of a server that ends the connection; at the end exactly one loss."""
    async with serving(handle) as port:
        user = await open_client(port, **options)
        await user.socket.closed
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
        (frame_bytes(Opcode.TEXT, b"masked"), 1002, "frames of a server must not be masked"),
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
    ids=["masked", "not UTF-8", "long frame", "long fragments", "rsv", "fragment", "opcode"],
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

    run_checked(body)


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

    run_checked(body)


def test_end_without_a_close_frame() -> None:
    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        peer.send(Opcode.TEXT, b"before")

    async def body() -> None:
        lost = ("lost", "connection ended without a close frame")
        assert await _lost(handle) == [("text", b"before"), lost]

    run_checked(body)


def test_reset_is_told_as_such() -> None:
    async def body() -> None:
        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            await peer.reader.readexactly(2)
            peer.reset()  # with bytes unread

        async with serving(handle) as port:
            user = await open_client(port)
            user.socket.send(b"x" * 1_000, is_text=True)
            seen = await user.until("lost")
            await user.socket.closed
            assert len(seen) == 1
            assert re.search("reset|ended", seen[0][1])

    run_checked(body)


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
            user = await open_client(port)
            await user.until("text")
            user.socket.pause_reading()  # its answer is read nevertheless
            user.socket.close(1000, "done")
            assert user.socket.is_closing
            assert user.seen == [("text", b"seen")]
            await user.socket.closed
            assert user.seen == [("text", b"seen"), ("lost", "closed: 1000 done")]
        assert said == [Event(Opcode.CLOSE, b"\x03\xe8done"), None]

    run_checked(body)


@pytest.mark.parametrize("half", [False, True])
def test_close_that_is_not_answered_ends_in_time(
    half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer neither answers nor hangs up; in one case it has stopped reading as well."""
    monkeypatch.setattr(websocket_socket, "CLOSE_SECONDS", 0.05)

    async def body() -> None:
        done = asyncio.Event()

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            if half:
                peer.writer.write_eof()
            await done.wait()

        async with serving(handle) as port:
            user = await open_client(port)
            while user.socket.unsent() < 1_000_000 and not user.socket.is_closing:
                user.socket.send(b"x" * 60_000, is_text=False)
            if not half:
                user.socket.close(1000, "")
            await user.until("lost")
            await user.socket.closed
            done.set()

    run_checked(body)


def test_abort_says_nothing_to_the_peer() -> None:
    async def body() -> None:
        said: list[Event | None] = []

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            with contextlib.suppress(OSError):
                said.append(await peer.receive())

        async with serving(handle) as port:
            user = await open_client(port)
            user.socket.abort("pong timeout")
            assert user.seen == []
            assert await user.until("lost") == [("lost", "pong timeout")]
            await user.socket.closed
        assert said in ([], [None])

    run_checked(body)


def test_loss_is_never_told_from_inside_send() -> None:
    async def body() -> None:
        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            peer.reset()

        async with serving(handle) as port:
            user = await open_client(port)
            user.socket.pause_reading()  # so that only writing can find out
            while not user.socket.is_closing:
                before = list(user.seen)
                user.socket.send(b"x" * 60_000, is_text=False)
                assert user.seen == before or user.seen[-1] == ("slow",)
                await asyncio.sleep(0)
            await user.socket.closed
            await user.until("lost")
            assert sum(what[0] == "lost" for what in user.seen) == 1

    run_checked(body)
