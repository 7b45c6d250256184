"""UDP ASSOCIATE: replies, and datagrams to destinations, of both servers.

The answers of destinations are not compared: the reference sends them back to the destination.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.support.client import Server
from tests.support.network import (
    LOOPBACK,
    Proxies,
    associate,
    exchange,
    network_proxy,
    start_proxies,
    udp_socket,
)

_RULES = {LOOPBACK: "allow", "127.0.0.3": "deny"}
_UNSUPPORTED = b"\x05\x00\x05\x07\x00\x01" + bytes(6)


def _start(server: Server, **members: Any) -> Proxies:
    client = server.connect()
    return start_proxies(client, network_proxy(domains=_RULES, **members))


def _request(kind: int, address: bytes) -> bytes:
    return b"\x05\x01\x00\x05\x03\x00" + bytes([kind]) + address


def test_replies(server: Server) -> None:
    proxies = _start(server)
    assert proxies.socks is not None
    assert exchange(proxies.socks, _request(1, bytes(6))) == _UNSUPPORTED
    proxies.client.close()
    proxies = _start(server, enableSocks5Udp=True)
    assert proxies.socks is not None
    named = exchange(proxies.socks, _request(3, b"\x09localhost\x00\x05"))
    assert named == b"\x05\x00\x05\x08\x00\x01" + bytes(6)
    with associate(proxies.socks) as association:
        assert association.reply[:4] == b"\x05\x00\x00\x01"
    proxies.client.close()


@pytest.mark.parametrize(
    ("host", "port", "mode", "reason"),
    [
        (LOOPBACK, None, "full", "allow"),
        ("127.0.0.3", None, "full", "denied"),
        ("8.8.8.8", None, "full", "not_allowed"),
        ("127.0.0.2", None, "full", "not_allowed_local"),
        (LOOPBACK, None, "limited", "method_not_allowed"),
        (LOOPBACK, 443, "limited", "method_not_allowed"),
    ],
)
def test_decisions(server: Server, host: str, port: int | None, mode: str, reason: str) -> None:
    proxies = _start(server, enableSocks5Udp=True, mode=mode)
    assert proxies.socks is not None
    with udp_socket() as origin, associate(proxies.socks) as association:
        destination = port or int(origin.getsockname()[1])
        association.send(host, destination, b"datagram")
        proxies.client.wait_for(lambda _: bool(proxies.decisions()))
        decision = proxies.decisions()[0]
        assert (decision["reason"], decision["protocol"]) == (reason, "socks5_udp")
        assert (decision["host"], decision["port"]) == (host, destination)
        assert ("method" in decision, decision["policyOverride"]) == (False, False)
        control = association.control.getsockname()
        assert decision["client"] == f"{LOOPBACK}:{control[1]}"
        if reason == "allow":
            assert origin.recv(100) == b"datagram"
        else:
            origin.setblocking(False)
            with pytest.raises(BlockingIOError):
                origin.recv(100)
    proxies.client.close()


def test_fragments_and_other_senders_are_dropped(server: Server) -> None:
    proxies = _start(server, enableSocks5Udp=True)
    assert proxies.socks is not None
    with udp_socket() as origin, udp_socket() as other, associate(proxies.socks) as association:
        port = origin.getsockname()[1]
        association.send(LOOPBACK, port, b"fragment", fragment=1)
        association.send_raw(b"\0\0")
        header = b"\0\0\0\x01" + socket.inet_aton(LOOPBACK) + port.to_bytes(2)
        other.sendto(header + b"other", (LOOPBACK, int.from_bytes(association.reply[-2:])))
        association.send(LOOPBACK, port, b"own")
        assert origin.recv(100) == b"own"
    proxies.client.close()
