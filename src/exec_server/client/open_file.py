"""Files that are open on the server: read or written block by block, several under way.

A handle ends with its connection. A reader opens the file again and goes on where it was, if the
file is still the same. A writer cannot: opening again would empty the file.
"""

from __future__ import annotations

import asyncio
import binascii
import uuid
from collections import deque
from types import TracebackType
from typing import Final, Self

import pybase64
from msgspec import Raw

from exec_server.client.answers import decode_as
from exec_server.client.places import explained
from exec_server.client.traffic import Traffic
from exec_server.errors import ConnectionLost, ExecServerError, InternalError, NotFound, RpcError
from exec_server.protocol.files import (
    CLOSE,
    GET_METADATA,
    OPEN,
    READ_BLOCK,
    WRITE_BLOCK,
    CloseParams,
    Done,
    GetMetadataParams,
    GetMetadataResult,
    HandleId,
    OpenParams,
    ReadBlockParams,
)
from exec_server.protocol.method import Call
from exec_server.protocol.wire import Result

# The most that servers give at a time.
BLOCK_BYTES: Final = 1_048_576
# Half of what they take: our server decodes a larger message in a thread, and takes no other
# meanwhile.
WRITTEN_BYTES: Final = 524_288
# Blocks under way: enough that neither side waits for the other on a fast network.
AHEAD_BLOCKS: Final = 4
# A file whose connection is lost this often before a single block came is given up.
REOPENINGS: Final = 32


# Blocks are coded here and not by their structs, which would take five times as long: every byte
# of a large file passes here.
class _Block(Result, frozen=True):
    chunk: Raw
    eof: bool


# How servers spell a block; it can be spelt otherwise, but nobody does.
_START: Final = b'{"chunk":"'
_ENDS: Final = {b'","eof":false}': False, b'","eof":true}': True}
_READ: Final = Call(READ_BLOCK.name, ReadBlockParams, Raw)
_WRITE: Final = Call(WRITE_BLOCK.name, Raw, Done)


class FileReader:
    """A file to read, for `async with`; iterating gives its blocks from where it is."""

    def __init__(self, traffic: Traffic, params: OpenParams, path: str, offset: int = 0) -> None:
        """The handle in `params` is replaced by one of its own; `path` is for errors."""
        self._traffic = traffic
        self._path = path
        self._params = params
        self._handle = HandleId("")
        self._offset = offset  # of what is asked for next
        self._coming: deque[tuple[int, asyncio.Future[Raw]]] = deque()
        self._rest = b""
        self._is_at_end = False
        self._metadata: GetMetadataResult | None = None

    async def __aenter__(self) -> Self:
        try:
            self._metadata = await self._look()
            await self._open()
        except RpcError as error:
            raise self._explained(error) from None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._forget_coming()
        await _close(self._traffic, self._handle)

    @property
    def size(self) -> int:
        """How many bytes the file had when it was opened."""
        assert self._metadata is not None
        return self._metadata.size

    async def read(self, size: int | None = -1) -> bytes:
        """Up to so many bytes, or all that follow; fewer only at the end of the file."""
        if size is None:
            size = -1
        parts = [self._rest]
        count = len(self._rest)
        while (size < 0 or count < size) and (block := await self._next_block()):
            parts.append(block)
            count += len(block)
        data = b"".join(parts)
        self._rest = b"" if size < 0 else data[size:]
        return data if size < 0 else data[:size]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        block, self._rest = self._rest, b""
        block = block or await self._next_block()
        if not block:
            raise StopAsyncIteration
        return block

    async def is_changed(self) -> bool:
        """Whether the file is not the one any more that was opened, as far as one can see."""
        try:
            return await self._differs()
        except NotFound:
            return True
        except RpcError as error:
            raise self._explained(error) from None

    async def _next_block(self) -> bytes:
        """The next block, empty at the end."""
        try:
            for _ in range(REOPENINGS):
                while not self._is_at_end and len(self._coming) < AHEAD_BLOCKS:
                    self._ask()
                if not self._coming:
                    return b""
                offset, future = self._coming[0]
                try:
                    answer = await asyncio.shield(future)
                except NotFound:  # the handle was of a connection that is gone
                    self._forget_coming()
                    self._offset = offset
                    await self._reopen()
                    continue
                self._coming.popleft()
                block, is_last = _decoded(answer)
                if is_last:
                    self._is_at_end = True
                    self._forget_coming()
                return block
        except RpcError as error:
            raise self._explained(error) from None
        raise ConnectionLost(
            f"{self._path}: the connection was lost {REOPENINGS} times without a block"
        )

    def _ask(self) -> None:
        params = ReadBlockParams(self._handle, self._offset, BLOCK_BYTES)
        call = self._traffic.call(_READ, params, is_retryable=True)
        self._coming.append((self._offset, self._traffic.spawn(call)))
        self._offset += BLOCK_BYTES

    def _forget_coming(self) -> None:
        for _, future in self._coming:
            future.cancel()
        self._coming.clear()

    async def _open(self) -> None:
        self._handle = await _open(self._traffic, self._params, is_retryable=True)

    async def _reopen(self) -> None:
        await self._open()
        if await self._differs():
            raise ConnectionLost(
                f"{self._path}: the connection was lost, and the file is not the same any more"
            )

    async def _differs(self) -> bool:
        before, now = self._metadata, await self._look()
        assert before is not None
        return (now.size, now.modified_at_ms) != (before.size, before.modified_at_ms)

    async def _look(self) -> GetMetadataResult:
        params = GetMetadataParams(self._params.path, sandbox=self._params.sandbox)
        return await self._traffic.call(GET_METADATA, params, is_retryable=True)

    def _explained(self, error: RpcError) -> ExecServerError:
        return explained(error, self._path, is_confined=self._params.sandbox is not None)


