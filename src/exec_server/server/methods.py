"""Every method of the server, its handler, and how its requests are scheduled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast

from exec_server.protocol import process
from exec_server.protocol.decoding import Call, Params, Result, decode, decode_unit
from exec_server.protocol.jsonrpc import Attached
from exec_server.server.context import ConnectionContext, Encoded, Streamed, WithData

P = TypeVar("P")
R = TypeVar("R", bound=Result)

# The outcome of a handler that had to wait, and that of any handler.
Waited = Result | Encoded | Streamed | WithData
Outcome = Result | Encoded | Awaitable[Waited]


class Method:
    """A row of the table.

    The handler returns its result, or an awaitable if it has to wait. `family` is a word in the
    error texts of the handshake. `control` requests do not queue behind others. One that
    `yields_slot` waits for an event that a later request may cause. Requests that `takes_data` are
    binary messages.
    """

    __slots__ = (
        *("cancels_start", "control", "decode_params", "family", "handle", "invoke", "name"),
        *("starts_process", "takes_data", "yields_slot"),
    )

    def __init__(
        self,
        call: Call[P, R],
        handler: Callable[
            [ConnectionContext, P], R | Encoded | Awaitable[R | Encoded | Streamed | WithData]
        ],
        family: str,
        *,
        control: bool = False,
        yields_slot: bool = False,
        takes_data: bool = False,
    ) -> None:
        decode_params = _params_decoder(call)

        def invoke(context: ConnectionContext, raw_params: object) -> Outcome:
            return handler(context, decode_params(raw_params, context.server.environment.cwd))

        self.invoke = invoke
        self.handle: Callable[[ConnectionContext, Any], Outcome] = handler
        self.decode_params: Callable[[object, str | None], object] = decode_params
        self.name = call.name
        self.family = family
        self.control = control
        self.yields_slot = yields_slot
        self.takes_data = takes_data
        self.cancels_start = call.name == process.TERMINATE.name
        self.starts_process = call.name in (process.START.name, process.ATTACH.name)


class DecodedParams:
    """The params of a request, or the error for the client if they are invalid."""

    __slots__ = ("_error", "_params")

    def __init__(self, method: Method, raw_params: object, server_cwd: str | None) -> None:
        self._params: object = None
        self._error: Exception | None = None
        try:
            self._params = method.decode_params(raw_params, server_cwd)
        except Exception as error:  # raised again by `get`
            self._error = error

    def attach(self, data: memoryview) -> None:
        """Add the data of a binary message."""
        self._params = Attached(self._params, data)

    def get(self) -> object:
        """The params; raises InvalidParams."""
        if self._error is not None:
            raise self._error
        return self._params


def _params_decoder(call: Call[P, R]) -> Callable[[object, str | None], P]:
    """A function of the raw params and of the server's directory."""
    if call.params is None:
        return cast("Callable[[object, str | None], P]", _decode_nothing)  # it is a Call[None, R]
    assert issubclass(call.params, Params)
    return partial(decode, call.params)


def _with_data(
    handler: Callable[[ConnectionContext, Attached[P]], R | Awaitable[R]],
) -> Callable[[ConnectionContext, P], R | Awaitable[R]]:
    """A handler that takes params with data; a request in text form has none."""

    def handle(context: ConnectionContext, params: P | Attached[P]) -> R | Awaitable[R]:
        request = params if isinstance(params, Attached) else Attached(params, b"")
        return handler(context, request)

    return handle


def _decode_nothing(value: object, server_cwd: str | None) -> None:
    if value is not None:
        decode_unit(value)


def _environment_rows() -> list[Method]:
    from exec_server.protocol import codex, session
    from exec_server.server.handlers import environment as handlers

    discovery = "capability discovery"
    return [
        Method(session.INFO, handlers.info, "environment info", control=True),
        Method(session.STATUS, handlers.status, "environment status", control=True),
        Method(codex.READ_CONFIG, handlers.read, "environment config"),
        Method(codex.DISCOVER, handlers.discover, discovery, yields_slot=True),
        Method(codex.DISCOVER_ROOTS, handlers.discover_roots, discovery, yields_slot=True),
    ]


def _session_rows() -> list[Method]:
    from exec_server.protocol import session
    from exec_server.server.handlers import session as handlers

    return [Method(session.CLOSE, handlers.close, "session", control=True)]


