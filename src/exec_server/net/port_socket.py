"""PortSocket: the socket of a forwarded connection; connecting and listening for it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast

from exec_server.errors import InternalError, InvalidRequest, os_error_text, printable
from exec_server.net.port_stream import CHUNK_BYTES, WINDOW_BYTES, PortStream
from exec_server.net.socket_options import reset_on_close

# The host of listeners, and the first one that connections to loopback try.
LOOPBACK: Final = "127.0.0.1"
# Programs that listen on `localhost` have chosen one of these.
LOOPBACK_ADDRESSES: Final = (LOOPBACK, "::1")
# Connections that a listener has not accepted yet; the kernel makes others wait.
BACKLOG: Final = 128
# Bytes that the transport gets at a time: credit returns when the kernel has taken them, while the
# rest of the window waits.
WRITE_BYTES: Final = WINDOW_BYTES // 4

_NEEDS_FLAG: Final = "the server connects to other hosts only with --allow-port-hosts"

Accept = Callable[["PortSocket"], None]


class PortSocket(asyncio.BufferedProtocol):
    """A StreamSocket; its stream, which `attach` sets, decides when it reads.

    uvloop reads after `connection_made` even if that paused it: early data and an early end are
    kept until `resume_reading`. A transport needs hundreds of bytes for each waiting chunk, even of
    one byte, so bytes are gathered here until the kernel has taken the chunk before.
    """

    def __init__(self, accept: Accept | None = None) -> None:
        self._accept = accept
        self._transport: asyncio.Transport | None = None
        self._stream: PortStream | None = None
        self._buffer = bytearray(CHUNK_BYTES)
        self._is_reading = False
        self._early = b""
        self._has_early_eof = False
        self._gathered = bytearray()  # written to the socket, and not to the transport yet
        self._is_writing_paused = False  # the transport has bytes that the kernel has not taken
        self._end_reason: str | None = None

    @property
    def is_lost(self) -> bool:
        return self._end_reason is not None

    def attach(self, stream: PortStream) -> None:
        """Report all events from now on to `stream`."""
        self._stream = stream
        if self._end_reason is not None:
            stream.socket_lost(self._end_reason)

    def is_self_connected(self) -> bool:
        """Whether it leads to itself: the kernel may choose the dialled port as its own."""
        assert self._transport is not None
        return bool(
            self._transport.get_extra_info("sockname") == self._transport.get_extra_info("peername")
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0, low=0)
        self._transport.pause_reading()
        if self._accept is not None:
            self._accept(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        size = CHUNK_BYTES if self._stream is None else self._stream.readable_bytes
        return memoryview(self._buffer)[:size]

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._buffer[:nbytes])
        if self._is_reading:
            assert self._stream is not None
            self._stream.data_read(data)
        else:
            assert self._transport is not None
            self._early += data
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        if self._is_reading:
            assert self._stream is not None
            self._stream.eof_read()
        else:
            self._has_early_eof = True
        return True  # the other direction stays open

    def pause_writing(self) -> None:
        """The other end runs out of credit by itself."""
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        self._write_gathered()
        if self._stream is not None:
            self._stream.return_credit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_reason = os_error_text(exc) if isinstance(exc, OSError) else "connection closed"
        self._buffer = bytearray(1)  # a stream may be kept for longer than its socket
        self._gathered = bytearray()
        if self._stream is not None:
            self._stream.socket_lost(self._end_reason)

    def pause_reading(self) -> None:
        self._is_reading = False
        if self._transport is not None and not self.is_lost:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is None or self.is_lost:
            return
        assert self._stream is not None
        self._is_reading = True
        early, self._early = self._early, b""
        if early:
            self._stream.data_read(early)  # this may pause the reading
        if self._has_early_eof:
            self._stream.eof_read()
        elif self._is_reading:
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        if self._transport is None or self.is_lost:
            return
        if self._is_writing_paused:
            self._gathered += data
        else:
            self._transport.write(data)

    def write_eof(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._write_gathered(is_last=True)
            self._transport.write_eof()

    def unwritten(self) -> int:
        if self._transport is None or self.is_lost:
            return 0
        return self._transport.get_write_buffer_size() + len(self._gathered)

    def close(self) -> None:
        if self._transport is not None:
            self._write_gathered(is_last=True)
            self._transport.close()

    def abort(self) -> None:
        if self._transport is None or self.is_lost:
            return
        reset_on_close(self._transport.get_extra_info("socket"))
        self._gathered = bytearray()
        self._transport.abort()

    def _write_gathered(self, *, is_last: bool = False) -> None:
        """Write until the kernel does not take more; all of it if no further bytes follow."""
        assert self._transport is not None
        while self._gathered and (is_last or not self._is_writing_paused):
            part = bytes(self._gathered[:WRITE_BYTES])
            del self._gathered[:WRITE_BYTES]
            self._transport.write(part)


class PortListener:
    """A listening socket on a loopback address."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.port: int = server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Accept no more connections; accepted ones stay open."""
        self._server.close()


async def listen(port: int, accept: Accept) -> PortListener:
    """Listen on loopback, with port 0 on any free port; raises OSError."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: PortSocket(accept), LOOPBACK, port, backlog=BACKLOG)
    return PortListener(server)


async def connect(addresses: Iterable[str], port: int) -> PortSocket:
    """Connect to the first IP address that accepts; raises the OSError of the first one."""
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for address in addresses:
        try:
            _, connected = await loop.create_connection(PortSocket, address, port)
        except OSError as error:
            failure = failure or error
            continue
        if not connected.is_self_connected():
            return connected
        connected.abort()
        failure = failure or ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert failure is not None, "there is at least one address"
    raise failure


def is_loopback(address: str) -> bool:
    """Whether an IP address is one of this machine's loopback."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


class PortSockets:
    """The sockets that a server opens for its clients."""

    def __init__(self, *, allow_other_hosts: bool = False) -> None:
        self._allow_other_hosts = allow_other_hosts

    async def connect(self, host: str | None, port: int) -> PortSocket:
        """Connect, None for loopback; raises OSError, InvalidRequest or InternalError."""
        return await connect(await self._addresses(host), port)

    async def listen(self, port: int, accept: Accept) -> PortListener:
        """Listen on loopback; raises OSError."""
        return await listen(port, accept)

    async def _addresses(self, host: str | None) -> Sequence[str]:
        """The addresses of a host that may be dialled, looked up only once."""
        if host is None or host.lower() == "localhost":
            return LOOPBACK_ADDRESSES
        if self._allow_other_hosts:
            return await _look_up(host)
        try:
            addresses = await _look_up(host)
        except InternalError as error:  # so it is no name of loopback either
            raise InvalidRequest(f"{error.message}; {_NEEDS_FLAG}") from None
        allowed = [each for each in addresses if is_loopback(each)]
        if not allowed:
            raise InvalidRequest(
                f"{printable(host)} is not on this machine's loopback ({addresses[0]}): "
                f"{_NEEDS_FLAG}"
            )
        return allowed


async def _look_up(host: str) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        entries = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InternalError(f"cannot resolve {printable(host)}: {reason}") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
