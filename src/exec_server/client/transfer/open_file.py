"""Files that are open on the server: read or written in blocks, with several blocks in flight.

After a lost connection a reader opens an unchanged file again. That would truncate a file to write,
so a writer has a temporary one.
"""

from __future__ import annotations

import asyncio
import binascii
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, Self

import msgspec
import pybase64
from msgspec import Raw

from exec_server.client.arguments import AnyPath, check_bytes, path_text
from exec_server.client.engine.messages import decode_as
from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import is_a_directory, path_error
from exec_server.client.handle import Handle
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    InvalidRequest,
    MalformedAnswer,
    NotFound,
    RpcError,
    SessionLost,
)
from exec_server.protocol.decoding import Call, Result
from exec_server.protocol.files import (
    CLOSE,
    GET_METADATA,
    OPEN,
    READ_BINARY,
    READ_BLOCK,
    WRITE_BINARY,
    WRITE_BLOCK,
    CloseParams,
    Done,
    GetMetadataParams,
    GetMetadataResult,
    HandleId,
    OpenParams,
    ReadBinaryResult,
    ReadBlockParams,
    WriteBinaryParams,
)
from exec_server.protocol.jsonrpc import Attached
from exec_server.protocol.paths import PathUri

# The largest block that servers return.
BLOCK_BYTES: Final = 1_048_576
# Half of the largest block that servers accept: our server decodes a larger message in a thread,
# and processes no other message of the connection meanwhile.
WRITE_BYTES: Final = 524_288
# Blocks in flight: enough that neither side waits for the other on a fast network.
MAX_BLOCKS_IN_FLIGHT: Final = 4
# Of one read without a size, and of a whole file: as much as the reference reads at once. The
# content of a larger file is not kept in memory; its blocks can be read one by one.
READ_BYTES: Final = 512 * 1_048_576
# How long a cancelled writer waits for its file to be opened, in order to remove it.
OPEN_SECONDS: Final = 5.0
# A read fails if the connection is lost this often before one block was received.
MAX_REOPENINGS: Final = 32


# Blocks are encoded and decoded here: with their structs it would take five times as long, and
# every byte of a large file is affected.
class _Block(Result, frozen=True):
    chunk: Raw
    eof: bool


# The fast path: the JSON text of a block as servers write it. Any other text is decoded as well.
_START: Final = b'{"chunk":"'
_ENDS: Final = {b'","eof":false}': False, b'","eof":true}': True}
_READ: Final = Call(READ_BLOCK.name, ReadBlockParams, Raw)
_WRITE: Final = Call(WRITE_BLOCK.name, Raw, Done)
# Without base64, on servers with `fsBinary`.
_READ_BINARY: Final[Call[ReadBlockParams, Attached[Raw]]] = Call(
    READ_BINARY.name, ReadBlockParams, Attached
)
_WRITE_BINARY: Final[Call[Attached[WriteBinaryParams], Done]] = Call(
    WRITE_BINARY.name, Attached, Done
)


class _OpenFile(Handle):
    """The common part of files that are read and written."""

    def __init__(self, session: ClientSession, params: OpenParams, path: str) -> None:
        """Open with `params`, whose handle is replaced by an unused one; errors name `path`."""
        super().__init__()
        self._session = session
        self._params = params
        self._path = path
        self._handle = HandleId("")

    @property
    def path(self) -> str:
        """The path as it was given."""
        return self._path

    def _target(self) -> str:
        return self._path

    def _check_open(self) -> None:
        if not self.is_open:
            raise self._not_open(self._path)

    def _path_error(self, error: RpcError) -> ExecServerError:
        return path_error(error, self._path, is_confined=self._params.sandbox is not None)