def _process_rows() -> list[Method]:
    from exec_server.server.handlers import process as handlers

    return [
        Method(process.START, handlers.start, "exec"),
        Method(process.READ, handlers.read, "exec", yields_slot=True),
        Method(process.WRITE, handlers.write, "exec", yields_slot=True),
        Method(
            process.WRITE_BINARY,
            _with_data(handlers.write_binary),
            "exec",
            yields_slot=True,
            takes_data=True,
        ),
        Method(process.CLOSE_STDIN, handlers.close_stdin, "exec", yields_slot=True),
        Method(process.RESIZE, handlers.resize, "exec", control=True),
        Method(process.SIGNAL, handlers.signal, "exec", control=True),
        Method(process.TERMINATE, handlers.terminate, "exec", control=True),
        Method(process.LIST, handlers.list_, "exec"),
        Method(process.SET_FLOW, handlers.set_flow, "exec", control=True),
        Method(process.ATTACH, handlers.attach, "exec"),
        Method(process.DETACH, handlers.detach, "exec"),
        Method(process.LIST_DETACHED, handlers.list_detached, "exec"),
    ]


def _file_rows() -> list[Method]:
    from exec_server.filesystem.operations import OPERATIONS
    from exec_server.protocol import files
    from exec_server.server.file_access import FileOperation
    from exec_server.server.handlers import files as handlers

    family = "filesystem"
    rows = [
        Method(files.READ_FILE, handlers.read_file, family),
        Method(files.WRITE_FILE, handlers.write_file, family),
        Method(files.OPEN, handlers.open_, family),
        Method(files.READ_BLOCK, handlers.read_block, family),
        Method(files.WRITE_BLOCK, handlers.write_block, family),
        Method(files.CLOSE, handlers.close, family, control=True),
        Method(files.READ_BINARY, handlers.read_binary, family),
        Method(files.WRITE_BINARY, _with_data(handlers.write_binary), family, takes_data=True),
        Method(files.READ_FILES, handlers.read_files, family),
        Method(files.WRITE_FILES, _with_data(handlers.write_files), family, takes_data=True),
        Method(files.GET_METADATA, handlers.get_metadata, family),
        Method(files.CANONICALIZE, handlers.canonicalize, family),
        Method(files.READ_DIRECTORY, handlers.read_directory, family),
        Method(files.LIST, handlers.list_, family),
        Method(files.RESOLVE, handlers.resolve, family),
        Method(files.WALK, handlers.walk, family),
        Method(files.WATCH_MISSING, handlers.watch_missing, family),
        Method(files.GREP, handlers.grep, family, yields_slot=True),
        Method(files.WATCH, handlers.watch, family),
        Method(files.UNWATCH, handlers.unwatch, family, control=True),
    ]
    # Operations that always run in a thread need no handler of their own.
    names = {row.name for row in rows}
    return rows + [
        Method(call, handlers.handler(FileOperation(call, function)), family)
        for call, function in OPERATIONS.items()
        if call.name not in names
    ]


def _http_rows() -> list[Method]:
    from exec_server.protocol import http
    from exec_server.server.handlers import http as handlers

    return [Method(http.REQUEST, handlers.request, "http", yields_slot=True)]


def _port_rows() -> list[Method]:
    from exec_server.protocol import port
    from exec_server.server.handlers import port as handlers

    # Control methods: a forwarded connection does not wait for the copy of a file.
    return [
        Method(port.PROBE, handlers.probe, "port", control=True, yields_slot=True),
        Method(port.OPEN, handlers.open_, "port", control=True, yields_slot=True),
        Method(port.LISTEN, handlers.listen, "port", control=True, yields_slot=True),
        Method(port.CLOSE_LISTENER, handlers.close_listener, "port", control=True),
        Method(port.DATA, handlers.data, "port", control=True),
        Method(port.CREDIT, handlers.credit, "port", control=True),
        Method(port.END, handlers.end, "port", control=True),
        Method(port.RESET, handlers.reset, "port", control=True),
    ]


# By the first part of their names. The rows of a family are made, and its modules imported, for the
# first request to it: a server answers its first client a third earlier.
_ROWS: dict[str, Callable[[], list[Method]]] = {
    **dict.fromkeys(
        ("environment", "environmentConfig", "capabilities", "capabilityRoots"), _environment_rows
    ),
    "session": _session_rows,
    "process": _process_rows,
    "fs": _file_rows,
    "http": _http_rows,
    "port": _port_rows,
}

METHODS: dict[str, Method] = {}
"""The methods that were loaded, by name."""


def load(name: str) -> None:
    """Add the family of a method to METHODS; raises ImportError or OSError."""
    family = name.partition("/")[0]
    make_rows = _ROWS.get(family)
    if make_rows is not None:
        METHODS.update((row.name, row) for row in make_rows())
        _ROWS.pop(family, None)  # once, also for names that do not exist


def load_all() -> dict[str, Method]:
    """METHODS with all families; raises ImportError or OSError."""
    for family in tuple(_ROWS):
        load(family)
    return METHODS
