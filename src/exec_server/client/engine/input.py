"""ProcessInput: writes to a process, each once and in order, also after lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Final

from exec_server.client.engine.session import ClientSession
from exec_server.errors import ExecServerError, InternalError, StdinClosed, Unsupported
from exec_server.protocol.base64_text import Base64
from exec_server.protocol.process import (
    CLOSE_STDIN,
    WRITE,
    CloseStdinParams,
    ProcessId,
    WriteParams,
)

# Size of one request: large enough to make the cost per request small, small enough to queue.
PIECE_BYTES: Final = 131_072
# Data that is sent and not acknowledged. A writer beyond either limit waits, so that a process
# that does not read slows its writer down. All of it is sent again after a lost connection, and
# some connections carry few calls at a time.
UNACKNOWLEDGED_BYTES: Final = 1_048_576
UNACKNOWLEDGED_PIECES: Final = 32

# Line ends in the initial mode of a terminal, which translates a return to a newline.
_LINE_ENDS: Final = (b"\n", b"\r", b"\x04")

_NO_EOF: Final = (
    "stdin cannot be closed; use run(input=...), or a terminal and write "
    'b"\\x04", or let the command recognise the end of its input by the data'
)


class ProcessInput:
    """The stdin of one process.

    Writes are numbered, and the server performs each number once; so unacknowledged writes are
    sent again after a lost connection.
    """

    def __init__(self, session: ClientSession, process_id: ProcessId, *, is_terminal: bool) -> None:
        self._session = session
        self._id = process_id
        self._is_terminal = is_terminal
        self._last_number = 0
        self._is_inside_line = False
        self._unacknowledged = 0
        self._writes: set[asyncio.Future[None]] = set()
        self._failure: ExecServerError | None = None
        self._progress = asyncio.Event()
        # Keeps the pieces of one write together.
        self._lock = asyncio.Lock()

    def fail(self, error: ExecServerError) -> None:
        """Make this and all further writes raise `error`."""
        self._failure = self._failure or error
        self._progress.set()

    async def write(self, data: bytes, piece_bytes: int = PIECE_BYTES) -> None:
        """Send data; waits only while too much is unacknowledged.

        Raises StdinClosed or another error, perhaps of an earlier write.
        """
        async with self._lock:
            if data:
                self._is_inside_line = data[-1:] not in _LINE_ENDS
            for piece in _pieces(data, piece_bytes):
                while (
                    self._unacknowledged >= UNACKNOWLEDGED_BYTES
                    or len(self._writes) >= UNACKNOWLEDGED_PIECES
                ):
                    await self._wait_for_progress()
                self._check()
                self._last_number += 1
                self._unacknowledged += len(piece)
                number = str(self._last_number)
                self._spawn(self._write(WriteParams(self._id, Base64(piece), number)))

    @property
    def can_close(self) -> bool:
        """Whether the server can close this input."""
        return self._is_terminal or self._session.features.capabilities.process_close_stdin

    async def close(self) -> None:
        """Close stdin after all writes; raises Unsupported if the server cannot.

        Does not wait for the writes: the caller may have to read the output of a process that
        reads its input slowly.
        """
        if self._is_terminal:
            # Ctrl-D completes the current read: inside of a line the first one delivers the
            # started line, and only the second one is the end of the input.
            await self.write(b"\x04\x04" if self._is_inside_line else b"\x04")
            return
        if not self.can_close:
            raise Unsupported("processCloseStdin", _NO_EOF)
        async with self._lock:
            self._check()
            earlier = list(self._writes)
            self.fail(StdinClosed("the input of the process was closed"))
            self._spawn(self._close(earlier))

    async def _close(self, earlier: list[asyncio.Future[None]]) -> None:
        if earlier:
            await asyncio.wait(earlier)
        try:
            await self._session.call_in_background(CLOSE_STDIN, CloseStdinParams(self._id))
        except ExecServerError:
            pass  # the process or the session has ended

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _wait_for_progress(self) -> None:
        self._check()
        self._progress.clear()
        await self._progress.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        future = self._session.spawn(work)
        self._writes.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[None]) -> None:
        self._writes.discard(future)
        self._progress.set()

    async def _write(self, params: WriteParams) -> None:
        # In the background: a process that does not read its input must not exempt full queues
        # from flow control.
        try:
            may_repeat = self._session.features.repeats_writes_safely
            answer = await self._session.call_in_background(WRITE, params, is_retryable=may_repeat)
            status = answer.status
        except InternalError as error:
            self.fail(StdinClosed(f"the process takes no input: {error}"))
        except ExecServerError as error:
            self.fail(error)
        else:
            if status != "accepted":
                self.fail(StdinClosed(f"the process takes no input: {_REASONS[status]}"))
        finally:
            self._unacknowledged -= len(params.chunk)


_REASONS: Final = {
    "unknownProcess": "it has ended",
    "stdinClosed": "it was started without stdin, or its stdin was closed",
    "starting": "it is still starting",
}


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    view = memoryview(data)
    return (bytes(view[start : start + size]) for start in range(0, len(data), size))
