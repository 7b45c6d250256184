"""PortTable: the forwarded connections and listeners of one client; `PortSockets` are passed in."""

from __future__ import annotations

import asyncio
import errno
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from exec_server.errors import (
    InternalError,
    InvalidParams,
    InvalidRequest,
    os_error_text,
    printable,
)
from exec_server.net.port_stream import WINDOW_BYTES, PortStream, StreamSocket
from exec_server.protocol import port as wire
from exec_server.protocol.decoding import Notice
from exec_server.protocol.port import ListenerId, StreamId

# Streams of one connection, connecting ones included: a browser opens six for each page, a load
# test some hundred. Further ones are refused.
MAX_STREAMS = 256
# Streams of all connections of a server, each with a descriptor and at most a window of unwritten
# bytes: 256 MiB together. Further ones are refused.
MAX_SERVER_STREAMS = 1024
# Listeners of one connection and of all connections, each with a descriptor. Further ones are
# refused.
MAX_LISTENERS = 32
MAX_SERVER_LISTENERS = 256
# Until a host has accepted: loopback answers at once, and another host that has not answered by
# then is down.
CONNECT_SECONDS = 10.0
# The ids are repeated in every message, so their length is limited.
ID_BYTES = 256

Notify = Callable[[Notice[msgspec.Struct], msgspec.Struct], None]


class TableSocket(StreamSocket, Protocol):
    """A connected socket without a stream."""

    def attach(self, stream: PortStream) -> None: ...


class TableListener(Protocol):
    @property
    def port(self) -> int: ...

    def close(self) -> None: ...


class PortSocketFactory(Protocol):
    """Opens sockets; all of it raises OSError, and RpcError for hosts that are refused."""

    async def connect(self, host: str | None, port: int) -> TableSocket: ...

    async def listen(self, port: int, accept: Callable[[TableSocket], None]) -> TableListener: ...


class PortResources(msgspec.Struct):
    """The sockets of a server, and how many its connections use."""

    sockets: PortSocketFactory
    streams: int = 0
    listeners: int = 0


class _Peer:
    """The client's end of a stream."""

    __slots__ = ("_id", "_table")

    def __init__(self, table: PortTable, stream_id: StreamId) -> None:
        self._table = table
        self._id = stream_id

    def send_data(self, chunk: bytes) -> None:
        self._table.sent(self._id)
        self._table.notify(wire.DATA_NOTICE, wire.DataNotice(self._id, chunk))

    def send_credit(self, count: int) -> None:
        self._table.notify(wire.CREDIT_NOTICE, wire.CreditNotice(self._id, count))

    def send_end(self) -> None:
        self._table.notify(wire.END_NOTICE, wire.EndNotice(self._id))

    def send_reset(self, reason: str) -> None:
        self._table.notify(wire.RESET_NOTICE, wire.ResetNotice(self._id, reason))

    def closed(self) -> None:
        self._table.release(self._id)


