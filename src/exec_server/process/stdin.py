"""The input of a process, queued until the child reads it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

# As many chunks as the reference queues; a further write waits for space.
QUEUED_CHUNKS = 128
# The same queue in bytes: large chunks would otherwise hold gigabytes for a child that sleeps.
QUEUED_BYTES = 1_048_576


class StdinQueue:
    """Writes chunks to a descriptor in order and completely, without blocking the loop.

    The owner of the descriptor closes it, after `close`. `on_eof` is called when all input up to
    `write_eof` is written. The number of chunks that wait for space is bounded by the requests
    that a connection may have under way.
    """

    __slots__ = (
        "_chunks",
        "_descriptor",
        "_eof",
        "_loop",
        "_on_eof",
        "_open",
        "_queued_bytes",
        "_waiting",
        "_writing",
    )

    def __init__(self, descriptor: int, on_eof: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_eof = on_eof
        # Done when the end of the input is accepted; None before `write_eof`.
        self._eof: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[memoryview] = deque()
        self._queued_bytes = 0
        # Chunks that wait for space in the queue; the end of the input waits with an empty chunk.
        self._waiting: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._open = True
        self._writing = False

    def write(self, data: bytes) -> asyncio.Future[None] | None:
        """Queue a chunk, or return a future that is done when the chunk is queued.

        Cancelling the future withdraws the chunk. After `close` chunks are dropped.
        """
        if not self._open or not data:
            return None
        if self._waiting or not self._has_space():
            accepted: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append((data, accepted))
            return accepted
        self._append(data)
        if not self._writing:
            self._flush()
        return None

    @property
    def has_eof(self) -> bool:
        """Whether the end of the input is queued or waits for space."""
        return self._eof is not None and not self._eof.cancelled()

    def write_eof(self) -> asyncio.Future[None] | None:
        """Queue the end of the input behind all chunks; returns a future like `write`.

        `write` must not be called while `has_eof`. A second call has no further effect.
        """
        if self._eof is None or self._eof.cancelled():
            self._eof = self._loop.create_future()
            self._waiting.append((b"", self._eof))
            self._accept_waiting()
            if self._is_complete():
                self._on_eof()
        return None if self._eof.done() else self._eof

    def close(self) -> None:
        """Drop the queued chunks."""
        self._open = False
        self._chunks.clear()
        self._queued_bytes = 0
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._descriptor)
        while self._waiting:
            _, accepted = self._waiting.popleft()
            if not accepted.done():
                accepted.set_result(None)

    def _is_complete(self) -> bool:
        """Whether all input up to its end is written."""
        return not self._chunks and self.has_eof and self._eof is not None and self._eof.done()

    def _has_space(self) -> bool:
        return len(self._chunks) < QUEUED_CHUNKS and self._queued_bytes < QUEUED_BYTES

    def _append(self, data: bytes) -> None:
        self._chunks.append(memoryview(data))
        self._queued_bytes += len(data)

    def _flush(self) -> None:
        try:
            while self._chunks:
                chunk = self._chunks[0]
                written = os.write(self._descriptor, chunk)
                self._queued_bytes -= written
                if written < len(chunk):
                    self._chunks[0] = chunk[written:]
                else:
                    self._chunks.popleft()
                self._accept_waiting()
        except BlockingIOError:
            pass
        except OSError:
            self.close()  # EPIPE: the child closed its stdin, which is no error
        if self._is_complete():
            self._on_eof()
            return
        if bool(self._chunks) == self._writing:
            return
        self._writing = not self._writing
        if self._writing:
            self._loop.add_writer(self._descriptor, self._flush)
        else:
            self._loop.remove_writer(self._descriptor)

    def _accept_waiting(self) -> None:
        """Move waiting chunks into the queue, oldest first, while it has space."""
        while self._waiting and self._has_space():
            data, accepted = self._waiting.popleft()
            if not accepted.done():
                if accepted is not self._eof:
                    self._append(data)
                accepted.set_result(None)
