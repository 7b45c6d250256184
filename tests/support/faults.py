"""Faults in a running server: every function of chosen classes and modules can be made to raise.

`PREPARATION` is for `start_prepared`: it wraps the functions in the server. A shared page of memory
names the one that raises at its next call, once, and counts how often that has happened; so the
test controls a server without a message to it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "EXEC_SERVER_TEST_FAULTS"
PREPARATION = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.faults import install
install()
"""

# What exists for each client: a failure of it must not reach another client.
_CLASSES = (
    "filesystem.watch.ChangeWatch",
    "filesystem.handles.HandleTable",
    "filesystem.inotify.Subscription",
    "filesystem.watch.MissingWatch",
    "net.inbox.Reservation",
    "net.inbox.Inbox",
    "net.outbox.Outbox",
    "net.websocket.frames.FrameReader",
    "net.websocket.server.WebSocketStream",
    "net.websocket.socket.FramedSocket",
    "net.websocket.socket.FrameWriter",
    "process.output.OutputLog",
    "process.process.Process",
    "process.process.StdinQueue",
    "process.table.ProcessTable",
    "server.detached.Attachment",
    "server.detached.Broadcast",
    "server.connection.ClientRequests",
    "server.connection.Connection",
    "server.context.ConnectionContext",
    "server.lanes.Lanes",
    "server.port_table.PortTable",
    "server.session.Session",
)
_RELAY_CLASSES = (
    "net.relay_stream.RelayStream",
    "relay.records.RelayChannel",
    "server.connection.Connection",
    "server.context.ConnectionContext",
    "server.session.Session",
)
# Functions that others look up in their modules.
_MODULES = ("protocol.jsonrpc",)
# Called for all clients alike, by a timer and not by a client's action: `test_listener` has those.
_EXCLUDED = frozenset({"net.websocket.server.WebSocketStream.tick"})

_STATE = struct.Struct("II")  # the number of the armed point, 0 for none; how many have raised


class Fault(Exception):
    """Raised by an armed point; its text cannot be encoded."""


def points(names: tuple[str, ...] = _CLASSES + _MODULES) -> list[str]:
    """The functions that can be made to raise, as `module.Class.function`; the handlers follow."""
    found = [
        f"{name}.{function}"
        for name in names
        for function, value in vars(_resolve(name)).items()
        if inspect.isfunction(value)
        and not function.startswith("__")
        and (inspect.isclass(_resolve(name)) or value.__module__.endswith(name))
    ]
    return [name for name in found if name not in _EXCLUDED]


def relay_points() -> list[str]:
    return points(_RELAY_CLASSES)


def methods() -> list[str]:
    """Every method of the server, whose handler can be made to raise, at once or later."""
    from exec_server.server.methods import load_all

    return sorted(load_all())


def all_points() -> list[str]:
    """The points in the order of their numbers, which begin with 1."""
    handlers = [f"{when} {name}" for when in ("call", "await") for name in methods()]
    names = (*_CLASSES, *_MODULES, *_RELAY_CLASSES)
    return [*dict.fromkeys(points(names)), *handlers]


def _resolve(name: str) -> Any:
    try:
        return importlib.import_module(f"exec_server.{name}")
    except ImportError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(f"exec_server.{module}"), attribute)


class Control:
    """The test's end of the shared page."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(mmap.PAGESIZE))
        self.environment = {VARIABLE: str(path)}
        self._numbers = {name: number for number, name in enumerate(all_points(), start=1)}
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def arm(self, point: str) -> None:
        _STATE.pack_into(self._page, 0, self._numbers[point], 0)

    def disarm(self) -> bool:
        """Whether the armed point has raised."""
        _, count = _STATE.unpack_from(self._page)
        _STATE.pack_into(self._page, 0, 0, 0)
        return bool(count)


def install() -> None:
    """Wrap all points; in the server, before it serves."""
    with Path(os.environ.pop(VARIABLE)).open("r+b") as file:
        page = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def check(number: int) -> None:
        armed, count = _STATE.unpack_from(page)
        if armed == number:
            _STATE.pack_into(page, 0, 0, count + 1)
            raise Fault("an injected fault \udcff")

    from exec_server.server.methods import load_all

    for number, name in enumerate(all_points(), start=1):
        when, _, method = name.partition(" ")
        if method:
            row = load_all()[method]
            for attribute in ("invoke", "handle"):
                wrap = _raising_call if when == "call" else _raising_await
                setattr(row, attribute, wrap(getattr(row, attribute), number, check))
            continue
        holder, _, attribute = name.rpartition(".")
        owner = _resolve(holder)
        setattr(owner, attribute, _wrapped(vars(owner)[attribute], number, check))


def _raising_call(function: Callable[..., Any], number: int, check: Callable[[int], None]) -> Any:
    def call(*arguments: Any) -> Any:
        check(number)
        return function(*arguments)

    return call


def _raising_await(function: Callable[..., Any], number: int, check: Callable[[int], None]) -> Any:
    async def fail() -> None:
        raise Fault("an injected fault after a wait \udcff")

    def call(*arguments: Any) -> Any:
        try:
            check(number)
        except Fault:
            return fail()
        return function(*arguments)

    return call


def _wrapped(function: Callable[..., Any], number: int, check: Callable[[int], None]) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wait(*arguments: Any, **named: Any) -> Any:
            check(number)
            return await function(*arguments, **named)

        return wait
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def generate(*arguments: Any, **named: Any) -> Any:
            check(number)
            async for each in function(*arguments, **named):
                yield each

        return generate

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        check(number)
        return function(*arguments, **named)

    return call


def numbered(names: list[str], count: int) -> Iterator[list[str]]:
    """The names in `count` parts of nearly the same size."""
    for index in range(count):
        yield names[index::count]