class PortTable:
    """The streams and listeners of a connection; all of them end with it."""

    def __init__(self, resources: PortResources | None, notify: Notify) -> None:
        """Without `resources`, all ports are refused."""
        self.notify = notify
        self._resources = resources
        # In the order of their last data, the least recent first. None: it is connecting.
        self._streams: OrderedDict[StreamId, PortStream | None] = OrderedDict()
        self._listeners: dict[ListenerId, TableListener | None] = {}
        self._probing = 0  # sockets of port/probe
        self._accepted = 0
        self._is_paused = False
        self._is_closed = False

    def probe(self, params: wire.ProbeParams) -> Awaitable[wire.ProbeResult]:
        resources = self._usable()
        self._check_room(resources)
        self._probing += 1
        resources.streams += 1
        return self._probe(resources, params)

    async def _probe(self, resources: PortResources, params: wire.ProbeParams) -> wire.ProbeResult:
        try:
            (await _connected(resources, params)).close()
        except ConnectionRefusedError:
            return wire.ProbeResult(accepts=False)
        except OSError as error:
            raise _failed(params, error) from None
        finally:
            self._probing -= 1
            resources.streams -= 1
        return wire.ProbeResult(accepts=True)

    def open(self, params: wire.OpenParams) -> Awaitable[wire.OpenResult]:
        resources = self._usable()
        _check_id(params.stream_id)
        if params.stream_id in self._streams:
            raise InvalidRequest(f"stream {params.stream_id} already exists")
        self._check_room(resources)
        self._reserve(params.stream_id)
        return self._open(resources, params)

    async def _open(self, resources: PortResources, params: wire.OpenParams) -> wire.OpenResult:
        try:
            socket = await _connected(resources, params)
        except OSError as error:
            self.release(params.stream_id)
            raise _failed(params, error) from None
        except BaseException:
            self.release(params.stream_id)
            raise
        stream = self._add(params.stream_id, socket)
        # Later: the response precedes the first data.
        asyncio.get_running_loop().call_soon(stream.credit_received, params.window)
        return wire.OpenResult(WINDOW_BYTES)

    def listen(self, params: wire.ListenParams) -> Awaitable[wire.ListenResult]:
        resources = self._usable()
        _check_id(params.listener_id)
        if params.listener_id in self._listeners:
            raise InvalidRequest(f"listener {params.listener_id} already exists")
        if len(self._listeners) >= MAX_LISTENERS:
            raise InvalidRequest(f"at most {MAX_LISTENERS} ports may be listened on per connection")
        if resources.listeners >= MAX_SERVER_LISTENERS:
            raise InvalidRequest(f"at most {MAX_SERVER_LISTENERS} ports may be listened on")
        self._listeners[params.listener_id] = None
        resources.listeners += 1
        return self._listen(resources, params)

    async def _listen(
        self, resources: PortResources, params: wire.ListenParams
    ) -> wire.ListenResult:
        name = params.listener_id
        try:
            listener = await resources.sockets.listen(
                params.port, lambda socket: self._accept(name, socket)
            )
        except OSError as error:
            self._forget_listener(name)
            raise _with_number(f"cannot listen on port {params.port}", error) from None
        except BaseException:
            self._forget_listener(name)
            raise
        if name in self._listeners:
            self._listeners[name] = listener
        else:  # closed meanwhile
            listener.close()
        return wire.ListenResult(listener.port)

    def close_listener(self, listener_id: ListenerId) -> None:
        """Accept no more connections; accepted ones stay open."""
        listener = self._listeners.get(listener_id)
        self._forget_listener(listener_id)
        if listener is not None:
            listener.close()

    def stream(self, stream_id: StreamId) -> PortStream | None:
        """A stream that is open; None if it has ended, which the client may not know yet."""
        return self._streams.get(stream_id)

    def _accept(self, listener_id: ListenerId, socket: TableSocket) -> None:
        """Take a connection of a listener, or reset it if there are too many."""
        self._accepted += 1
        stream_id = StreamId(f"{listener_id}/{self._accepted}")
        try:
            self._check_room(self._usable())
        except InvalidRequest:
            is_refused = True
        else:
            # The client might have chosen this id for a stream of its own.
            is_refused = listener_id not in self._listeners or stream_id in self._streams
        if is_refused:
            socket.abort()
            return
        self._reserve(stream_id)
        self._add(stream_id, socket)
        self.notify(wire.ACCEPTED, wire.AcceptedNotice(listener_id, stream_id, WINDOW_BYTES))

    def sent(self, stream_id: StreamId) -> None:
        """Note that a stream has sent data: after a pause the others come first."""
        self._streams.move_to_end(stream_id)

    def release(self, stream_id: StreamId) -> None:
        """Forget a stream whose socket is closed."""
        assert self._resources is not None
        del self._streams[stream_id]
        self._resources.streams -= 1

    def pause_reading(self) -> None:
        """Read from no socket: the client does not take what is sent to it."""
        self._is_paused = True
        for stream in tuple(self._streams.values()):
            if stream is not None:
                stream.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        for stream in tuple(self._streams.values()):
            if stream is not None:
                stream.resume_reading()

    def close(self) -> None:
        """Reset all streams and close all listeners: the connection has ended."""
        self._is_closed = True
        for listener_id in tuple(self._listeners):
            self.close_listener(listener_id)
        for stream in tuple(self._streams.values()):
            if stream is not None:
                stream.abort()

    def _usable(self) -> PortResources:
        if self._resources is None:
            raise InternalError("this exec-server forwards no ports")
        return self._resources

    def _check_room(self, resources: PortResources) -> None:
        if len(self._streams) + self._probing >= MAX_STREAMS:
            raise InvalidRequest(f"at most {MAX_STREAMS} streams may be open per connection")
        if resources.streams >= MAX_SERVER_STREAMS:
            raise InvalidRequest(f"at most {MAX_SERVER_STREAMS} streams may be open")

    def _reserve(self, stream_id: StreamId) -> None:
        assert self._resources is not None
        self._streams[stream_id] = None
        self._resources.streams += 1

    def _add(self, stream_id: StreamId, socket: TableSocket) -> PortStream:
        peer = _Peer(self, stream_id)
        stream = PortStream(socket, peer, is_link_paused=self._is_paused)
        self._streams[stream_id] = stream
        socket.attach(stream)
        if self._is_closed:
            stream.abort()
        return stream

    def _forget_listener(self, listener_id: ListenerId) -> None:
        if listener_id in self._listeners:
            assert self._resources is not None
            del self._listeners[listener_id]
            self._resources.listeners -= 1


def _check_id(name: str) -> None:
    if len(name.encode()) > ID_BYTES:
        raise InvalidParams(f"ids of streams and listeners must not exceed {ID_BYTES} bytes")


async def _connected(
    resources: PortResources, params: wire.OpenParams | wire.ProbeParams
) -> TableSocket:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            return await resources.sockets.connect(params.host, params.port)
    except TimeoutError as error:
        raise OSError(error.errno or errno.ETIMEDOUT, "Operation timed out") from None


def _failed(params: wire.OpenParams | wire.ProbeParams, error: OSError) -> InternalError:
    place = f"{params.host or 'localhost'}:{params.port}"
    return _with_number(f"cannot connect to {printable(place)}", error)


def _with_number(text: str, error: OSError) -> InternalError:
    """The error of the operating system, with its number for clients that look for it."""
    failure = InternalError(f"{text}: {os_error_text(error)}")
    failure.data = {"errno": error.errno}
    return failure
