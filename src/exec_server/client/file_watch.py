"""FileWatch: the changes below a directory of the server's machine, as an async iterator."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Self

from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import path_error
from exec_server.client.handle import Handle
from exec_server.client.results import FileChange
from exec_server.errors import ExecServerError, InternalError, RpcError, SessionLost
from exec_server.protocol import files as wire
from exec_server.protocol.decoding import Notice
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Sandbox

# Changes that were received and not read. Beyond it they are dropped, and an overflow is reported.
MAX_UNREAD: Final = 4096

_OVERFLOW: Final = FileChange("", "overflow")
_ids: Final = itertools.count(1)


class FileWatch(Handle):
    """The changes below a directory, or of a file, for `async for`.

    `await`, `async with` or the first change that is asked for begins the watch; leaving the block
    or `aclose` ends it. Iteration ends when the directory is removed or renamed.
    """

    def __init__(
        self,
        session: ClientSession,
        path: PathUri,
        name: str,
        *,
        recursive: bool,
        sandbox: Sandbox | None,
    ) -> None:
        super().__init__()
        self._session = session
        self._name = name
        self._params = wire.WatchParams(0, path, recursive, sandbox)
        self._is_begun = False
        self._is_over = False
        self._failure: ExecServerError | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._unread: deque[FileChange] = deque()
        self._changed = asyncio.Event()

    def _target(self) -> str:
        return self._name

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FileChange:
        if not self._is_begun:
            await self
        while not self._unread:
            if self._failure is not None:
                raise self._failure
            if self._is_over:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._unread.popleft()

    async def _open(self) -> None:
        self._is_begun = True
        self._unsubscribe = self._session.subscribe(self)
        try:
            await self._watch()
        except BaseException:
            self._end()
            raise

    async def _close(self) -> None:
        was_watching = not self._is_over
        self._end()
        self._unread.clear()
        if was_watching:
            params = wire.UnwatchParams(self._params.watch_id)
            try:
                await self._session.call(wire.UNWATCH, params, is_retryable=True)
            except ExecServerError:
                pass  # it has ended with its connection

    async def _watch(self) -> None:
        params = self._params
        self._params = params = wire.WatchParams(
            next(_ids), params.path, params.recursive, params.sandbox
        )
        try:
            await self._session.call(wire.WATCH, params)
        except RpcError as error:
            raise path_error(error, self._name, is_confined=params.sandbox is not None) from None

    def _end(self, failure: ExecServerError | None = None) -> None:
        self._is_over = True
        self._failure = self._failure or failure
        self._unsubscribe()
        self._unsubscribe = lambda: None
        self._changed.set()

    def _add(self, change: FileChange) -> None:
        if change == _OVERFLOW or len(self._unread) >= MAX_UNREAD:
            self._unread.clear()
            change = _OVERFLOW
        self._unread.append(change)
        self._changed.set()

    def on_notice(self, notice: Notice[Any], params: Any) -> bool:
        if not isinstance(params, wire.ChangedParams) or params.watch_id != self._params.watch_id:
            return False
        if params.overflow:
            self._add(_OVERFLOW)
        for change in params.changes:
            self._add(FileChange(change.path, change.kind))
        if params.closed:
            error = None if params.error is None else InternalError(f"{self._name}: {params.error}")
            self._end(error)
        return params.overflow or params.closed or bool(params.changes)

    def on_disconnected(self) -> None:
        """The watch has ended with its connection; `on_resumed` makes another one."""

    def on_resumed(self) -> None:
        self._add(_OVERFLOW)  # changes may have been missed
        self._session.spawn(self._resume())

    async def _resume(self) -> None:
        try:
            await self._watch()
        except ExecServerError as error:
            self._end(error)
            return
        if self._is_over:  # closed meanwhile
            params = wire.UnwatchParams(self._params.watch_id)
            await self._session.call(wire.UNWATCH, params, is_retryable=True)

    def on_lost(self, error: SessionLost) -> None:
        self._end(error)
