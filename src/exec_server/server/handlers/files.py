"""fs/*: requests are answered from the kernel's caches if possible, otherwise in threads."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

import pybase64

from exec_server.filesystem import handles, nonblocking, operations, safe_write, trusted_reads
from exec_server.filesystem import walk as walk_operation
from exec_server.protocol import files
from exec_server.protocol.files import ConfinableParams
from exec_server.server.context import ConnectionContext, Encoded, Streamed, check_user
from exec_server.server.file_access import (
    UNCONFINED,
    FileAccess,
    FileOpening,
    FileOperation,
    Unconfined,
    choose_access,
)

# Larger files are sent while they are read, so the memory of a read does not depend on the size.
WHOLE_BYTES = 4 * 1_048_576
# One piece of such a file. A multiple of three, so that the base64 texts of pieces can be joined.
PIECE_BYTES = 3 * 262_144


P = TypeVar("P", bound=ConfinableParams)
R = TypeVar("R")


def _access(context: ConnectionContext, params: ConfinableParams, *, reading: bool) -> FileAccess:
    if params.sandbox is None and params.user is None:
        return UNCONFINED
    server = context.server
    if params.user is not None:
        check_user(server.environment, params.sandbox)
    return choose_access(server.sandboxes, params.sandbox, reading=reading, user=params.user)


def handler(
    operation: FileOperation[P, R], *, reading: bool = False
) -> Callable[[ConnectionContext, P], R | Awaitable[R]]:
    """The handler of an operation that is answered at once if possible, otherwise in a thread."""

    def handle(context: ConnectionContext, params: P) -> R | Awaitable[R]:
        access = _access(context, params, reading=reading)
        if operation.attempt is not None:
            result = access.try_now(operation.attempt, params)
            if result is not None:
                return result
        return context.in_thread(access.perform, operation, params)

    return handle


# ---- fs/readFile ----------------------------------------------------------------------


def read_file(
    context: ConnectionContext, params: files.ReadFileParams
) -> Encoded | Awaitable[Encoded | Streamed]:
    access = _access(context, params, reading=True)
    result = access.try_now(nonblocking.try_read_file, params)
    if result is not None:
        return _whole(result.data_base64)
    return _read_file(context, partial(access.open, _READ_FILE, params))


_READ_FILE = FileOpening(files.READ_FILE, lambda params: operations.open_for_read(params)[0])
_BEFORE_DATA = b'{"dataBase64":"'
_AFTER_DATA = b'"}'


def _whole(data: bytes) -> Encoded:
    return Encoded(b"%b%b%b" % (_BEFORE_DATA, pybase64.b64encode(data), _AFTER_DATA))


async def _read_file(context: ConnectionContext, opener: Callable[[], int]) -> Encoded | Streamed:
    opened = await context.in_thread(_open_and_read, opener)
    if isinstance(opened, Encoded):
        return opened
    size = len(_BEFORE_DATA) + (opened.size + 2) // 3 * 4 + len(_AFTER_DATA)
    return Streamed(size, _pieces(context, opened))


class _File:
    """A descriptor that is closed when the last reference to it is dropped.

    A thread may still read from it after the end of the connection; if it were closed explicitly
    then, that thread could read another file that got the same descriptor number.
    """

    __slots__ = ("descriptor", "size")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = 0  # at the time of opening; bytes that are appended later are not read

    def __del__(self) -> None:
        os.close(self.descriptor)


def _open_and_read(opener: Callable[[], int]) -> Encoded | _File:
    """Open a file, and read it too unless it is large."""
    file = _File(opener())
    info = os.fstat(file.descriptor)
    if info.st_size > WHOLE_BYTES:
        file.size = info.st_size
        return file
    with safe_write.INODE_LOCKS.acquire(info):
        return _whole(safe_write.read_all(file.descriptor, info.st_size))


async def _pieces(context: ConnectionContext, file: _File) -> AsyncIterator[bytes]:
    """The result for a large file; the next piece is read while this one is sent."""
    yield _BEFORE_DATA
    offset = 0
    next_piece = context.in_thread(_read_piece, file, offset)
    while True:
        piece, size = await next_piece
        offset += size
        if size < PIECE_BYTES or offset == file.size:
            yield piece
            break
        next_piece = context.in_thread(_read_piece, file, offset)
        yield piece
    yield _AFTER_DATA


def _read_piece(file: _File, offset: int) -> tuple[bytes, int]:
    data = os.pread(file.descriptor, min(PIECE_BYTES, file.size - offset), offset)
    return pybase64.b64encode(data), len(data)


# ---- metadata and directories ---------------------------------------------------------


def _read_directory(params: files.ReadDirectoryParams) -> files.ReadDirectoryResult:
    result = operations.read_directory(params)
    nonblocking.directory_was_listed(params.path.native(), len(result.entries))
    return result


def _read_directory_trusted(
    params: files.ReadDirectoryParams,
) -> files.ReadDirectoryResult | None:
    result = trusted_reads.read_directory(params)
    if result is not None:
        nonblocking.directory_was_listed(params.path.native(), len(result.entries))
    return result


get_metadata = handler(
    FileOperation(files.GET_METADATA, operations.get_metadata, nonblocking.try_metadata),
    reading=True,
)
canonicalize = handler(
    FileOperation(files.CANONICALIZE, operations.canonicalize, nonblocking.try_canonicalize),
    reading=True,
)
read_directory = handler(
    FileOperation(
        files.READ_DIRECTORY,
        _read_directory,
        nonblocking.try_read_directory,
        _read_directory_trusted,
    ),
    reading=True,
)
list_ = handler(FileOperation(files.LIST, operations.list_), reading=True)
resolve = handler(FileOperation(files.RESOLVE, operations.resolve), reading=True)


write_file = handler(
    FileOperation(files.WRITE_FILE, operations.write_file, nonblocking.try_write_file)
)
_WALK = FileOperation(files.WALK, walk_operation.walk)


def walk(
    context: ConnectionContext, params: files.WalkParams
) -> Awaitable[files.WalkResult | Encoded]:
    access = _access(context, params, reading=True)
    if isinstance(access, Unconfined):
        return context.in_thread(lambda: Encoded(walk_operation.walk_text(params)))
    return context.in_thread(access.perform, _WALK, params)


# ---- open files -----------------------------------------------------------------------

_OPEN = FileOpening(files.OPEN, handles.open_file)


def open_(context: ConnectionContext, params: files.OpenParams) -> Awaitable[files.OpenResult]:
    access = _access(context, params, reading=params.mode == "read")
    return context.in_thread(context.handles.adopt, params, partial(access.open, _OPEN))


def read_block(
    context: ConnectionContext, params: files.ReadBlockParams
) -> Encoded | Awaitable[Encoded]:
    handles = context.handles
    result = handles.try_read_block(params) if params.len <= nonblocking.INLINE_BYTES else None
    if result is not None:
        return _block(result)
    return context.in_thread(lambda: _block(handles.read_block(params)))


def _block(result: files.ReadBlockResult) -> Encoded:
    eof = b"true" if result.eof else b"false"
    return Encoded(b'{"chunk":"%b","eof":%b}' % (pybase64.b64encode(result.chunk), eof))


def write_block(
    context: ConnectionContext, params: files.WriteBlockParams
) -> Awaitable[files.Done]:
    return context.in_thread(context.handles.write_block, params)


def close(context: ConnectionContext, params: files.CloseParams) -> Awaitable[files.Done]:
    return context.in_thread(context.handles.close, params)


async def watch_missing(
    context: ConnectionContext, params: files.WatchMissingParams
) -> files.WatchMissingResult:
    def changed(watch_id: int) -> None:
        context.notify(files.MISSING_CHANGED, files.MissingChangedParams(watch_id))

    return files.WatchMissingResult(await context.watch.start(params, changed, context.in_thread))
