"""ProcessInput: what is written to a process, once and in order, whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Final

from exec_server.client.traffic import Traffic
from exec_server.errors import ExecServerError, InternalError, StdinClosed, Unsupported
from exec_server.protocol.base64text import Base64
from exec_server.protocol.process import (
    CLOSE_STDIN,
    WRITE,
    CloseStdinParams,
    ProcessId,
    WriteParams,
)

# Of one request: large enough that the requests cost little, small enough to be queued well.
PIECE_BYTES: Final = 131_072
# Written and not yet taken by the server. A writer that is further ahead waits, so that a process
# that does not read slows it down; one that is not may go on at once. All of it is sent again
# after a loss, and on some connections few calls can be under way.
AHEAD_BYTES: Final = 1_048_576
AHEAD_PIECES: Final = 32

# What a terminal takes for the end of a line: with the modes it starts with a return does, too.
_LINE_ENDS: Final = (b"\n", b"\r", b"\x04")

_NO_EOF: Final = (
    "its input cannot be ended; use run(input=...), write to a terminal and end it with "
    'b"\\x04", or give the command something that it takes for the end'
)


class ProcessInput:
    """The stdin of one process.

    A write is numbered, and the server carries out each number once; so what was under way when
    a connection was lost is sent again.
    """

    def __init__(self, traffic: Traffic, process_id: ProcessId, *, is_terminal: bool) -> None:
        self._traffic = traffic
        self._id = process_id
        self._is_terminal = is_terminal
        self._last_number = 0
        self._is_line_begun = False
        self._ahead = 0
        self._under_way: set[asyncio.Future[None]] = set()
        self._failure: ExecServerError | None = None
        self._moved = asyncio.Event()
        # Guards that the pieces of one write are not mixed with those of another.
        self._turn = asyncio.Lock()

    def fail(self, error: ExecServerError) -> None:
        """From now on there is no use in writing."""
        self._failure = self._failure or error
        self._moved.set()

    async def write(self, data: bytes, piece_bytes: int = PIECE_BYTES) -> None:
        """Send this; waits only while the server has too much that it has not taken yet.

        Raises StdinClosed or what else became of an earlier write.
        """
        async with self._turn:
            if data:
                self._is_line_begun = data[-1:] not in _LINE_ENDS
            for piece in _pieces(data, piece_bytes):
                while self._ahead >= AHEAD_BYTES or len(self._under_way) >= AHEAD_PIECES:
                    await self._move()
                self._check()
                self._last_number += 1
                self._ahead += len(piece)
                number = str(self._last_number)
                self._begin(self._write(WriteParams(self._id, Base64(piece), number)))

    async def close(self, *, is_offered: bool) -> None:
        """Let the process read the end of its input after all that was written.

        Does not wait for that: a process that reads slowly would hold up whoever is to take
        its output.
        """
        if self._is_terminal:
            # It ends what is being read: in a line that has begun the first one only passes
            # that on, and the next is the end.
            await self.write(b"\x04\x04" if self._is_line_begun else b"\x04")
            return
        if not is_offered:
            raise Unsupported("processCloseStdin", _NO_EOF)
        async with self._turn:
            self._check()
            before = list(self._under_way)
            self.fail(StdinClosed("the input of the process was closed"))
            self._begin(self._close(before))

    async def _close(self, before: list[asyncio.Future[None]]) -> None:
        if before:
            await asyncio.wait(before)
        try:
            params = CloseStdinParams(self._id)
            await self._traffic.session.call(CLOSE_STDIN, params, is_retryable=True)
        except ExecServerError:
            pass  # it has ended, or the session has

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _move(self) -> None:
        self._check()
        self._moved.clear()
        await self._moved.wait()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        future = self._traffic.spawn(work)
        self._under_way.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: asyncio.Future[None]) -> None:
        self._under_way.discard(future)
        self._moved.set()

    async def _write(self, params: WriteParams) -> None:
        # Not a call of the traffic: a process that does not read must not keep others from
        # being slowed down, or its own output from waiting for its reader.
        try:
            call = self._traffic.session.call(WRITE, params, is_retryable=True)
            status = (await call).status
        except InternalError as error:
            self.fail(StdinClosed(f"the process takes no input: {error}"))
        except ExecServerError as error:
            self.fail(error)
        else:
            if status != "accepted":
                self.fail(StdinClosed(f"the process takes no input: {_REASONS[status]}"))
        finally:
            self._ahead -= len(params.chunk)


_REASONS: Final = {
    "unknownProcess": "it has ended",
    "stdinClosed": "it was started without, or its input was closed",
    "starting": "it is still being started",
}


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    view = memoryview(data)
    return (bytes(view[start : start + size]) for start in range(0, len(data), size))
