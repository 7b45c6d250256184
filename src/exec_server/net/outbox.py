"""Outbox: keeps messages in order while one of them is sent in parts. It has no socket.

Messages sent meanwhile wait behind it, and their producer is paused.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable
from typing import Protocol


class Producer(Protocol):
    """The user of a stream, as far as sending is concerned."""

    def pause_writing(self) -> None:
        """The send buffer is full: stop producing output."""

    def resume_writing(self) -> None:
        """The send buffer has drained."""


class PartWriter(Protocol):
    """Writes one message in parts."""

    def write(self, part: bytes) -> None: ...

    def finish(self) -> None: ...


class _State(enum.Enum):
    IDLE = enum.auto()  # messages are written at once
    STREAMING = enum.auto()  # a message in parts is being written
    CLOSED = enum.auto()  # messages are dropped


class Outbox:
    """Messages of one link, in order; `break_off` ends the link after half a message."""

    __slots__ = (
        "_break_off",
        "_lock",
        "_queue",
        "_state",
        "_writable",
        "is_full",
        "is_idle",
        "producer",
        "queued_bytes",
    )

    def __init__(self, break_off: Callable[[], None]) -> None:
        self._break_off = break_off
        self._state = _State.IDLE
        self._lock = asyncio.Lock()  # one message in parts at a time
        self._queue: list[tuple[bytes, Callable[[bytes], None]]] = []
        self._writable: asyncio.Future[None] | None = None
        self.is_idle = True  # an attribute, because the hot path reads it for each message
        self.is_full = False  # the transport's buffer is above its high mark
        self.queued_bytes = 0  # of the messages behind the one in parts
        self.producer: Producer | None = None

    def send(self, message: bytes, write: Callable[[bytes], None]) -> None:
        """Write a message, now or after the one that is being sent in parts."""
        if self._state is _State.STREAMING:
            self._queue.append((message, write))
            self.queued_bytes += len(message)
        elif self._state is _State.IDLE:
            write(message)

    async def send_parts(self, parts: AsyncIterator[bytes], writer: PartWriter) -> None:
        """Send one message in parts, after other such ones; no error if the link ends.

        Cancellation and exceptions of `parts` end the link if a part was written before.
        """
        async with self._lock:
            if self._state is _State.CLOSED:
                return
            self._set_state(_State.STREAMING)
            self._pause_producer()
            is_begun = False
            try:
                async for part in parts:
                    await self._wait_writable()
                    if self._is_closed():
                        return
                    is_begun = True
                    writer.write(part)
                if not self._is_closed():
                    writer.finish()
            except BaseException:
                if is_begun:
                    self._break_off()
                raise
            finally:
                self._send_queued()

    def _send_queued(self) -> None:
        if self._state is _State.CLOSED:
            return
        self._set_state(_State.IDLE)
        queue, self._queue = self._queue, []
        self.queued_bytes = 0
        for message, write in queue:
            self.send(message, write)
        self._resume_producer()

    def pause_writing(self) -> None:
        """The transport's buffer is above its high mark."""
        self.is_full = True
        self._pause_producer()

    def resume_writing(self) -> None:
        """The transport's buffer is below its low mark."""
        self.is_full = False
        self._wake()
        self._resume_producer()

    def close(self) -> None:
        """Drop the messages that wait, and every later one; stop the message in parts."""
        self._set_state(_State.CLOSED)
        self._queue.clear()
        self.queued_bytes = 0
        self._wake()

    def _set_state(self, state: _State) -> None:
        self._state = state
        self.is_idle = state is _State.IDLE

    def _is_closed(self) -> bool:
        return self._state is _State.CLOSED

    def _pause_producer(self) -> None:
        if self.producer is not None and self._state is not _State.CLOSED:
            self.producer.pause_writing()

    def _resume_producer(self) -> None:
        if self.producer is not None and self._state is _State.IDLE and not self.is_full:
            self.producer.resume_writing()

    async def _wait_writable(self) -> None:
        while self.is_full and self._state is not _State.CLOSED:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    def _wake(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