class FileWriter:
    """A file to write from its beginning, for `async with`; what it had before is gone.

    Leaving waits until everything is written. A connection that is lost meanwhile leaves it
    incomplete: `write` or leaving raises ConnectionLost.
    """

    def __init__(self, traffic: Traffic, params: OpenParams, path: str) -> None:
        """The handle in `params` is replaced by one of its own; `path` is for errors."""
        self._traffic = traffic
        self._path = path
        self._params = params
        self._handle = HandleId("")
        self._buffer = bytearray()
        self._going: deque[tuple[int, asyncio.Future[Done]]] = deque()
        self._sent = 0
        self.written = 0
        """Bytes from the beginning that the file has for sure."""

    async def __aenter__(self) -> Self:
        try:
            self._handle = await _open(self._traffic, self._params, is_retryable=True)
        except RpcError as error:
            raise self._explained(error) from None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await self.flush()
        finally:
            for _, future in self._going:
                future.cancel()
            await _close(self._traffic, self._handle)

    async def write(self, data: bytes) -> None:
        """Send this; waits while too much is under way. Raises what became of earlier writes."""
        if not self._buffer and len(data) == WRITTEN_BYTES:
            await self._send(data)
            return
        self._buffer += data
        while len(self._buffer) >= WRITTEN_BYTES:
            block = bytes(self._buffer[:WRITTEN_BYTES])
            del self._buffer[:WRITTEN_BYTES]
            await self._send(block)

    async def flush(self) -> None:
        """Wait until everything so far is in the file."""
        if self._buffer:
            block = bytes(self._buffer)
            self._buffer.clear()
            await self._send(block)
        while self._going:
            await self._settle()

    async def _send(self, block: bytes) -> None:
        if len(self._going) >= AHEAD_BLOCKS:
            await self._settle()
        text = b'{"handleId":"%b","offset":%d,"chunk":"%b"}' % (
            self._handle.encode(),
            self._sent,
            pybase64.b64encode(block),
        )
        self._sent += len(block)
        writing = self._traffic.spawn(self._traffic.call(_WRITE, Raw(text)))
        self._going.append((self._sent, writing))

    async def _settle(self) -> None:
        """Wait for the oldest write."""
        end, writing = self._going[0]
        try:
            await asyncio.shield(writing)
        except (ConnectionLost, NotFound):
            raise ConnectionLost(
                f"{self._path}: the connection was lost while the file was written; "
                f"{self.written} bytes are there"
            ) from None
        except RpcError as error:
            raise self._explained(error) from None
        self._going.popleft()
        self.written = end

    def _explained(self, error: RpcError) -> ExecServerError:
        return explained(error, self._path, is_confined=self._params.sandbox is not None)


def _decoded(answer: Raw) -> tuple[bytes, bool]:
    """The bytes of a block, and whether it is the last one."""
    text = memoryview(answer)
    try:
        for end, is_last in _ENDS.items():
            if bytes(text[: len(_START)]) == _START and bytes(text[-len(end) :]) == end:
                chunk = text[len(_START) : -len(end)]
                return pybase64.b64decode(chunk, validate=True), is_last
        block = decode_as(_Block, answer, "block of a file")
        return pybase64.b64decode(memoryview(block.chunk)[1:-1], validate=True), block.eof
    except binascii.Error:
        raise InternalError("the server sent a block that is no base64") from None


async def _open(traffic: Traffic, params: OpenParams, *, is_retryable: bool) -> HandleId:
    handle = HandleId(uuid.uuid4().hex)
    named = OpenParams(handle, params.path, params.mode, params.sandbox)
    await traffic.call(OPEN, named, is_retryable=is_retryable)
    return handle


async def _close(traffic: Traffic, handle: HandleId) -> None:
    """Close it; what is not open any more was closed by the server."""
    try:
        await traffic.call(CLOSE, CloseParams(handle))
    except ExecServerError:
        pass
