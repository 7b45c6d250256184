"""What a client writes to a process, queued until the child reads it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

# As many chunks as the reference queues; a further write waits for room.
QUEUED_CHUNKS = 128
# The same queue in bytes: large chunks would otherwise hold gigabytes for a child that sleeps.
QUEUED_BYTES = 1_048_576


class StdinQueue:
    """Writes chunks to a descriptor in order and completely, without ever blocking the loop.

    The descriptor is borrowed: its owner closes it, after `close`. `on_end` is called when that is
    due because the input has ended and all of it is written. Chunks that wait for room are bounded
    by the requests that a connection may have under way.
    """

    __slots__ = (
        "_chunks",
        "_descriptor",
        "_end",
        "_loop",
        "_on_end",
        "_open",
        "_queued_bytes",
        "_waiting",
        "_writing",
    )

    def __init__(self, descriptor: int, on_end: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_end = on_end
        # The turn of the end of the input, once that is asked for; it stands among `_waiting`.
        self._end: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._waiting: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._open = True
        self._writing = False

    def offer(self, data: bytes) -> asyncio.Future[None] | None:
        """Queue a chunk, or return a future that is done once it could be queued.

        A cancelled future takes its chunk back. After `close` chunks vanish.
        """
        if not self._open or not data:
            return None
        if self._waiting or not self._has_room():
            turn: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append((data, turn))
            return turn
        self._put(data)
        if not self._writing:
            self._write()
        return None

    @property
    def has_ended(self) -> bool:
        """Whether the end of the input is queued or waits for its turn."""
        return self._end is not None and not self._end.cancelled()

    def end(self) -> asyncio.Future[None] | None:
        """Queue the end of the input behind all chunks, or return a future as `offer` does.

        Nothing may be offered while `has_ended`. A second end is the same as the first.
        """
        if self._end is None or self._end.cancelled():
            self._end = self._loop.create_future()
            self._waiting.append((b"", self._end))
            self._admit()
            if self._is_over():
                self._on_end()
        return None if self._end.done() else self._end

    def close(self) -> None:
        """Drop what is queued."""
        self._open = False
        self._chunks.clear()
        self._queued_bytes = 0
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._descriptor)
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)

    def _is_over(self) -> bool:
        """Whether nothing is left to write, and nothing will come."""
        return not self._chunks and self.has_ended and self._end is not None and self._end.done()

    def _has_room(self) -> bool:
        return len(self._chunks) < QUEUED_CHUNKS and self._queued_bytes < QUEUED_BYTES

    def _put(self, data: bytes) -> None:
        self._chunks.append(memoryview(data))
        self._queued_bytes += len(data)

    def _write(self) -> None:
        try:
            while self._chunks:
                chunk = self._chunks[0]
                written = os.write(self._descriptor, chunk)
                self._queued_bytes -= written
                if written < len(chunk):
                    self._chunks[0] = chunk[written:]
                else:
                    self._chunks.popleft()
                self._admit()
        except BlockingIOError:
            pass
        except OSError:
            self.close()  # the child closed its stdin; like a shell, we do not mind
        if self._is_over():
            self._on_end()
            return
        if bool(self._chunks) == self._writing:
            return
        self._writing = not self._writing
        if self._writing:
            self._loop.add_writer(self._descriptor, self._write)
        else:
            self._loop.remove_writer(self._descriptor)

    def _admit(self) -> None:
        """Queue the chunks that have waited longest, as far as there is room."""
        while self._waiting and self._has_room():
            data, turn = self._waiting.popleft()
            if not turn.done():
                if turn is not self._end:
                    self._put(data)
                turn.set_result(None)
