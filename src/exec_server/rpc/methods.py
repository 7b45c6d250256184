"""METHODS: every method of the server, its handler, and how requests for it are run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from exec_server.core.files import OPERATIONS
from exec_server.protocol import files, http, process, session
from exec_server.protocol.method import Call
from exec_server.rpc.handlers import environment as on_environment
from exec_server.rpc.handlers import files as on_files
from exec_server.rpc.handlers import http as on_http
from exec_server.rpc.handlers import process as on_process
from exec_server.rpc.scope import Encoded, Scope, Streamed

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Method(Generic[P, R]):
    """A row of the table.

    A handler returns its result, or an awaitable of it when it has to wait for something.
    `family` is the word of the error texts of the handshake. A `control` method does not
    queue behind others. One that `steps_aside` waits for an event that a later request may
    bring about, so it does not hold up those behind it.
    """

    call: Call[P, R]
    handler: Callable[[Scope, P], R | Encoded | Awaitable[R | Encoded | Streamed]]
    family: str
    control: bool = False
    steps_aside: bool = False


_ROWS: list[Method[Any, Any]] = [
    Method(session.INFO, on_environment.info, "environment info", control=True),
    Method(session.STATUS, on_environment.status, "environment status", control=True),
    Method(process.START, on_process.start, "exec"),
    Method(process.READ, on_process.read, "exec", steps_aside=True),
    Method(process.WRITE, on_process.write, "exec", steps_aside=True),
    Method(process.CLOSE_STDIN, on_process.close_stdin, "exec", steps_aside=True),
    Method(process.RESIZE, on_process.resize, "exec", control=True),
    Method(process.SIGNAL, on_process.signal, "exec", control=True),
    Method(process.TERMINATE, on_process.terminate, "exec", control=True),
    Method(process.LIST, on_process.list_, "exec"),
    Method(files.READ_FILE, on_files.read_file, "filesystem"),
    Method(files.OPEN, on_files.open_, "filesystem"),
    Method(files.READ_BLOCK, on_files.read_block, "filesystem"),
    Method(files.WRITE_BLOCK, on_files.write_block, "filesystem"),
    Method(files.CLOSE, on_files.close, "filesystem", control=True),
    Method(files.GET_METADATA, on_files.get_metadata, "filesystem"),
    Method(files.CANONICALIZE, on_files.canonicalize, "filesystem"),
    Method(files.READ_DIRECTORY, on_files.read_directory, "filesystem"),
    Method(files.WATCH_MISSING, on_files.watch_missing, "filesystem"),
    Method(http.REQUEST, on_http.request, "http", steps_aside=True),
]

# The operations that only ever run in a thread need no handler of their own.
_ROWS += [
    Method(call, on_files.in_thread(call, operation), "filesystem")
    for call, operation in OPERATIONS.items()
    if call not in {row.call for row in _ROWS}
]

METHODS: dict[str, Method[Any, Any]] = {row.call.name: row for row in _ROWS}
