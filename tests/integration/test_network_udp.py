"""Datagrams through the SOCKS5 proxy of a process: decisions, answers, limits and lifetimes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.client import Client, Server, scaled
from tests.support.network import (
    LOOPBACK,
    Proxies,
    associate,
    network_proxy,
    start_proxies,
    udp_socket,
)
from tests.support.sandbox import read_only

from exec_server.proxy.process_proxy import MAX_ASSOCIATIONS

_RULES: dict[str, Any] = {
    "domains": {LOOPBACK: "allow", "127.0.0.3": "deny"},
    "enableSocks5Udp": True,
}


@pytest.fixture(scope="module")
def proxies(server: Server) -> Iterator[Proxies]:
    with server.connect() as client:
        yield start_proxies(client, network_proxy(**_RULES))


@pytest.fixture
def origin() -> Iterator[socket.socket]:
    with udp_socket() as sock:
        yield sock


def _port(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def _socks(proxies: Proxies) -> int:
    assert proxies.socks is not None
    return proxies.socks


@pytest.mark.parametrize("declared", [True, False])
def test_datagrams_in_both_directions(
    proxies: Proxies, origin: socket.socket, declared: bool
) -> None:
    before = len(proxies.decisions())
    with associate(_socks(proxies), declared=declared) as association:
        assert association.reply[:8] == b"\x05\x00\x00\x01\x7f\0\0\x01"
        for payload in (b"one", b"", b"x" * 60_000):
            association.send(LOOPBACK, _port(origin), payload)
            received, relay = origin.recvfrom(65_536)
            assert received == payload
            origin.sendto(b"answer to " + payload, relay)
            assert association.receive() == b"answer to " + payload
        name = b"\0\0\0\x03\x09127.0.0.1" + _port(origin).to_bytes(2)
        association.send_raw(name + b"named")
        assert origin.recv(100) == b"named"
    # A destination is decided about once in each association.
    proxies.client.wait_for(lambda _: len(proxies.decisions()) > before)
    (decision,) = proxies.decisions()[before:]
    assert (decision["protocol"], decision["decision"]) == ("socks5_udp", "allow")


def test_only_destinations_and_the_process_are_heard(
    proxies: Proxies, origin: socket.socket
) -> None:
    with associate(_socks(proxies)) as association, udp_socket() as stranger:
        # Neither a fragment, nor rubbish, nor another sender reaches the origin.
        association.send(LOOPBACK, _port(origin), b"fragment", fragment=1)
        association.send_raw(b"\0\0")
        header = b"\0\0\0\x01\x7f\0\0\x01" + _port(origin).to_bytes(2)
        stranger.sendto(header + b"stranger", (LOOPBACK, int.from_bytes(association.reply[-2:])))
        association.send(LOOPBACK, _port(origin), b"own")
        received, relay = origin.recvfrom(100)
        assert received == b"own"
        # An answer of another port does not reach the process.
        stranger.sendto(b"forged", relay)
        origin.sendto(b"genuine", relay)
        assert association.receive() == b"genuine"


def test_refused_destinations(proxies: Proxies, origin: socket.socket) -> None:
    before = len(proxies.decisions())
    with associate(_socks(proxies)) as association:
        for host in ("127.0.0.3", "127.0.0.2", "169.254.169.254", "8.8.8.8"):
            for _ in range(2):
                association.send(host, _port(origin), b"refused")
        mapped = b"\0\0\0\x04" + bytes(10) + b"\xff\xff\x7f\0\0\x02" + _port(origin).to_bytes(2)
        association.send_raw(mapped + b"refused")
        association.send(LOOPBACK, _port(origin), b"allowed")
        assert origin.recv(100) == b"allowed"

    def found() -> list[tuple[str, str]]:
        return [(each["host"], each["reason"]) for each in proxies.decisions()[before:]]

    proxies.client.wait_for(lambda _: len(found()) >= 6)
    assert sorted(found()) == [
        ("127.0.0.1", "allow"),
        ("127.0.0.2", "not_allowed_local"),
        ("127.0.0.3", "denied"),
        ("169.254.169.254", "not_allowed_local"),
        ("8.8.8.8", "not_allowed"),
        ("::ffff:127.0.0.2", "not_allowed_local"),
    ]


def test_reviewed_destinations_wait(client: Client, origin: socket.socket) -> None:
    proxy = network_proxy(enableSocks5Udp=True, allowLocalBinding=True, timeout=60_000)
    with associate(_socks(start_proxies(client, proxy))) as association:
        for payload in (b"first", b"second"):
            association.send(LOOPBACK, _port(origin), payload)
        while not client.requests:
            client.receive()
        (question,) = client.requests
        asked = question["params"]["request"]
        assert asked == {"protocol": "socks5_udp", "host": LOOPBACK, "port": _port(origin)}
        client.send({"id": question["id"], "result": {"decision": {"type": "allow"}}})
        assert [origin.recv(100), origin.recv(100)] == [b"first", b"second"]


def test_the_association_ends_with_its_connection(proxies: Proxies, origin: socket.socket) -> None:
    with associate(_socks(proxies)) as association:
        association.send(LOOPBACK, _port(origin), b"one")
        _, relay = origin.recvfrom(100)
        association.control.shutdown(socket.SHUT_WR)
        assert association.control.recv(1) == b""  # after its sockets are closed
        with udp_socket() as probe:
            for port in (relay[1], int.from_bytes(association.reply[-2:])):
                probe.connect((LOOPBACK, port))
                probe.send(b"x")
                with pytest.raises(ConnectionRefusedError):
                    probe.recv(1)


def test_associations_are_limited(client: Client) -> None:
    proxies = start_proxies(client, network_proxy(**_RULES))
    with contextlib.ExitStack() as open_ones:
        for _ in range(MAX_ASSOCIATIONS):
            assert open_ones.enter_context(associate(_socks(proxies))).reply[1] == 0
        with associate(_socks(proxies)) as refused:
            assert refused.reply == b"\x05\x01\x00\x01" + bytes(6)
        client.call("process/terminate", {"processId": proxies.process_id})
        client.notice("process/closed", proxies.process_id)


def test_a_network_namespace_has_no_datagrams(client: Client) -> None:
    """The sockets of associations are on this machine, which it cannot reach."""
    script = (
        "import socket; link = socket.create_connection(('127.0.0.1', 1080)); "
        "link.sendall(bytes([5, 1, 0, 5, 3, 0, 1]) + bytes(6)); link.settimeout(9); "
        "print(link.makefile('rb').read().hex())"
    )
    ended = client.run(
        ["/usr/bin/python3", "-c", script],
        networkProxy=network_proxy(**_RULES),
        sandbox=read_only(),
        enforceManagedNetwork=True,
        timeout=scaled(20),
    )
    assert ended.stdout == b"0500050700010000" + b"00000000\n"
