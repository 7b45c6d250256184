"""Forwarded ports: PortForward to the server's machine, ReversePort from it.

A forwarded connection is a stream (`net.port_stream`) between two sockets; `PortStreams` is the
table of all streams. They are reset with their connection to the server, because bytes on their way
are lost. Listeners stay, or are requested again for the resumed or the new session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import Any, Final

from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import PortError, error_number
from exec_server.client.handle import Handle
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    InvalidRequest,
    RpcError,
    SessionLost,
    Unsupported,
    printable,
)
from exec_server.net.port_socket import (
    LOOPBACK,
    LOOPBACK_ADDRESSES,
    PortListener,
    PortSocket,
    connect,
    listen,
)
from exec_server.net.port_stream import WINDOW_BYTES, PortStream
from exec_server.protocol import port as wire
from exec_server.protocol.decoding import Base64, Notice
from exec_server.protocol.port import ListenerId, StreamId

log = logging.getLogger(__name__)

# Streams of one environment, as many as our server has for a connection. Further connections are
# reset.
MAX_STREAMS: Final = 256
# Streams that wait for the server to connect: a host that does not answer keeps each of them for
# ten seconds, and other calls must not wait behind them. Further ones wait in the client.
MAX_OPENING: Final = 32
# Until a program of this machine has accepted a reverse connection.
CONNECT_SECONDS: Final = 10.0
HIGHEST_PORT: Final = 65_535
_OF_STREAMS: Final = frozenset(
    notice.name
    for notice in (wire.DATA_NOTICE, wire.CREDIT_NOTICE, wire.END_NOTICE, wire.RESET_NOTICE)
)


def _check_capability(session: ClientSession) -> None:
    if not session.features.capabilities.port_forward:
        raise Unsupported("portForward", "forward the port by ssh, or use http()")


class _Peer:
    """The server's end of a stream."""

    __slots__ = ("_id", "_session", "_streams")

    def __init__(self, session: ClientSession, streams: PortStreams, stream_id: StreamId) -> None:
        self._session = session
        self._streams = streams
        self._id = stream_id

    def send_data(self, chunk: bytes) -> None:
        self._session.post(wire.DATA, wire.DataParams(self._id, Base64(chunk)))

    def send_credit(self, count: int) -> None:
        self._session.post(wire.CREDIT, wire.CreditParams(self._id, count))

    def send_end(self) -> None:
        self._session.post(wire.END, wire.EndParams(self._id))

    def send_reset(self, reason: str) -> None:
        self._session.post(wire.RESET, wire.ResetParams(self._id))

    def closed(self) -> None:
        self._streams.release(self._id)


