"""The WebSocket client sends and receives messages, whole and in parts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest
from tests.support.raw_links import frame_bytes
from tests.support.raw_servers import Peer, serving
from tests.support.websocket_server import end_client, listening, open_client, run_checked

from exec_server.net import inbox
from exec_server.net.websocket import socket as websocket_socket
from exec_server.net.websocket.frames import SENT_FRAME_BYTES, Event, Opcode


def test_messages_of_all_sizes_come_back_from_our_listener() -> None:
    sizes = [0, 1, 125, 126, 4_090, 4_096, 32_768, 65_535, 65_536, 100_000, SENT_FRAME_BYTES + 1]
    messages = [bytes([65 + size % 26]) * size for size in sizes]

    async def body() -> None:
        async with listening() as port:
            user = await open_client(port, "/")
            for message in messages:
                user.socket.send(message, is_text=True)
            await user.until("text", len(messages))
            received = [what[1] for what in user.seen if what[0] == "text"]
            assert received == messages
            await end_client(user)

    run_checked(body)


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
            user = await open_client(port)
            for number, event in enumerate(expected):
                user.socket.send(event.payload, is_text=event.opcode is Opcode.TEXT)
                if number % 50 == 0:
                    await asyncio.sleep(0)
            await end_client(user)
        assert received[:-1] == expected

    run_checked(body)


def test_binary_messages_in_two_pieces() -> None:
    sizes = [0, 5, 40_000, 70_001, SENT_FRAME_BYTES, SENT_FRAME_BYTES + 1, 5]
    messages = [(b"h" * (index + 1), os.urandom(size)) for index, size in enumerate(sizes)]

    async def body() -> None:
        received: list[bytes] = []

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            while len(received) < len(messages):
                event = await peer.receive()
                assert event is not None
                assert event.opcode is Opcode.BINARY
                received.append(event.payload)
            await peer.answer_close()

        async with serving(handle) as port:
            user = await open_client(port)
            for head, data in messages:
                user.socket.send_binary(head, data)
            await end_client(user)
        assert received == [head + data for head, data in messages]

    run_checked(body)


def test_every_frame_has_a_mask_of_its_own() -> None:
    async def body() -> None:
        got = asyncio.get_running_loop().create_future()
        count = 2_000  # more than one pool of random bytes

        async def handle(peer: Peer) -> None:
            await peer.upgrade()
            got.set_result(await peer.reader.readexactly(count * 10))
            await peer.answer_close()

        async with serving(handle) as port:
            user = await open_client(port)
            for _ in range(count):
                user.socket.send(b"same", is_text=False)
            data = await got
            masks = [data[start + 2 : start + 6] for start in range(0, len(data), 10)]
            assert len(set(masks)) > count - 5
            await end_client(user)

    run_checked(body)


def test_more_than_a_burst_arrives_in_order() -> None:
    count = 5 * inbox.BURST + 3
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
            user = await open_client(port)
            seen = await user.until("lost")
            assert seen[:-1] == [("binary", b"%d" % number) for number in range(count)]

    run_checked(body)


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
            user = await open_client(port)
            assert await user.until("text") == [("text", "one zwö".encode())]
            await end_client(user)

    run_checked(body)


def test_ping_brings_a_pong() -> None:
    async def body() -> None:
        async with listening() as port:
            user = await open_client(port, "/")
            user.socket.ping()
            assert await user.until("pong") == [("pong",)]
            await end_client(user)

    run_checked(body)


def test_nothing_is_delivered_while_held() -> None:
    async def body() -> None:
        async with listening() as port:
            user = await open_client(port, "/")
            user.socket.send(b"before", is_text=True)
            await user.until("text")
            user.socket.pause_reading()
            for number in range(200):
                user.socket.send(b"%d" % number, is_text=True)
            other = await open_client(port, "/")
            other.socket.send(b"later", is_text=True)
            await other.until("text")  # by now the answers to the first have come as well
            assert user.seen == [("text", b"before")]
            user.socket.resume_reading()
            seen = await user.until("text", 201)
            assert seen[1:] == [("text", b"%d" % number) for number in range(200)]
            await end_client(user)
            await end_client(other)

    run_checked(body)


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
            user = await open_client(port)
            sent = 0
            while ("slow",) not in user.seen:
                user.socket.send(b"x" * 60_000, is_text=False)
                sent += 60_000
                await asyncio.sleep(0)
            assert user.socket.unsent() > websocket_socket.SEND_LOW_BYTES
            assert sent > websocket_socket.SEND_HIGH_BYTES
            go.set()
            assert await user.until("ready") == [("slow",), ("ready",)]
            await end_client(user)
            assert user.socket.unsent() == 0

    run_checked(body)


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
            user = await open_client(port)
            while ("slow",) not in user.seen:
                user.socket.send(b"x" * 60_000, is_text=False)
                await asyncio.sleep(0)
            stuck.set()
            await user.until("text")
            go.set()
            await user.until("ready")
            await end_client(user)
        assert pongs == [Event(Opcode.PONG, b"2")]

    run_checked(body)


# ---- messages in parts ----------------------------------------------------------------


async def _parts(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


def test_parts_make_one_message_and_others_wait_behind() -> None:
    async def body() -> None:
        async with listening() as port:
            user = await open_client(port, "/")
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
            await end_client(user)

    run_checked(body)


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
            user = await open_client(port)
            async with asyncio.TaskGroup() as group:
                group.create_task(user.socket.send_parts(pieces(), is_text=False))
                await user.until("slow", 2)  # for the parts, then for the peer
                assert made < 1_000
                go.set()
            assert await whole == b"x" * 60_000_000
            await end_client(user)

    run_checked(body)


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
            user = await open_client(port)
            async with asyncio.TaskGroup() as group:
                group.create_task(user.socket.send_parts(endless(), is_text=False))
                await user.until("slow", 2)
                user.socket.send(b"behind", is_text=False)
                user.socket.abort("enough")
            await user.socket.closed
            assert user.socket.unsent() == 0
            assert await user.until("lost") == [("slow",), ("slow",), ("lost", "enough")]
            gone.set()

    run_checked(body)


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
            user = await open_client(port)
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(user.socket.send_parts(stuck(), is_text=True))
                await started.wait()
                sending.cancel()
            seen = await user.until("lost")
            assert seen[-1] == ("lost", "a message could not be completed")

    started = asyncio.Event()
    run_checked(body)


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
            user = await open_client(port)
            with pytest.raises(RuntimeError, match=r"^no more$"):
                await user.socket.send_parts(failing(), is_text=True)
            user.socket.send(b"still alive", is_text=True)
            await user.until("text")
            with pytest.raises(RuntimeError, match=r"^no more$"):
                await user.socket.send_parts(failing(b"half"), is_text=True)
            seen = await user.until("lost")
            assert seen[-1] == ("lost", "a message could not be completed")

    run_checked(body)
