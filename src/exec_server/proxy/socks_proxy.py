"""SocksProxy: one connection of a process to its SOCKS5 proxy (RFC 1928, without passwords)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Final

from exec_server.proxy.datagrams import (
    ADDRESS_BYTES,
    NAME,
    DatagramDestinations,
    Place,
    decode,
    decode_host,
    encode,
    encode_address,
)
from exec_server.proxy.decider import Decider
from exec_server.proxy.interception import Interceptor
from exec_server.proxy.policy import NetworkAccess
from exec_server.proxy.stream import Stream, carry
from exec_server.proxy.upstream import Upstream

_LOOPBACK: Final = "127.0.0.1"
# The largest datagram, with the header of SOCKS.
_DATAGRAM_BYTES: Final = 65_536

# The time for both messages of the process.
HANDSHAKE_SECONDS = 30.0

# Longer than both messages; what follows them is for the tunnel.
_MESSAGE_BYTES: Final = 1024

_VERSION: Final = 5
_NO_PASSWORD: Final = 0
_NO_METHOD: Final = b"\x05\xff"
_CONNECT: Final = 1
_UDP_ASSOCIATE: Final = 3
_NOTHING_BOUND: Final = b"\x01" + bytes(6)
# Replies of section 6.
_SUCCESS: Final = 0
_FAILURE: Final = 1
_NOT_ALLOWED: Final = 2
_NOT_CONNECTED: Final = 5
_NO_SUCH_COMMAND: Final = 7
_NO_SUCH_ADDRESS_TYPE: Final = 8


class UdpAssociation:
    """Relays the datagrams of one UDP ASSOCIATE of a process, through a loopback socket.

    The first datagram to a destination waits for the decision; its address is then remembered, and
    only datagrams from there are passed back. A datagram that cannot be sent at once is dropped.
    """

    def __init__(self, client: str, port: int, decider: Decider) -> None:
        """Raises OSError; `port` is the process's own, 0 if its first datagram tells it."""
        self._client = client
        self._port = port
        self._decider = decider
        self._loop = asyncio.get_running_loop()
        self._destinations = DatagramDestinations()
        self._decisions: set[asyncio.Task[None]] = set()
        self._outer: dict[socket.AddressFamily, socket.socket] = {}
        self._inner = _bind(socket.AF_INET, _LOOPBACK)

    @property
    def address(self) -> tuple[str, int]:
        """Where the process has to send its datagrams."""
        address, port = self._inner.getsockname()
        return address, port

    async def serve(self, stream: Stream) -> None:
        """Relay until the connection ends that belongs to the association."""
        async with asyncio.TaskGroup() as tasks:
            self._loop.add_reader(self._inner, self._receive_inner, tasks)
            with contextlib.suppress(OSError):
                while await stream.receive():
                    pass  # the connection has no other use
            self.close()
            for decision in tuple(self._decisions):
                decision.cancel()

    def close(self) -> None:
        """Close the sockets; a second time does nothing."""
        for sock in (self._inner, *self._outer.values()):
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock)
                sock.close()

    def _receive_inner(self, tasks: asyncio.TaskGroup) -> None:
        try:
            data, (address, port) = self._inner.recvfrom(_DATAGRAM_BYTES)
        except OSError:
            return
        datagram = decode(data)
        if datagram is None or address != _LOOPBACK or port != (self._port or port):
            return
        self._port = port
        if self._destinations.add(datagram):
            decision = tasks.create_task(self._decide(datagram.place))
            self._decisions.add(decision)
            decision.add_done_callback(self._decisions.discard)
        elif (target := self._destinations.address(datagram.place)) is not None:
            self._send(target, datagram.place.port, datagram.payload)

    async def _decide(self, place: Place) -> None:
        request = NetworkAccess("socks5_udp", place.host, place.port, self._client)
        decision = await self._decider.decide(request)
        address = decision.addresses[0] if decision.is_allowed and decision.addresses else None
        for payload in self._destinations.decide(place, address):
            assert address is not None
            self._send(address, place.port, payload)

    def _send(self, address: str, port: int, payload: bytes) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):  # no route, too large, or the socket is busy
            outer = self._outer.get(family)
            if outer is None:
                outer = self._outer[family] = _bind(family, "")
                self._loop.add_reader(outer, self._receive_outer, outer)
            outer.sendto(payload, (address, port))

    def _receive_outer(self, outer: socket.socket) -> None:
        with contextlib.suppress(OSError):  # an error that an earlier datagram has caused
            payload, (address, port, *_) = outer.recvfrom(_DATAGRAM_BYTES)
            if self._destinations.is_peer(address, port):
                self._inner.sendto(encode(address, port, payload), (_LOOPBACK, self._port))