class FileReader(_OpenFile):
    """A file to read, which `await` or `async with` opens; iterating gives its blocks."""

    def __init__(
        self, session: ClientSession, params: OpenParams, path: str, offset: int = 0
    ) -> None:
        super().__init__(session, params, path)
        self._offset = offset  # of the next request
        self._reads: deque[tuple[int, asyncio.Future[tuple[bytes, bool]]]] = deque()
        self._buffered = b""
        self._is_at_end = False
        self._metadata: GetMetadataResult | None = None

    async def _open(self) -> None:
        try:
            self._metadata = await self._stat()
            self._handle = await _open_handle(self._session, self._params)
        except RpcError as error:
            if self._metadata is not None and self._metadata.is_directory:
                raise is_a_directory(self._path) from None
            raise self._path_error(error) from None

    async def _close(self) -> None:
        self._cancel_reads()
        await _close_handle(self._session, self._handle)

    @property
    def size(self) -> int:
        """The size of the file when it was opened."""
        return self._opened_metadata().size

    def _opened_metadata(self) -> GetMetadataResult:
        if self._metadata is None:
            self._check_open()
        assert self._metadata is not None
        return self._metadata

    async def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, fewer only at the end of the file; all of them by default.

        All of them may be READ_BYTES at most; otherwise InvalidRequest is raised.
        """
        self._check_open()
        if size is not None and size >= 0:
            return await self._read(size)
        data = await self._read(READ_BYTES + 1)
        if len(data) > READ_BYTES:
            raise too_large_error(self._path, READ_BYTES)
        return data

    async def _read(self, size: int) -> bytes:
        parts = [self._buffered]
        count = len(self._buffered)
        while count < size and (block := await self._next_block()):
            parts.append(block)
            count += len(block)
        data = b"".join(parts)
        self._buffered = data[size:]
        return data[:size] if self._buffered else data

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        self._check_open()
        block, self._buffered = self._buffered, b""
        block = block or await self._next_block()
        if not block:
            raise StopAsyncIteration
        return block

    async def is_changed(self) -> bool:
        """Whether the file was changed since it was opened, judged by size and time."""
        self._opened_metadata()
        try:
            return await self._differs()
        except NotFound:
            return True
        except RpcError as error:
            raise self._path_error(error) from None

    async def _next_block(self) -> bytes:
        """The next block; empty at the end."""
        try:
            for _ in range(MAX_REOPENINGS):
                while not self._is_at_end and len(self._reads) < MAX_BLOCKS_IN_FLIGHT:
                    self._request_block()
                if not self._reads:
                    return b""
                offset, future = self._reads[0]
                try:
                    block, is_last = await asyncio.shield(future)
                except NotFound:  # the handle ended with its connection
                    self._cancel_reads()
                    self._offset = offset
                    await self._reopen()
                    continue
                self._reads.popleft()
                if len(block) > BLOCK_BYTES or (len(block) < BLOCK_BYTES and not is_last):
                    # The next block would be written to the wrong place.
                    text = f"the server sent a block of {len(block)} bytes instead of {BLOCK_BYTES}"
                    raise MalformedAnswer(f"{self._path}: {text}")
                if is_last:
                    self._is_at_end = True
                    self._cancel_reads()
                return block
        except RpcError as error:
            raise self._path_error(error) from None
        raise ConnectionLost(
            f"{self._path}: the connection was lost {MAX_REOPENINGS} times without a block"
        )

    def _request_block(self) -> None:
        params = ReadBlockParams(self._handle, self._offset, BLOCK_BYTES)
        self._reads.append((self._offset, self._session.spawn(self._read_block(params))))
        self._offset += BLOCK_BYTES

    async def _read_block(self, params: ReadBlockParams) -> tuple[bytes, bool]:
        """The content of a block, and whether it is the last one."""
        if not self._session.features.capabilities.fs_binary:
            return _decode_block(await self._session.call(_READ, params, is_retryable=True))
        answer = await self._session.call(_READ_BINARY, params, is_retryable=True)
        result = decode_as(ReadBinaryResult, answer.value, "block of a file")
        return bytes(answer.data), result.eof

    def _cancel_reads(self) -> None:
        for _, future in self._reads:
            future.cancel()
        self._reads.clear()

    async def _reopen(self) -> None:
        self._handle = await _open_handle(self._session, self._params)
        if await self._differs():
            raise ConnectionLost(
                f"{self._path}: the connection was lost, and the file was changed meanwhile"
            )

    async def _differs(self) -> bool:
        before, now = self._opened_metadata(), await self._stat()
        return (now.size, now.modified_at_ms) != (before.size, before.modified_at_ms)

    async def _stat(self) -> GetMetadataResult:
        opened = self._params
        params = GetMetadataParams(opened.path, sandbox=opened.sandbox, user=opened.user)
        return await self._session.call(GET_METADATA, params, is_retryable=True)


class Replacement(Protocol):
    """A temporary file for a new content; `atomic_replace.AtomicReplacement` implements it."""

    async def begin(self) -> str | None:
        """The path of the temporary file; None if the file has to be written itself."""
        ...

    async def commit(self) -> None:
        """Put the complete temporary file in place, or remove it."""
        ...

    async def abandon(self) -> None:
        """Remove the temporary file."""
        ...

    def may_write_in_place(self, error: ExecServerError) -> bool:
        """Whether to write the file itself, because the temporary one cannot be created."""
        ...


class FileWriter(_OpenFile):
    """A file to replace, which `await` or `async with` opens.

    `aclose`, or leaving the block, waits until all data is written, and then puts it in place. If
    the block raises an exception, or the connection is lost, which `write` or leaving reports as
    ConnectionLost, or the environment is closed, which they report as SessionLost, the file stays
    as it was. Without a replacement, opening truncates the file, and
    such a failure leaves it incomplete.
    """

    def __init__(
        self,
        session: ClientSession,
        params: OpenParams,
        path: str,
        replacement: Replacement | None = None,
    ) -> None:
        super().__init__(session, params, path)
        self._replacement = replacement
        self._buffer = bytearray()
        self._writes: deque[tuple[int, asyncio.Future[Done]]] = deque()
        self._sent = 0
        self._is_abandoned = False
        self._failure: SessionLost | None = None
        self.written = 0
        """Number of leading bytes that the server is known to have written."""

    async def _open(self) -> None:
        self._session.clean_ups.add(self._drop)
        try:
            if not await self._open_temporary_file():
                self._replacement = None
                await self._open_file(self._params)
        except BaseException:
            self._session.clean_ups.discard(self._drop)
            raise

    async def _drop(self) -> None:
        """Remove the temporary file, because the session is about to be closed."""
        if not self.is_open:
            self._is_abandoned = True
            await self.aclose()  # waits if it is being opened or closed
            return
        self._failure = SessionLost(f"{self._path}: the environment was closed before the file")
        for _, future in self._writes:
            future.cancel()
        await _close_handle(self._session, self._handle)
        if self._replacement is not None:
            await self._replacement.abandon()

    async def _open_temporary_file(self) -> bool:
        """Open the temporary file; False if the file has to be written itself."""
        replacement = self._replacement
        if replacement is None or (part := await replacement.begin()) is None:
            return False
        uri = PathUri.from_text(part)
        params = msgspec.structs.replace(self._params, path=uri)
        opening = self._session.spawn(self._open_file(params))
        try:
            await asyncio.shield(opening)
        except ExecServerError as error:
            if not replacement.may_write_in_place(error):
                await replacement.abandon()
                raise
            return False
        except asyncio.CancelledError:
            # The file could be created after its removal otherwise.
            await asyncio.wait([opening], timeout=OPEN_SECONDS)
            await _close_handle(self._session, self._handle)
            await replacement.abandon()
            raise
        return True

    async def _open_file(self, params: OpenParams) -> None:
        try:
            self._handle = await _open_handle(self._session, params)
        except RpcError as error:
            raise self._path_error(error) from None

    async def __aexit__(self, *error: object) -> None:
        self._is_abandoned = error[0] is not None
        await self.aclose()

    async def _close(self) -> None:
        try:
            await self._close_file()
        finally:
            self._session.clean_ups.discard(self._drop)

    async def _close_file(self) -> None:
        is_complete = False
        try:
            if not self._is_abandoned:
                await self._flush()
                is_complete = True
        finally:
            for _, future in self._writes:
                future.cancel()
            await _close_handle(self._session, self._handle)
            if self._replacement is not None and not is_complete:
                await self._replacement.abandon()
        if self._replacement is not None and is_complete:
            await self._replacement.commit()

    async def write(self, data: bytes) -> None:
        """Send data; waits while too much is in flight. Raises errors of earlier writes."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data must be bytes, not {type(data).__name__}: encode a text")
        self._check_open()
        if not self._buffer and len(data) == WRITE_BYTES:
            await self._send(data)
            return
        self._buffer += data
        while len(self._buffer) >= WRITE_BYTES:
            block = bytes(self._buffer[:WRITE_BYTES])
            del self._buffer[:WRITE_BYTES]
            await self._send(block)

    async def flush(self) -> None:
        """Wait until all data so far is written."""
        self._check_open()
        await self._flush()

    async def _flush(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._buffer:
            block = bytes(self._buffer)
            self._buffer.clear()
            await self._send(block)
        while self._writes:
            await self._settle()

    async def _send(self, block: bytes) -> None:
        if self._failure is not None:
            raise self._failure
        if len(self._writes) >= MAX_BLOCKS_IN_FLIGHT:
            await self._settle()
        writing = self._session.spawn(self._write_block(self._sent, block))
        self._sent += len(block)
        self._writes.append((self._sent, writing))

    def _write_block(self, offset: int, block: bytes) -> Coroutine[Any, Any, Done]:
        if self._session.features.capabilities.fs_binary:
            params = WriteBinaryParams(self._handle, offset)
            return self._session.call(_WRITE_BINARY, Attached(params, block))
        text = b'{"handleId":"%b","offset":%d,"chunk":"%b"}' % (
            self._handle.encode(),
            offset,
            pybase64.b64encode(block),
        )
        return self._session.call(_WRITE, Raw(text))

    async def _settle(self) -> None:
        """Wait for the oldest write."""
        end, writing = self._writes[0]
        try:
            await asyncio.shield(writing)
        except (ConnectionLost, NotFound):
            raise ConnectionLost(
                f"{self._path}: the connection was lost while the file was written, "
                f"after {self.written} bytes"
            ) from None
        except RpcError as error:
            raise self._path_error(error) from None
        except asyncio.CancelledError:
            if self._failure is not None and writing.cancelled():
                raise self._failure from None  # the write was cancelled, not this task
            raise
        self._writes.popleft()
        self.written = end


def too_large_error(path: AnyPath, limit: int) -> InvalidRequest:
    """The error for a file whose content is not kept in memory."""
    return InvalidRequest(
        f"{path_text(path)}: file is too large to read: limit is {limit} bytes; open it instead"
    )


def _decode_block(answer: Raw) -> tuple[bytes, bool]:
    text = memoryview(answer)
    try:
        for end, is_last in _ENDS.items():
            if bytes(text[: len(_START)]) == _START and bytes(text[-len(end) :]) == end:
                chunk = text[len(_START) : -len(end)]
                return pybase64.b64decode(chunk, validate=True), is_last
        block = decode_as(_Block, answer, "block of a file")
        quoted = bytes(block.chunk)
        if quoted[:1] == quoted[-1:] == b'"':
            return pybase64.b64decode(quoted[1:-1], validate=True), block.eof
    except binascii.Error:
        pass
    raise MalformedAnswer("the server sent a block that is not base64")


class FileAppender(Handle):
    """A file to write at its end, which `await` or `async with` opens, or creates.

    Data is in the file as soon as it was sent, and stays there after an exception in the block.
    """

    def __init__(self, append: Callable[[bytes], Awaitable[None]], path: str) -> None:
        """`append` adds some data to the file, which it creates if it is missing."""
        super().__init__()
        self._append = append
        self.path = path
        """The path as it was given."""
        self._buffer = bytearray()
        self._lock = asyncio.Lock()  # keeps the pieces in order
        self.written = 0
        """Number of bytes that were appended."""

    def _target(self) -> str:
        return self.path

    async def _open(self) -> None:
        await self._append(b"")

    async def _close(self) -> None:
        await self._flush()

    async def write(self, data: bytes) -> None:
        """Write at the end of the file, at the latest when it is flushed or closed."""
        check_bytes(data, "encode a text")
        if not self.is_open:
            raise self._not_open(self.path)
        self._buffer += data
        if len(self._buffer) >= WRITE_BYTES:
            await self._flush()

    async def flush(self) -> None:
        """Wait until all data so far is appended."""
        await self._flush()

    async def _flush(self) -> None:
        async with self._lock:
            while self._buffer:
                piece = bytes(self._buffer[:WRITE_BYTES])
                del self._buffer[:WRITE_BYTES]
                await self._append(piece)
                self.written += len(piece)


async def _open_handle(session: ClientSession, params: OpenParams) -> HandleId:
    handle = HandleId(uuid.uuid4().hex)
    params = msgspec.structs.replace(params, handle_id=handle)
    await session.call(OPEN, params, is_retryable=True)
    return handle


async def _close_handle(session: ClientSession, handle: HandleId) -> None:
    """Close a handle; an error means that the server has closed it before."""
    try:
        await session.call(CLOSE, CloseParams(handle))
    except ExecServerError:
        pass
