"""Messages in order: whole ones, one in parts, and those that wait behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from exec_server.net.outbox import Outbox


class Link:
    """Both neighbours of an outbox: its producer, and the writer below it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.news: list[str] = []
        self.outbox = Outbox(self._break_off)
        self.outbox.producer = self

    def _break_off(self) -> None:
        self.news.append("broken off")
        self.outbox.close()

    def pause_writing(self) -> None:
        self.news.append("pause")

    def resume_writing(self) -> None:
        self.news.append("resume")

    def send(self, message: bytes) -> None:
        self.outbox.send(message, self.write)

    def write(self, part: bytes) -> None:
        self.written.append(part)

    def finish(self) -> None:
        self.written.append(b".")

    async def send_parts(self, parts: AsyncIterator[bytes]) -> None:
        await self.outbox.send_parts(parts, self)


def _run(body: Callable[[Link], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(10):
            await body(Link())

    asyncio.run(run())


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _parts(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _stuck(first: bytes) -> AsyncIterator[bytes]:
    yield first
    await asyncio.Event().wait()


def test_whole_messages_are_written_at_once() -> None:
    async def body(link: Link) -> None:
        link.send(b"one")
        link.send(b"two")
        assert (link.written, link.news) == ([b"one", b"two"], [])
        assert link.outbox.is_idle

    _run(body)


def test_messages_wait_behind_the_one_in_parts() -> None:
    async def body(link: Link) -> None:
        go = asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            yield b"1"
            await go.wait()
            yield b"2"

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(link.send_parts(parts()))
            await _settle()
            link.send(b"behind")
            assert not link.outbox.is_idle
            assert link.outbox.queued_bytes == 6
            assert (link.written, link.news) == ([b"1"], ["pause"])
            go.set()
        assert (link.written, link.news) == ([b"1", b"2", b".", b"behind"], ["pause", "resume"])
        assert link.outbox.queued_bytes == 0
        assert link.outbox.is_idle

    _run(body)


def test_two_messages_in_parts_are_sent_one_after_the_other() -> None:
    async def body(link: Link) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(link.send_parts(_parts(b"1", b"2")))
            tasks.create_task(link.send_parts(_parts(b"3")))
            tasks.create_task(link.send_parts(_parts()))
        assert link.written == [b"1", b"2", b".", b"3", b".", b"."]

    _run(body)


def test_parts_wait_while_the_transport_is_full() -> None:
    async def body(link: Link) -> None:
        link.outbox.pause_writing()
        assert link.outbox.is_full
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(link.send_parts(_parts(b"1", b"2")))
            await _settle()
            assert (link.written, link.news) == ([], ["pause", "pause"])
            link.outbox.resume_writing()
            link.outbox.resume_writing()  # the waiting task has not run yet
            assert link.news == ["pause", "pause"]  # not before the message is complete
        assert link.written == [b"1", b"2", b"."]
        assert link.news == ["pause", "pause", "resume"]

    _run(body)


def test_producer_is_not_resumed_after_the_parts_while_the_transport_is_full() -> None:
    async def body(link: Link) -> None:
        async def parts() -> AsyncIterator[bytes]:
            yield b"1"
            link.outbox.pause_writing()

        await link.send_parts(parts())
        assert link.news == ["pause", "pause"]
        link.outbox.resume_writing()
        assert link.news == ["pause", "pause", "resume"]

    _run(body)


def test_outbox_needs_no_producer() -> None:
    async def body(link: Link) -> None:
        link.outbox.producer = None
        link.outbox.pause_writing()
        link.outbox.resume_writing()
        await link.send_parts(_parts(b"1"))
        assert (link.written, link.news) == ([b"1", b"."], [])

    _run(body)


def test_message_that_fails_before_its_first_part_harms_nothing() -> None:
    async def body(link: Link) -> None:
        async def parts() -> AsyncIterator[bytes]:
            raise RuntimeError("no such file")
            yield b""

        with pytest.raises(RuntimeError, match=r"^no such file$"):
            await link.send_parts(parts())
        link.send(b"next")
        assert (link.written, link.news) == ([b"next"], ["pause", "resume"])

    _run(body)


def test_message_that_breaks_off_half_way_ends_the_link() -> None:
    async def body(link: Link) -> None:
        async def parts() -> AsyncIterator[bytes]:
            yield b"half"
            link.send(b"behind")
            raise RuntimeError("no more")

        with pytest.raises(RuntimeError, match=r"^no more$"):
            await link.send_parts(parts())
        link.send(b"next")
        assert (link.written, link.news) == ([b"half"], ["pause", "broken off"])

    _run(body)


def test_part_that_cannot_be_written_ends_the_link() -> None:
    async def body(link: Link) -> None:
        class Failing:
            def write(self, part: bytes) -> None:
                raise RuntimeError("half of it")

            def finish(self) -> None: ...

        with pytest.raises(RuntimeError, match=r"^half of it$"):
            await link.outbox.send_parts(_parts(b"1"), Failing())
        assert link.news == ["pause", "broken off"]

    _run(body)


def test_cancelled_message_ends_the_link() -> None:
    async def body(link: Link) -> None:
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(link.send_parts(_stuck(b"half")))
            await _settle()
            sending.cancel()
        assert (link.written, link.news) == ([b"half"], ["pause", "broken off"])

    _run(body)


def test_closed_outbox_stops_the_parts_and_drops_everything() -> None:
    async def body(link: Link) -> None:
        async with asyncio.TaskGroup() as tasks:
            link.outbox.pause_writing()
            tasks.create_task(link.send_parts(_parts(b"1", b"2")))
            tasks.create_task(link.send_parts(_parts(b"3")))
            await _settle()
            link.send(b"behind")
            link.outbox.close()
            link.outbox.close()
            assert link.outbox.queued_bytes == 0
        link.send(b"late")
        link.outbox.pause_writing()
        link.outbox.resume_writing()
        assert (link.written, link.news) == ([], ["pause", "pause"])

    _run(body)


def test_message_whose_last_part_closes_the_link_is_not_finished() -> None:
    async def body(link: Link) -> None:
        async def parts() -> AsyncIterator[bytes]:
            yield b"1"
            link.outbox.close()

        await link.send_parts(parts())
        assert link.written == [b"1"]

    _run(body)