def _bind(family: socket.AddressFamily, address: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.bind((address, 0))
    except OSError:
        sock.close()
        raise
    return sock


# Opens an association for a process at this address and port; raises OSError beyond a limit.
Associate = Callable[[str, int], AbstractContextManager[UdpAssociation]]


class SocksProxy:
    """Serves one connection: a tunnel, an association for datagrams, or a refusal."""

    def __init__(
        self,
        stream: Stream,
        client: str,
        decider: Decider,
        upstream: Upstream,
        *,
        interceptor: Interceptor | None = None,
        associate: Associate | None = None,
    ) -> None:
        self._stream = stream
        self._unread = b""  # bytes of the process that belong to what follows
        self._unsent = b""  # the answer to the first message, until the second one is read
        self._client = client
        self._decider = decider
        self._upstream = upstream
        self._interceptor = interceptor
        self._associate = associate

    async def serve(self) -> None:
        """Serve until either side ends the connection; raises OSError if that is broken."""
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                asked = await self._handshake()
        except (EOFError, TimeoutError):
            return
        if asked is None:
            return
        command, kind, host, port = asked
        if command == _UDP_ASSOCIATE and self._associate is not None:
            await self._serve_datagrams(self._associate, kind, port)
        elif command != _CONNECT:
            await self._reply(_NO_SUCH_COMMAND)
        elif port == 0:
            await self._reply(_NOT_ALLOWED)
        else:
            await self._serve_tunnel(host, port)

    async def _serve_tunnel(self, host: str, port: int) -> None:
        request = NetworkAccess("socks5_tcp", host, port, self._client)
        decision = await self._decider.decide(request)
        if not decision.is_allowed:
            await self._reply(_NOT_ALLOWED)
            return
        if self._interceptor is not None and self._interceptor.wants(host, port):
            if self._unread:
                await self._reply(_NOT_ALLOWED)  # the tunnel is not open yet
                return
            accept = partial(self._reply, _SUCCESS)
            addresses = decision.addresses
            await self._interceptor.serve(self._stream, (host, port), addresses, accept)
            return
        try:
            outer = await self._upstream.tunnel(host, port, decision.addresses)
        except OSError:
            await self._reply(_NOT_CONNECTED)
            return
        try:
            await self._reply(_SUCCESS, encode_address(*outer.local_address))
        except BaseException:
            outer.abort()
            raise
        await carry(self._stream, outer, self._unread)

    async def _serve_datagrams(self, associate: Associate, kind: int, port: int) -> None:
        if kind == NAME:
            await self._reply(_NO_SUCH_ADDRESS_TYPE)
            return
        with ExitStack() as opened:
            try:
                association = opened.enter_context(associate(self._client, port))
            except OSError:
                await self._reply(_FAILURE)
                return
            await self._reply(_SUCCESS, encode_address(*association.address))
            await association.serve(self._stream)

    async def _handshake(self) -> tuple[int, int, str, int] | None:
        """Command, kind of address, host and port that the process sends; None after a refusal."""
        read = self._read
        version, count = await read(2)
        if version != _VERSION:
            return None  # SOCKS4 has no answer that would be understood
        if _NO_PASSWORD not in await read(count):
            await self._stream.send(_NO_METHOD)
            return None
        self._unsent = bytes([_VERSION, _NO_PASSWORD])
        version, command, _, kind = await read(4)
        if version != _VERSION:
            await self._flush()
            return None
        size = (await read(1))[0] if kind == NAME else ADDRESS_BYTES.get(kind)
        if size is None:
            await self._reply(_NO_SUCH_ADDRESS_TYPE)
            return None
        host = decode_host(kind, await read(size))
        return command, kind, host, int.from_bytes(await read(2))

    async def _read(self, count: int) -> bytes:
        """The next bytes, exactly so many; raises EOFError if the process ends before."""
        while len(self._unread) < count:
            await self._flush()
            data = await self._stream.receive(_MESSAGE_BYTES)
            if not data:
                raise EOFError
            self._unread += data
        read, self._unread = self._unread[:count], self._unread[count:]
        return read

    async def _flush(self, more: bytes = b"") -> None:
        """Send what is ready: a process that sends both messages at once gets both answers so."""
        if data := self._unsent + more:
            self._unsent = b""
            await self._stream.send(data)

    async def _reply(self, code: int, bound: bytes = _NOTHING_BOUND) -> None:
        await self._flush(bytes([_VERSION, code, 0]) + bound)
