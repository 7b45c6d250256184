"""UdpAssociation: relays the datagrams of one UDP ASSOCIATE of a process.

Theory of operation. The process sends its datagrams to a socket of the association on loopback,
each with its destination. The first one to a destination waits for the decision; its address is
then remembered, and only datagrams from there are passed back. A datagram that cannot be sent at
once is dropped, as networks do, so nothing is buffered but what waits for decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from exec_server.proxy.datagrams import Destinations, Place, decode, encode
from exec_server.proxy.decider import Decider
from exec_server.proxy.policy import Request
from exec_server.proxy.stream import Stream

_LOOPBACK: Final = "127.0.0.1"
# The largest datagram, with the header of SOCKS.
_DATAGRAM_BYTES: Final = 65_536


class UdpAssociation:
    """The sockets of one association, and its destinations."""

    def __init__(self, client: str, port: int, decider: Decider) -> None:
        """Raises OSError.

        `client` is the address of the TCP connection. `port` is the one that the process sends
        from; 0 if it is that of its first datagram.
        """
        self._client = client
        self._port = port
        self._decider = decider
        self._loop = asyncio.get_running_loop()
        self._destinations = Destinations()
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

    # ---- from the process -------------------------------------------------------------

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
        elif (found := self._destinations.address(datagram.place)) is not None:
            self._send(found, datagram.place.port, datagram.payload)

    async def _decide(self, place: Place) -> None:
        request = Request("socks5_udp", place.host, place.port, self._client)
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

    # ---- from the destinations --------------------------------------------------------

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
