"""fs/*: requests are answered from the kernel's caches if possible, otherwise in threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar, cast

import pybase64

from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.filesystem import handles, nonblocking, operations, safe_write
from exec_server.filesystem import walk as walk_operation
from exec_server.filesystem.watch import ChangeWatch
from exec_server.process.helper import run_helper
from exec_server.protocol import files
from exec_server.protocol.decoding import Base64
from exec_server.protocol.jsonrpc import Attached
from exec_server.protocol.paths import PathUri
from exec_server.server.context import ConnectionContext, Encoded, Streamed, WithData, check_user
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
# Watches of a connection, each with a task: far more than the directories that a client shows.
MAX_WATCHES = 64
# Changes of a burst, such as a checkout, are gathered for this long before they are sent.
GATHER_SECONDS = 0.02

P = TypeVar("P", bound=files.ConfinableParams)
R = TypeVar("R")


def _access(
    context: ConnectionContext, params: files.ConfinableParams, *, reading: bool
) -> FileAccess:
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


def _read_directory(params: files.ReadDirectoryParams) -> files.ReadDirectoryResult:
    result = operations.read_directory(params)
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
        nonblocking.read_directory_trusted,
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


def read_binary(context: ConnectionContext, params: files.ReadBlockParams) -> Awaitable[WithData]:
    handles = context.handles

    def read() -> WithData:
        block = handles.read_block(params)
        return WithData(files.ReadBinaryResult(block.eof), block.chunk)

    return context.in_thread(read)


def write_binary(
    context: ConnectionContext, request: Attached[files.WriteBinaryParams]
) -> Awaitable[files.Done]:
    params, data = request
    # A view of the message: the bytes of a block are not copied.
    block = files.WriteBlockParams(params.handle_id, params.offset, cast(Base64, data))
    return context.in_thread(context.handles.write_block, block)


def read_files(context: ConnectionContext, params: files.ReadFilesParams) -> Awaitable[WithData]:
    return context.in_thread(lambda: WithData(*operations.read_files(params)))


def write_files(
    context: ConnectionContext, request: Attached[files.WriteFilesParams]
) -> Awaitable[files.WriteFilesResult]:
    return context.in_thread(operations.write_files, *request)


async def grep(context: ConnectionContext, params: files.GrepParams) -> files.GrepResult:
    if params.user is not None:
        raise InvalidParams("fs/grep takes no user: run a program as the user")
    server = context.server
    is_over = threading.Event()
    search = partial(_search, server.ripgrep, is_over)
    access = choose_access(server.sandboxes, params.sandbox, reading=True)
    try:
        async with context.search_slots, server.search_slots:
            return await context.in_thread(
                access.perform, FileOperation(files.GREP, search), params
            )
    finally:
        is_over.set()  # a search of a client that has gone ends with the current match


def _search(
    ripgrep: str | None, is_over: threading.Event, params: files.GrepParams
) -> files.GrepResult:
    """Search without a sandbox. Blocking."""
    # Imported only here: most servers never search.
    from exec_server.filesystem.search import Ripgrep, grep

    run = partial(run_helper, env={"LC_ALL": "C.UTF-8"})
    return grep(params, None if ripgrep is None else Ripgrep(ripgrep, run), is_over.is_set)


async def watch(context: ConnectionContext, params: files.WatchParams) -> files.Done:
    if params.user is not None:
        raise InvalidParams("fs/watch takes no user")
    watches = context.change_watches
    if params.watch_id in watches:
        raise InvalidRequest(f"watch {params.watch_id} already exists")
    if len(watches) >= MAX_WATCHES:
        raise InvalidRequest(f"a connection has at most {MAX_WATCHES} watches: fs/unwatch one")
    opened = ChangeWatch(context.server.inotify(), is_recursive=params.recursive)
    watches[params.watch_id] = opened
    try:
        await context.in_thread(_open, context, params, opened)
    except BaseException:
        _end(context, params.watch_id)
        raise
    if params.watch_id in watches:  # not ended meanwhile
        context.start_task(_follow(context, params.watch_id, opened))
    return files.Done()


def unwatch(context: ConnectionContext, params: files.UnwatchParams) -> files.Done:
    """End a watch; one that has ended or never existed is not an error."""
    _end(context, params.watch_id)
    return files.Done()


def _end(context: ConnectionContext, watch_id: int) -> None:
    ended = context.change_watches.pop(watch_id, None)
    if ended is not None:
        ended.close()
        ended.wake.set()  # its task ends


def _open(context: ConnectionContext, params: files.WatchParams, opened: ChangeWatch) -> None:
    """Begin to watch under the policy of the request. Blocking."""
    path, sandbox = params.path, params.sandbox
    policy = None
    if sandbox is not None:
        policy = context.server.sandboxes.files.policy_for(sandbox, reading=True)
    if policy is None or policy.is_trusted_read:
        opened.open(path.native(), None)
        return
    # A worker finds the path: the server would tell a hidden path from a missing one.
    canonical = policy.perform(files.CANONICALIZE, files.CanonicalizeParams(path, sandbox=sandbox))
    try:
        opened.open(PathUri.from_text(canonical.path).native(), policy.visible)
    except OSError as error:
        raise policy.explain(params, error) from error


async def _follow(context: ConnectionContext, watch_id: int, watched: ChangeWatch) -> None:
    while context.change_watches.get(watch_id) is watched:
        await watched.wake.wait()
        await asyncio.sleep(GATHER_SECONDS)
        await context.drain()
        if context.change_watches.get(watch_id) is not watched:
            return
        batch = watched.take()
        if watched.needs_thread(batch):
            batch = await context.in_thread(watched.settle, batch)
        if context.change_watches.get(watch_id) is not watched:
            return
        if batch.changes or batch.overflow or watched.has_ended:
            changed = files.ChangedParams(
                watch_id, batch.on_wire(), batch.overflow, watched.has_ended, watched.error
            )
            context.notify(files.CHANGED, changed)
        if watched.has_ended:
            _end(context, watch_id)
