"""Peers without a token that keep connections open lock nobody out; children keep their limit."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.certificates import Pair, make_pair
from tests.support.client import Client, Server, scaled, upgrade_request
from tests.support.sandbox import workspace_write
from tests.support.server_internals import start_prepared

from exec_server.net.client_tls import tls_context
from exec_server.sync import connect

IDLE = 1100
_LIMITS = ["/bin/sh", "-c", "ulimit -Sn; ulimit -Hn"]


def _limited(soft: int, hard: int) -> list[str]:
    return ["prlimit", f"--nofile={soft}:{hard}"]


@contextlib.contextmanager
def _idle_connections(port: int, source: str = "127.0.0.1") -> Iterator[Sequence[socket.socket]]:
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(IDLE):
            idle = socket.create_connection(("127.0.0.1", port), scaled(10), (source, 0))
            opened.append(stack.enter_context(idle))
        yield opened


@pytest.fixture(autouse=True)
def own_descriptors() -> Iterator[None]:
    """The test itself needs more descriptors than usual."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2 * IDLE:
        pytest.skip("the hard limit of descriptors is too low for this test")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _check_usable(client: Client, soft: int, hard: int) -> None:
    expected = f"{soft}\n{hard}\n".encode()
    for tty in (False, True):
        run = client.run(_LIMITS, tty=tty)
        assert (run.stdout or run.pty.replace(b"\r", b"")) == expected


@pytest.mark.parametrize("hard", [1024, 4096])
def test_idle_connections_without_a_token(tmp_path: Path, hard: int) -> None:
    token = tmp_path / "token"
    token.write_text("correct horse battery staple is long enough")
    flags = ("--ws-auth", "capability-token", "--ws-token-file", str(token))
    with start_prepared("", *flags, prefix=_limited(1024, hard)) as server:
        port = int(server.url.rpartition(":")[2])
        bearer = [("Authorization", f"Bearer {token.read_text()}")]
        with _idle_connections(port), server.connect(headers=bearer) as client:
            _check_usable(client, 1024, hard)


def test_idle_connections_with_tls(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server", "127.0.0.1")
    flags = ("--listen", "wss://127.0.0.1:0", *pair.flags)
    with start_prepared("", *flags, prefix=_limited(1024, 1024)) as server:
        port = int(server.url.rpartition(":")[2])
        with _idle_connections(port), connect(server.url, pin=pair.fingerprint) as environment:
            assert environment.run(_LIMITS).stdout == b"1024\n1024\n"


def test_idle_connections_take_no_place_of_clients() -> None:
    """Clients and idle connections together are more than there may be clients: 384 of 1,024."""
    with start_prepared("", prefix=_limited(1024, 1024)) as server, contextlib.ExitStack() as stack:
        for _ in range(140):
            stack.enter_context(server.connect())
        stack.enter_context(_idle_connections(int(server.url.rpartition(":")[2])))
        _check_usable(stack.enter_context(server.connect()), 1024, 1024)


def test_a_flood_does_not_cut_off_the_handshakes_of_other_addresses(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server", "127.0.0.1")
    flags = ("--listen", "ws://127.0.0.1:0", "--listen", "wss://127.0.0.1:0", *pair.flags)
    with start_prepared("", *flags, prefix=_limited(1024, 1024)) as server:
        for url in server.urls:
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            with (
                socket.create_connection(address, scaled(10)) as slow,
                _idle_connections(address[1], "127.0.0.2") as idle,
            ):
                _wait_for_end(idle[0])  # the oldest of them, though `slow` is older
                assert _upgrade(slow, pair if url.startswith("wss") else None)


def _wait_for_end(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""


def _upgrade(connection: socket.socket, pair: Pair | None) -> bool:
    if pair is not None:
        context = tls_context(str(pair.certificate))
        connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
    with connection:
        connection.sendall(upgrade_request())
        return connection.recv(12) == b"HTTP/1.1 101"


def test_children_have_the_limit_with_which_the_server_was_started(tmp_path: Path) -> None:
    with start_prepared("", prefix=_limited(200, 3000)) as server, server.connect() as client:
        assert _soft_limit(server) == 3000
        _check_usable(client, 200, 3000)
        for _ in range(2):  # a sandbox that is built, and one that was prebuilt
            run = client.run(_LIMITS, sandbox=workspace_write(tmp_path))
            assert run.stdout == b"200\n3000\n", run


def _soft_limit(server: Server) -> int:
    lines = Path(f"/proc/{server.process.pid}/limits").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Max open files")).split()[3])
