"""ArchiveSource: the bytes of an archive from anything that has them, for a thread that reads."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from concurrent import futures
from typing import IO, Final

AnyArchive = bytes | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]

_READ_BYTES: Final = 262_144


class ArchiveSource(io.RawIOBase):
    """A stream for one thread over bytes, a binary file, or the pieces of an iterable.

    An async iterable is read on the loop that made this. `end` cancels a read that waits for it.
    """

    def __init__(self, archive: AnyArchive) -> None:
        super().__init__()
        self._next = self._pieces(archive)
        self._piece = memoryview(b"")
        self._lock = threading.Lock()  # guards the two below
        self._waiting: futures.Future[bytes] | None = None
        self._is_ended = False

    def _pieces(self, archive: AnyArchive) -> Callable[[], bytes]:
        """A function that returns the next piece, and an empty one at the end."""
        if isinstance(archive, bytes | bytearray | memoryview):
            whole = iter([bytes(archive)])
            return lambda: next(whole, b"")
        if isinstance(archive, AsyncIterable):
            loop = asyncio.get_running_loop()
            pieces = aiter(archive)
            return lambda: self._wait_for(pieces, loop)
        if callable(read := getattr(archive, "read", None)):
            return lambda: _checked(read(_READ_BYTES))
        if isinstance(archive, Iterable) and not isinstance(archive, str):
            rest = (_checked(piece) for piece in archive)
            return lambda: next((piece for piece in rest if piece), b"")
        kind = type(archive).__name__
        raise TypeError(f"an archive must be bytes, a binary file or an iterable, not {kind}")

    def _wait_for(self, pieces: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> bytes:
        with self._lock:
            if self._is_ended:
                raise ValueError("the reader was closed")
            waiting = self._waiting = asyncio.run_coroutine_threadsafe(_next_of(pieces), loop)
        return waiting.result()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if not self._piece:
            self._piece = memoryview(self._next())
        count = min(len(buffer), len(self._piece))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def end(self) -> None:
        """End a read that waits for an async iterable, and all later ones."""
        with self._lock:
            self._is_ended = True
            if self._waiting is not None:
                self._waiting.cancel()


def _checked(piece: object) -> bytes:
    if not isinstance(piece, bytes | bytearray | memoryview):
        raise TypeError(f"an archive consists of bytes, not {type(piece).__name__}")
    return bytes(piece)


async def _next_of(pieces: AsyncIterator[bytes]) -> bytes:
    async for piece in pieces:
        if piece:
            return _checked(piece)
    return b""
