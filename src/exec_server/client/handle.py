"""Handle, the life of everything that the client opens and closes, and ContextTask.

A handle is opened once, by `await` or `async with`, and may be closed in another task. Scopes such
as TaskGroup belong to one task: a handle that needs one keeps it in a ContextTask.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from typing import Any, Generic, Self, TypeVar

from exec_server.host.event_loop import ForkGuard

T = TypeVar("T")


class _State(Enum):
    NEW = auto()
    OPENING = auto()
    OPEN = auto()  # by `await`
    ENTERED = auto()  # by `async with`
    CLOSING = auto()
    CLOSED = auto()  # or opening has failed


_USABLE = frozenset({_State.OPEN, _State.ENTERED})
_WORDS = {
    _State.NEW: "not open",
    _State.OPENING: "opening",
    _State.OPEN: "open",
    _State.ENTERED: "open",
    _State.CLOSING: "closing",
    _State.CLOSED: "closed",
}


class Handle(ABC):
    """Opened by `await` or `async with`; closed by `aclose` or by leaving the block."""

    def __init__(self) -> None:
        self.__state = _State.NEW
        self.__fork = ForkGuard()
        self.__loop: asyncio.AbstractEventLoop | None = None  # from opening on
        self.__settled = asyncio.Event()  # not OPENING and not CLOSING, from then on

    @abstractmethod
    async def _open(self) -> None:
        """Open; called once. If it raises, it has cleaned up."""

    @abstractmethod
    async def _close(self) -> None:
        """Close; called at most once, after `_open` has returned, perhaps in another task."""

    def _target(self) -> str:
        """What the handle leads to, without secrets, for its representation."""
        return ""

    def __repr__(self) -> str:
        target = self._target()
        name = f"{type(self).__name__} {target}" if target else type(self).__name__
        state = _State.CLOSED if self._is_without_loop else self.__state
        return f"<{name}, {_WORDS[state]}>"

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__open(_State.OPEN).__await__()

    async def __aenter__(self) -> Self:
        if self.__state is _State.OPEN:
            self.__state = _State.ENTERED
            return self
        return await self.__open(_State.ENTERED)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close, as leaving the block does; in any task, and as often as you like.

        Raises RuntimeError in another event loop than that of the opening, unless that loop is
        closed: its end has closed the handle too. The child of a fork leaves closing to its parent.
        """
        if self.__fork.is_forked:
            return
        if self.__loop is not None and self.__loop is not asyncio.get_running_loop():
            if not self.__loop.is_closed():
                noun = type(self).__name__
                raise RuntimeError(f"this {noun} belongs to another event loop: close it there")
            self.__state = _State.CLOSED
        while self.__state in (_State.OPENING, _State.CLOSING):
            await self.__settled.wait()
        if self.__state not in _USABLE:
            self.__state = _State.CLOSED
            return
        self.__state = _State.CLOSING
        self.__settled.clear()
        try:
            await self._close()
        finally:
            self.__settle(_State.CLOSED)

    @property
    def is_open(self) -> bool:
        """Whether it was opened and not closed; the end of its event loop closes it too."""
        return self.__state in _USABLE and not self._is_without_loop

    @property
    def _is_without_loop(self) -> bool:
        """Whether the end of its event loop closed it, before its user did."""
        return self.__state in _USABLE and self.__loop is not None and self.__loop.is_closed()

    def _not_open(self, noun: str) -> RuntimeError:
        """The error for a use before the opening or after the close."""
        is_new = self.__state in (_State.NEW, _State.OPENING)
        how = "await it, or use it with `async with`" if is_new else "it was closed"
        return RuntimeError(f"{noun} is not open: {how}")

    async def __open(self, state: _State) -> Self:
        if self.__state is not _State.NEW:
            noun = type(self).__name__
            raise RuntimeError(f"this {noun} can be opened only once: make another one instead")
        self.__state = _State.OPENING
        self.__loop = asyncio.get_running_loop()
        try:
            await self._open()
        except BaseException:
            self.__settle(_State.CLOSED)
            raise
        self.__settle(state)
        return self

    def __settle(self, state: _State) -> None:
        self.__state = state
        self.__settled.set()


# The contexts that are open. A program that ends without closing them would leave its processes
# running until the server gives up the session.
_OPEN: set[ContextTask[Any]] = set()


@atexit.register
def _close_open() -> None:
    """Close the contexts of loops that do not run any more."""
    for context in list(_OPEN):
        with contextlib.suppress(Exception):
            context.close_in_stopped_loop()


class ContextTask(Generic[T]):
    """A task that keeps an async context open between `open` and `close`, in any tasks.

    `asyncio.run` cancels it at its end, and it leaves its context in order.
    """

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context
        self._fork = ForkGuard()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> T:
        """Enter the context; if this is cancelled, the context is left again."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[T] = loop.create_future()
        # Not in a TaskGroup: the context may be left long after the calling task has ended.
        self._task = task = loop.create_task(self._keep(opened))
        _OPEN.add(self)
        task.add_done_callback(lambda _: _OPEN.discard(self))
        try:
            return await opened
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # mark it as retrieved
            raise

    async def close(self) -> None:
        """Leave the context, even if the caller is cancelled; raises its exception."""
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()

    def close_in_stopped_loop(self) -> None:
        """Run the loop until the context is left, unless it is running, closed or of a parent."""
        assert self._task is not None
        loop = self._task.get_loop()
        if not self._fork.is_forked and not loop.is_running() and not loop.is_closed():
            loop.run_until_complete(self.close())

    async def _keep(self, opened: asyncio.Future[T]) -> None:
        try:
            async with self._context as value:
                if not opened.done():
                    opened.set_result(value)
                await self._stop.wait()
        except Exception as error:  # an edge: the task that opens or closes raises it
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            opened.cancel()  # unless it is done
