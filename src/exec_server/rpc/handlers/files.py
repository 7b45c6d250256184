"""fs/*: what can be answered from the kernel's caches at once, the rest in threads."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import pybase64

from exec_server.core import cached, content, direct
from exec_server.core import files as operations
from exec_server.protocol import files
from exec_server.protocol.method import Call
from exec_server.protocol.sandbox import Sandbox
from exec_server.rpc.scope import Encoded, Scope, Streamed
from exec_server.sandbox.sandboxes import FilePolicy

P = TypeVar("P")
R = TypeVar("R")
P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class Attempt(Protocol[P_contra, R_co]):
    """A function of core.cached: the result, or None if finding it might block."""

    def __call__(self, params: P_contra, /, *, confined: bool) -> R_co | None: ...


# What is read on the loop itself, if the kernel has it at hand: copying more takes longer than
# handing it to a thread.
INLINE_BYTES = 65_536
# Larger files are sent as they are read, so that a read costs the same memory whatever its size.
WHOLE_BYTES = 4 * 1_048_576
# One piece of such a file. A multiple of three, so that the pieces' base64 can be joined.
PIECE_BYTES = 3 * 262_144


def _limits(scope: Scope, params: object, *, reading: bool) -> FilePolicy | None:
    """The policy that limits a file operation, None if it runs as the server."""
    sandbox: Sandbox | None = getattr(params, "sandbox", None)
    return None if sandbox is None else scope.machine.sandboxes.for_files(sandbox, reading=reading)


def in_thread(call: Call[P, R], operation: Callable[[P], R]) -> Callable[[Scope, P], Awaitable[R]]:
    """The handler of an operation of core.files that may block."""
    reading = call is files.WALK

    def handler(scope: Scope, params: P) -> Awaitable[R]:
        policy = _limits(scope, params, reading=reading)
        if policy is None:
            return scope.in_thread(operation, params)
        return scope.in_thread(policy.perform, call, params)

    return handler


def from_cache(
    call: Call[P, R], attempt: Attempt[P, R], operation: Callable[[P], R]
) -> Callable[[Scope, P], R | Awaitable[R]]:
    """The handler of an operation that `attempt` answers at once if the kernel can."""

    def handler(scope: Scope, params: P) -> R | Awaitable[R]:
        policy = _limits(scope, params, reading=True)
        if policy is None or policy.is_direct:
            result = attempt(params, confined=policy is not None)
            if result is not None:
                return result
        if policy is None:
            return scope.in_thread(operation, params)
        return scope.in_thread(policy.perform, call, params)

    return handler


def read_file(
    scope: Scope, params: files.ReadFileParams
) -> Encoded | Awaitable[Encoded | Streamed]:
    policy = _limits(scope, params, reading=True)
    if policy is None or policy.is_direct:
        result = cached.try_read_file(params, INLINE_BYTES, confined=policy is not None)
        if result is not None:
            return _whole(result.data_base64)
    return _read_file(scope, lambda: _open_for_read(params, policy))


def _open_for_read(params: files.ReadFileParams, policy: FilePolicy | None) -> int:
    if policy is None:
        return operations.open_for_read(params)[0]
    return _open_confined(files.READ_FILE, policy, params)


def _open_confined(
    call: Call[Any, Any], policy: FilePolicy, params: files.ReadFileParams | files.OpenParams
) -> int:
    descriptor = direct.open_for_read(params) if policy.is_direct else None
    return policy.open(call, params) if descriptor is None else descriptor


_BEFORE_DATA = b'{"dataBase64":"'
_AFTER_DATA = b'"}'


def _whole(data: bytes) -> Encoded:
    return Encoded(b"%b%b%b" % (_BEFORE_DATA, pybase64.b64encode(data), _AFTER_DATA))


async def _read_file(scope: Scope, opener: Callable[[], int]) -> Encoded | Streamed:
    opened = await scope.in_thread(_open, opener)
    if isinstance(opened, Encoded):
        return opened
    size = len(_BEFORE_DATA) + (opened.size + 2) // 3 * 4 + len(_AFTER_DATA)
    return Streamed(size, _pieces(scope, opened))


class _File:
    """A descriptor that is closed when the last piece of code lets go of it.

    A thread may still read from it when the connection is gone; closing it explicitly then
    would let that thread read a stranger's file with the same number.
    """

    __slots__ = ("descriptor", "size")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = 0  # as it was when we opened it: what grows meanwhile is not read

    def __del__(self) -> None:
        os.close(self.descriptor)


def _open(opener: Callable[[], int]) -> Encoded | _File:
    """Open a file, and read it too if it is not large."""
    file = _File(opener())
    info = os.fstat(file.descriptor)
    if info.st_size > WHOLE_BYTES:
        file.size = info.st_size
        return file
    with content.TURNS.take(info):
        return _whole(content.read_all(file.descriptor, info.st_size))


async def _pieces(scope: Scope, file: _File) -> AsyncIterator[bytes]:
    """The result of a large file; the next piece is read while this one is sent."""
    yield _BEFORE_DATA
    offset = 0
    following = scope.in_thread(_read_piece, file, offset)
    while True:
        piece, size = await following
        offset += size
        if size < PIECE_BYTES or offset == file.size:
            yield piece
            break
        following = scope.in_thread(_read_piece, file, offset)
        yield piece
    yield _AFTER_DATA


def _read_piece(file: _File, offset: int) -> tuple[bytes, int]:
    data = os.pread(file.descriptor, min(PIECE_BYTES, file.size - offset), offset)
    return pybase64.b64encode(data), len(data)


get_metadata = from_cache(files.GET_METADATA, cached.try_metadata, operations.get_metadata)
canonicalize = from_cache(files.CANONICALIZE, cached.try_canonicalize, operations.canonicalize)


def read_directory(
    scope: Scope, params: files.ReadDirectoryParams
) -> files.ReadDirectoryResult | Awaitable[files.ReadDirectoryResult]:
    policy = _limits(scope, params, reading=True)
    if policy is None or policy.is_direct:
        result = cached.try_read_directory(params, confined=policy is not None)
        if result is not None:
            return result
    return scope.in_thread(_read_directory, params, policy)


def _read_directory(
    params: files.ReadDirectoryParams, policy: FilePolicy | None
) -> files.ReadDirectoryResult:
    if policy is None:
        found = operations.read_directory(params)
    elif policy.is_direct and (listed := direct.read_directory(params)) is not None:
        found = listed
    else:
        result: files.ReadDirectoryResult = policy.perform(files.READ_DIRECTORY, params)
        return result
    cached.directory_was_listed(params.path.native(), len(found.entries))
    return found


def open_(scope: Scope, params: files.OpenParams) -> Awaitable[files.OpenResult]:
    policy = _limits(scope, params, reading=params.mode == "read")
    if policy is None:
        return scope.in_thread(scope.handles.open, params)
    opener = partial(_open_confined, files.OPEN, policy)
    return scope.in_thread(scope.handles.adopt, params, opener)


def read_block(scope: Scope, params: files.ReadBlockParams) -> Encoded | Awaitable[Encoded]:
    result = scope.handles.try_read_block(params) if params.len <= INLINE_BYTES else None
    if result is not None:
        return _block(result)
    return scope.in_thread(lambda: _block(scope.handles.read_block(params)))


def _block(result: files.ReadBlockResult) -> Encoded:
    eof = b"true" if result.eof else b"false"
    return Encoded(b'{"chunk":"%b","eof":%b}' % (pybase64.b64encode(result.chunk), eof))


def write_block(scope: Scope, params: files.WriteBlockParams) -> Awaitable[files.Done]:
    return scope.in_thread(scope.handles.write_block, params)


def close(scope: Scope, params: files.CloseParams) -> Awaitable[files.Done]:
    return scope.in_thread(scope.handles.close, params)


async def watch_missing(scope: Scope, params: files.WatchMissingParams) -> files.WatchMissingResult:
    def changed(watch_id: int) -> None:
        scope.notify(files.MISSING_CHANGED, files.MissingChangedParams(watch_id))

    return files.WatchMissingResult(await scope.watch.start(params, changed, scope.in_thread))
