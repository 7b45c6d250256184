"""What a client writes to a process, queued until the child reads it."""

from __future__ import annotations

import asyncio
import os
from collections import deque

# As many chunks as the reference queues; a further write waits for room.
QUEUED_CHUNKS = 128
# The same queue in bytes: large chunks would otherwise hold gigabytes for a child that sleeps.
QUEUED_BYTES = 1_048_576


class StdinQueue:
    """Writes chunks to a descriptor in order and completely, without ever blocking the loop.

    The descriptor is borrowed: its owner closes it, after `close`. Chunks that wait for room
    are bounded by the requests that a connection may have under way.
    """

    __slots__ = (
        "_chunks",
        "_descriptor",
        "_loop",
        "_open",
        "_queued_bytes",
        "_waiting",
        "_writing",
    )

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
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
                self._put(data)
                turn.set_result(None)
