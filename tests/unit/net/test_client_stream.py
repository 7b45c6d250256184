"""A message stream on a WebSocket that we opened: what it passes on, and how it notices death."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop
from tests.support.raw_links import DEFAULT_TIMEOUT, scaled
from tests.support.raw_servers import Peer, serving

from exec_server.errors import ConnectFailed
from exec_server.net import client_stream
from exec_server.net.client_stream import ClientStream, open_stream
from exec_server.net.stream import MessageStream
from exec_server.net.websocket.frames import Event, Opcode


class Receiver:
    """Writes down what a link brings."""

    def __init__(self, stream: MessageStream) -> None:
        self.stream = stream
        self.seen: list[Any] = []
        self.news = asyncio.Event()

    def _note(self, what: Any) -> None:
        self.seen.append(what)
        self.news.set()

    def message_received(self, message: bytes) -> None:
        self._note(message)

    def pause_writing(self) -> None:
        self._note("slow")

    def resume_writing(self) -> None:
        self._note("ready")

    def connection_lost(self) -> None:
        self._note("lost")

    async def until(self, what: Any) -> list[Any]:
        while what not in self.seen:
            self.news.clear()
            await self.news.wait()
        return self.seen


def _run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)):
            await body()

    uvloop.run(limited())


async def _open(port: int, **options: Any) -> tuple[ClientStream, Receiver]:
    made: list[Receiver] = []

    def receiver(stream: MessageStream) -> Receiver:
        made.append(Receiver(stream))
        return made[0]

    url = f"ws://127.0.0.1:{port}"
    stream = await open_stream(url, receiver, origin="message from test", **options)
    assert made[0].stream is stream
    assert stream.origin == "message from test"
    assert not stream.is_strict
    return stream, made[0]


async def _listen_only(peer: Peer) -> None:
    """Upgrade, and be silent until the client is gone."""
    await peer.upgrade()
    with contextlib.suppress(OSError):
        while await peer.reader.read(65_536):
            pass


def test_text_goes_out_and_any_kind_comes_in() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    async def body() -> None:
        said: list[Event | None] = []

        async def handle(peer: Peer) -> None:
            assert "Authorization: signed" in await peer.upgrade()
            said.extend([await peer.receive(), await peer.receive()])
            peer.send(Opcode.TEXT, b"text")
            peer.send(Opcode.BINARY, b"binary")
            said.append(await peer.answer_close())

        async with serving(handle) as port:
            stream, receiver = await _open(port, headers=[("Authorization", "signed")])
            stream.send(b"{}")
            await stream.send_parts(parts(), 7)
            assert stream.unsent() == 0
            await receiver.until(b"binary")
            stream.close(1000, "done")
            assert await stream.ended == "closed: 1000 done"
        assert receiver.seen == ["slow", "ready", b"text", b"binary", "lost"]
        assert said == [
            Event(Opcode.TEXT, b"{}"),
            Event(Opcode.TEXT, b"one two"),
            Event(Opcode.CLOSE, b"\x03\xe8done"),
        ]

    _run(body)


def test_loss_is_told_once_with_its_reason() -> None:
    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        peer.send(Opcode.CLOSE, b"\x03\xe9going")
        await peer.receive()

    async def body() -> None:
        async with serving(handle) as port:
            stream, receiver = await _open(port)
            assert await stream.ended == "closed by the peer: 1001 going"
            stream.close(1000, "")
            stream.probe()
            await asyncio.sleep(0)
            assert receiver.seen == ["lost"]

    _run(body)


def test_refusal_makes_no_receiver() -> None:
    async def handle(peer: Peer) -> None:
        await peer.read_head()
        peer.writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        with contextlib.suppress(OSError):
            await peer.reader.read()

    async def body() -> None:
        async with serving(handle) as port:
            made: list[MessageStream] = []

            def receiver(stream: MessageStream) -> Receiver:
                made.append(stream)
                return Receiver(stream)

            with pytest.raises(ConnectFailed, match=r"^HTTP error: 403 Forbidden$"):
                await open_stream(f"ws://127.0.0.1:{port}", receiver, origin="")
            assert made == []

    _run(body)


def test_held_messages_wait() -> None:
    async def handle(peer: Peer) -> None:
        await peer.upgrade()
        peer.send(Opcode.TEXT, b"first")
        assert await peer.receive() == Event(Opcode.TEXT, b"go on")
        peer.send(Opcode.TEXT, b"second")
        assert await peer.receive() == Event(Opcode.TEXT, b"more")
        await peer.answer_close()

    async def body() -> None:
        async with serving(handle) as port:
            stream, receiver = await _open(port)
            await receiver.until(b"first")
            stream.pause_reading()
            stream.send(b"go on")
            stream.send(b"more")
            await asyncio.sleep(0)
            assert receiver.seen == [b"first"]
            stream.resume_reading()
            await receiver.until(b"second")
            stream.close(1000, "")
            await stream.ended

    _run(body)


def test_silent_peer_is_given_up_when_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "PROBE_SECONDS", 0.02)

    async def body() -> None:
        async with serving(_listen_only) as port:
            stream, receiver = await _open(port)
            stream.probe()
            stream.probe()
            reason = await stream.ended
            assert reason == "another connection asks for its session and it is silent"
            assert receiver.seen == ["lost"]

    _run(body)


def test_living_peer_survives_a_probe_even_if_it_is_held() -> None:
    async def body() -> None:
        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            assert await peer.receive() == Event(Opcode.PING, b"")
            peer.send(Opcode.PONG)
            peer.send(Opcode.TEXT, b"later")
            await peer.answer_close()

        async with serving(handle) as port:
            stream, receiver = await _open(port)
            stream.pause_reading()
            stream.probe()
            stream.resume_reading()
            stream.pause_reading()
            while stream._probe.is_active:
                await asyncio.sleep(0)
            assert receiver.seen == []  # the pong was heard, the message waits again
            stream.resume_reading()
            await receiver.until(b"later")
            stream.close(1000, "")
            await stream.ended

    _run(body)


def test_silent_peer_is_given_up_after_a_ping() -> None:
    async def body() -> None:
        async with serving(_listen_only) as port:
            stream, receiver = await _open(port, ping_seconds=0.02)
            assert await stream.ended == "no answer to a ping"
            assert receiver.seen == ["lost"]

    _run(body)


def test_peer_that_answers_pings_stays() -> None:
    async def body() -> None:
        pings = 0

        async def handle(peer: Peer) -> None:
            nonlocal pings
            await peer.upgrade()
            while pings < 5:
                assert await peer.receive() == Event(Opcode.PING, b"")
                pings += 1
                peer.send(Opcode.PONG)
            peer.send(Opcode.TEXT, b"enough")
            await peer.answer_close()

        async with serving(handle) as port:
            stream, receiver = await _open(port, ping_seconds=0.05)
            await receiver.until(b"enough")
            assert pings == 5
            assert not stream.ended.done()
            stream.close(1000, "")
            await stream.ended

    _run(body)


def test_link_that_is_held_is_not_pinged() -> None:
    async def body() -> None:
        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            # A link that were pinged would be given up before this, and end without a message.
            assert await peer.receive() == Event(Opcode.TEXT, b"still here")
            await peer.answer_close()

        async with serving(handle) as port:
            stream, _ = await _open(port, ping_seconds=0.01)
            stream.pause_reading()
            loop = asyncio.get_running_loop()
            passed = loop.create_future()
            loop.call_later(0.05, passed.set_result, None)
            await passed
            assert not stream.ended.done()
            stream.send(b"still here")
            stream.close(1000, "")
            await stream.ended

    _run(body)