class PortStreams:
    """The forwarded connections of an environment; a subscriber of its session."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._is_subscribed = False
        # Each stream with the PortForward or ReversePort that it belongs to.
        self._streams: dict[StreamId, tuple[PortStream, object]] = {}
        # Streams of the server that are being connected to a program of this machine, each with
        # its ReversePort; None: it was reset meanwhile, and its socket still counts.
        self._accepting: dict[StreamId, ReversePort | None] = {}
        self._connecting: set[asyncio.Future[None]] = set()
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._forwards: set[PortForward] = set()
        self._reverses: set[ReversePort] = set()
        self._listeners: dict[ListenerId, ReversePort] = {}

    def prepare(self) -> None:
        """Subscribe to the session; raises Unsupported if the server forwards no ports."""
        _check_capability(self._session)
        if not self._is_subscribed:
            self._is_subscribed = True
            self._session.subscribe(self)

    def reset_all(self, owner: object) -> None:
        """Reset the streams of a PortForward or ReversePort."""
        for stream, its_owner in tuple(self._streams.values()):
            if its_owner is owner:
                stream.reset("the port was closed")
        for stream_id, reverse in self._accepting.items():
            if reverse is owner:
                self._reset_accepting(stream_id)

    @property
    def _is_full(self) -> bool:
        return len(self._streams) + len(self._accepting) >= MAX_STREAMS

    def release(self, stream_id: StreamId) -> None:
        """Forget a stream whose socket is closed."""
        del self._streams[stream_id]

    def _add(self, stream_id: StreamId, socket: PortSocket, owner: object) -> PortStream:
        assert stream_id not in self._streams
        stream = PortStream(socket, _Peer(self._session, self, stream_id))
        self._streams[stream_id] = (stream, owner)
        socket.attach(stream)
        return stream

    def add_forward(self, forward: PortForward) -> None:
        self._forwards.add(forward)

    def remove_forward(self, forward: PortForward) -> None:
        self._forwards.discard(forward)
        self.reset_all(forward)

    def open(self, socket: PortSocket, forward: PortForward) -> None:
        """Lead a connection of this machine to the server's, or reset it."""
        if forward not in self._forwards or self._is_full:
            log.info("a connection is reset: at most %d are forwarded", MAX_STREAMS)
            socket.abort()
            return
        stream_id = StreamId(uuid.uuid4().hex)
        stream = self._add(stream_id, socket, forward)
        params = wire.OpenParams(stream_id, forward.remote_port, WINDOW_BYTES, forward.host)
        self._session.spawn(self._open(stream, params))

    async def _open(self, stream: PortStream, params: wire.OpenParams) -> None:
        try:
            async with self._opening:
                if stream.is_closed:
                    return
                answer = await self._session.call(wire.OPEN, params)
        except ExecServerError as error:
            log.info("a connection to port %d is reset: %s", params.port, printable(str(error)))
            stream.abort()
            return
        if stream.is_closed:  # meanwhile, and the server may not have known the stream then
            self._session.post(wire.RESET, wire.ResetParams(params.stream_id))
        else:
            stream.credit_received(answer.window)

    async def check_host(self, port: int, host: str) -> None:
        """Raise InvalidRequest if the server refuses the host; a silent one may answer later."""
        try:
            await self._session.call(wire.PROBE, wire.ProbeParams(port, host))
        except InvalidRequest:
            raise
        except RpcError as error:
            log.debug("%s does not answer: %s", printable(host), printable(str(error)))

    async def listen(self, reverse: ReversePort, port: int) -> tuple[ListenerId, int]:
        """Let the server listen; returns the id of the listener and its port."""
        listener_id = ListenerId(uuid.uuid4().hex)
        self._listeners[listener_id] = reverse
        try:
            answer = await self._session.call(wire.LISTEN, wire.ListenParams(listener_id, port))
        except BaseException as error:
            self.close_listener(listener_id)  # the server listens even if the call is cancelled
            self.reset_all(reverse)
            if isinstance(error, RpcError) and error_number(error.message) is not None:
                raise _port_error(error) from None
            raise
        return listener_id, answer.port

    def add_reverse(self, reverse: ReversePort) -> None:
        self._reverses.add(reverse)

    def remove_reverse(self, reverse: ReversePort) -> None:
        self._reverses.discard(reverse)
        self.reset_all(reverse)

    def close_listener(self, listener_id: ListenerId) -> None:
        if self._listeners.pop(listener_id, None) is not None:
            self._session.post(wire.CLOSE_LISTENER, wire.CloseListenerParams(listener_id))

    def _accept(self, notice: wire.AcceptedNotice) -> None:
        if self._is_reused(notice.stream_id):
            return
        reverse = self._listeners.get(notice.listener_id)
        if reverse is None or self._is_full:
            self._session.post(wire.RESET, wire.ResetParams(notice.stream_id))
            return
        self._accepting[notice.stream_id] = reverse
        connecting = self._session.spawn(self._connect(reverse, notice.stream_id, notice.window))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    def _is_reused(self, stream_id: StreamId) -> bool:
        """Whether a new stream has the id of another one, which is reset: both would be mixed."""
        stream, _ = self._streams.get(stream_id, (None, None))
        if stream is None and stream_id not in self._accepting:
            return False
        log.warning("the server has used the id of a stream again: the stream is reset")
        if stream is not None:
            stream.reset("its id was used again")
        else:
            self._reset_accepting(stream_id)
        return True

    def _reset_accepting(self, stream_id: StreamId) -> None:
        self._accepting[stream_id] = None
        self._session.post(wire.RESET, wire.ResetParams(stream_id))

    async def _connect(self, reverse: ReversePort, stream_id: StreamId, window: int) -> None:
        """Connect a stream of the server to a program of this machine."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                socket = await connect(LOOPBACK_ADDRESSES, reverse.local_port)
        except OSError as error:  # a timeout is one
            log.info("a connection to local port %d is reset: %s", reverse.local_port, error)
            self._reset_accepting(stream_id)
            return
        finally:
            owner = self._accepting.pop(stream_id)
        if owner is None:  # reset meanwhile
            socket.abort()
            return
        self._add(stream_id, socket, reverse).credit_received(window)
        # The first credit lets the server read from its socket.
        self._session.post(wire.CREDIT, wire.CreditParams(stream_id, WINDOW_BYTES))

    def on_notice(self, notice: Notice[Any], params: Any) -> bool:
        if isinstance(params, wire.AcceptedNotice):
            self._accept(params)
            return True
        if notice.name not in _OF_STREAMS:
            return False
        stream, _ = self._streams.get(params.stream_id, (None, None))
        if stream is None:
            if isinstance(params, wire.ResetNotice) and params.stream_id in self._accepting:
                self._accepting[params.stream_id] = None
        elif isinstance(params, wire.DataNotice):
            stream.data_received(params.chunk)
        elif isinstance(params, wire.CreditNotice):
            stream.credit_received(params.bytes)
        elif isinstance(params, wire.EndNotice):
            stream.end_received()
        else:
            log.debug("the server has reset a stream: %s", printable(params.reason))
            stream.reset_received()
        return stream is not None

    def on_disconnected(self) -> None:
        self._accepting = dict.fromkeys(self._accepting)
        for stream, _ in tuple(self._streams.values()):
            stream.abort()

    def on_resumed(self) -> None:
        self.listen_again()

    def on_lost(self, error: SessionLost) -> None:
        self.on_disconnected()

    def listen_again(self) -> None:
        """Let the server listen on all ports that it has listened on: the connection is new."""
        for reverse in tuple(self._reverses):
            if not reverse._is_requested:
                reverse._is_requested = True
                self._session.spawn(reverse._listen_again())

    def close(self) -> None:
        """Close all local ports, and end connections being made: the environment is closed."""
        for connecting in tuple(self._connecting):
            connecting.cancel()
        for forward in tuple(self._forwards):
            forward._stop()


class PortForward(Handle):
    """A port of this machine that leads to one of the server's machine.

    Opening it listens on 127.0.0.1; it raises OSError if the port is in use, InvalidRequest if the
    server refuses the host, and Unsupported.
    Closing it resets its connections. If the connection to the server is lost, forwarded
    connections are reset, and new ones wait until there is a connection again.
    """

    port: int
    """The port of this machine."""

    def __init__(
        self, streams: PortStreams, remote_port: int, *, local_port: int, host: str | None
    ) -> None:
        super().__init__()
        self.remote_port = _checked(remote_port, lowest=1)
        self.host = host
        self._streams = streams
        self._local_port = _checked(local_port, lowest=0)
        self._listener: PortListener | None = None

    def _target(self) -> str:
        here = self.port if hasattr(self, "port") else self._local_port
        host = "the server's machine" if self.host is None else self.host
        return f"from local port {here} to port {self.remote_port} of {host}"

    @property
    def url(self) -> str:
        """The address for a browser, if the program behind it is a web server."""
        return f"http://{LOOPBACK}:{self.port}"

    async def _open(self) -> None:
        self._streams.prepare()
        if self.host is not None:
            await self._streams.check_host(self.remote_port, self.host)
        self._listener = await listen(self._local_port, self._accept)
        self.port = self._listener.port
        self._streams.add_forward(self)

    async def _close(self) -> None:
        self._stop()

    def _accept(self, socket: PortSocket) -> None:
        self._streams.open(socket, self)

    def _stop(self) -> None:
        assert self._listener is not None
        self._listener.close()
        self._streams.remove_forward(self)


class ReversePort(Handle):
    """A port of the server's machine that leads to one of this machine.

    Opening it lets the server listen on 127.0.0.1; it raises PortError, which is an OSError, if the
    port is in use or not allowed, and Unsupported. Closing it resets its connections. If the
    connection to the server is lost, the port is closed until the session is resumed, or a new one
    is opened.
    """

    port: int
    """The port of the server's machine."""

    def __init__(self, streams: PortStreams, local_port: int, *, remote_port: int) -> None:
        super().__init__()
        self.local_port = _checked(local_port, lowest=1)
        self.port = _checked(remote_port, lowest=0)
        self._streams = streams
        self._listener_id: ListenerId | None = None  # the last one
        self._is_requested = False

    def _target(self) -> str:
        return f"from port {self.port} of the server's machine to local port {self.local_port}"

    @property
    def url(self) -> str:
        """The address for programs of the server's machine, if the one here is a web server."""
        return f"http://{LOOPBACK}:{self.port}"

    async def _open(self) -> None:
        self._streams.prepare()
        self._listener_id, self.port = await self._streams.listen(self, self.port)
        self._streams.add_reverse(self)

    async def _close(self) -> None:
        if self._listener_id is not None:
            self._streams.close_listener(self._listener_id)
        self._streams.remove_reverse(self)

    async def _listen_again(self) -> None:
        """Listen on the same port, on a new connection."""
        if self._listener_id is not None:
            self._streams.close_listener(self._listener_id)
            self._listener_id = None
        try:
            while self.is_open and self._listener_id is None:
                with contextlib.suppress(ConnectionLost):  # the next call waits for a connection
                    self._listener_id, _ = await self._streams.listen(self, self.port)
        except SessionLost:
            pass  # a new session requests it again
        except ExecServerError as error:
            log.warning("port %d of the server is no longer forwarded: %s", self.port, error)
        finally:
            self._is_requested = False
        if self._listener_id is not None and not self.is_open:  # closed meanwhile
            self._streams.close_listener(self._listener_id)


def _port_error(error: RpcError) -> PortError:
    result = PortError(error.message)
    result.code, result.data = error.code, error.data
    return result


def _checked(port: int, *, lowest: int) -> int:
    if not isinstance(port, int):
        raise TypeError(f"a port must be a number, not {type(port).__name__}")
    if not lowest <= port <= HIGHEST_PORT:
        raise ValueError(f"a port must be {lowest} ... {HIGHEST_PORT}, not {port}")
    return port
