"""Associations of a process for datagrams, as a client of SOCKS5 uses them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.client import scaled

LOOPBACK = "127.0.0.1"


@dataclass
class Association:
    """The connection of an association, its reply, and the socket for its datagrams."""

    control: socket.socket
    reply: bytes
    datagrams: socket.socket

    def send(self, host: str, port: int, payload: bytes, *, fragment: int = 0) -> None:
        header = bytes([0, 0, fragment, 1]) + socket.inet_aton(host) + port.to_bytes(2)
        self.send_raw(header + payload)

    def send_raw(self, data: bytes) -> None:
        self.datagrams.sendto(data, (LOOPBACK, int.from_bytes(self.reply[-2:])))

    def receive(self) -> bytes:
        """The payload of the next datagram."""
        data = self.datagrams.recv(65_536)
        assert data[:4] == b"\0\0\0\x01"
        return data[10:]


@contextlib.contextmanager
def udp_socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((LOOPBACK, 0))
        sock.settimeout(scaled(10))
        yield sock


@contextlib.contextmanager
def associate(proxy: int, *, declared: bool = True) -> Iterator[Association]:
    """UDP ASSOCIATE; `declared` tells the proxy the port of the datagrams."""
    with (
        udp_socket() as datagrams,
        socket.create_connection((LOOPBACK, proxy), scaled(10)) as control,
    ):
        port = datagrams.getsockname()[1] if declared else 0
        address = socket.inet_aton(LOOPBACK if declared else "0.0.0.0")
        control.sendall(b"\x05\x01\x00\x05\x03\x00\x01" + address + port.to_bytes(2))
        reply = b""
        while len(reply) < 12 and (data := control.recv(12 - len(reply))):
            reply += data
        yield Association(control, reply[2:], datagrams)
