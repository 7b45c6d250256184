"""The proxies of a process: what passes, what is refused, and what attacks gain."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.certificates import make_pair
from tests.support.client import Client, Server, scaled, start_server
from tests.support.network import (
    Proxies,
    WebOrigin,
    exchange,
    network_proxy,
    start_proxies,
    status,
    web_origin,
)

from exec_server.proxy.hosts import normalize
from exec_server.proxy.process_proxy import MAX_CONNECTIONS


@pytest.fixture(scope="module")
def origin() -> Iterator[WebOrigin]:
    with web_origin() as running:
        yield running


@pytest.fixture(scope="module")
def proxies(server: Server) -> Iterator[Proxies]:
    """A process that may reach everything, but only 127.0.0.1 of this machine."""
    rules = {"*": "allow", "127.0.0.1": "allow", "bad.test": "deny"}
    with server.connect() as client:
        yield start_proxies(client, network_proxy(domains=rules))
    # Whatever the tests of this module have sent, nothing was a surprise.
    assert "unexpectedly" not in server.stderr()


def _get(host: str, *, header: str | None = None, more: str = "") -> bytes:
    text = f"GET http://{host}/ HTTP/1.1\r\nHost: {header or host}\r\n{more}"
    return f"{text}Connection: close\r\n\r\n".encode()


def _connect(authority: str) -> bytes:
    return (
        f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n".encode()
    )


def _socks(kind: int, address: bytes, port: int, command: int = 1) -> bytes:
    return b"\x05\x01\x00\x05" + bytes([command, 0, kind]) + address + port.to_bytes(2)


def _named(host: str, port: int) -> bytes:
    return _socks(3, bytes([len(host)]) + host.encode(), port)


# ---- what passes ------------------------------------------------------------------------


def test_requests_on_one_connection(proxies: Proxies, origin: WebOrigin) -> None:
    head = f"Host: 127.0.0.1:{origin.port}\r\n"
    target = f"{origin.url}/hop"
    chunked = "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    sent = (
        f"GET {target} HTTP/1.1\r\n{head}X-Keep: 1\r\nConnection: X-Drop\r\nX-Drop: 2\r\n\r\n"
        f"HEAD {target} HTTP/1.1\r\n{head}\r\n"
        f"POST {target} HTTP/1.1\r\n{head}Content-Length: 5\r\n\r\nhello"
        f"POST {target} HTTP/1.1\r\n{head}{chunked}"
        f"GET /origin-form HTTP/1.1\r\n{head}Connection: close\r\n\r\n"
    )
    received = exchange(proxies.http, sent.encode())
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 5
    assert b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n" in received
    assert b"\r\n\r\n5\r\nabcde\r\n0\r\n\r\n" in received
    assert b"x-hop" not in received.lower()
    first, *_, last = origin.requests[-4:]
    assert first.startswith("GET /hop HTTP/1.1\n")
    assert "X-Keep: 1" in first
    assert "X-Drop" not in first
    assert last.startswith("GET /origin-form HTTP/1.1\n")


def test_expected_continue_and_old_clients(proxies: Proxies, origin: WebOrigin) -> None:
    head = f"POST {origin.url}/ HTTP/1.1\r\nHost: 127.0.0.1:{origin.port}\r\n"
    with socket.create_connection(("127.0.0.1", proxies.http), scaled(10)) as link:
        link.sendall(f"{head}Content-Length: 2\r\nExpect: 100-continue\r\n\r\n".encode())
        assert link.recv(100).startswith(b"HTTP/1.1 100 ")
        link.sendall(b"ok")
        received = b""
        while b"0\r\n\r\n" not in received:
            received += link.recv(1000)
    assert b"\r\n2\r\nok\r\n" in received
    old = f"POST {origin.url}/ HTTP/1.0\r\nContent-Length: 3\r\n\r\nold".encode()
    assert exchange(proxies.http, old).endswith(b"\r\n\r\nold")


def test_tunnels(proxies: Proxies, origin: WebOrigin) -> None:
    request = b"GET /t HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    # The first bytes of the tunnel follow the request for it at once.
    sent = _connect(f"127.0.0.1:{origin.port}") + request
    received = exchange(proxies.http, sent, until=b"origin")
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.endswith(b"origin")
    assert proxies.socks is not None
    address = _socks(1, b"\x7f\0\0\x01", origin.port)
    received = exchange(proxies.socks, address + request, until=b"origin")
    assert received[:7] == b"\x05\x00\x05\x00\x00\x01\x7f"
    assert received.endswith(b"origin")


def test_a_tunnel_carries_both_ends_separately(proxies: Proxies) -> None:
    size = 3_000_000
    with socket.create_server(("127.0.0.1", 0)) as server:
        got: list[bytes] = []

        def serve() -> None:
            accepted, _ = server.accept()
            with accepted, accepted.makefile("rb") as lines:
                got.append(lines.read())  # until the end of this direction
                accepted.sendall(b"y" * size)

        thread = threading.Thread(target=serve)
        thread.start()
        with socket.create_connection(("127.0.0.1", proxies.http), scaled(10)) as link:
            link.sendall(_connect(f"127.0.0.1:{server.getsockname()[1]}"))
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += link.recv(1)
            link.sendall(b"x" * size)
            link.shutdown(socket.SHUT_WR)
            with link.makefile("rb") as answer:
                assert answer.read() == b"y" * size
        thread.join()
    assert got == [b"x" * size]


def test_hosts_that_cannot_be_reached(proxies: Proxies) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert status(exchange(proxies.http, _get(f"127.0.0.1:{port}"))) == 502
    assert status(exchange(proxies.http, _connect(f"127.0.0.1:{port}"))) == 502
    assert proxies.socks is not None
    refused = exchange(proxies.socks, _socks(1, b"\x7f\0\0\x01", port))
    assert refused == b"\x05\x00\x05\x05\x00\x01" + bytes(6)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    ],
)
def test_origins_that_answer_no_http(proxies: Proxies, answer: bytes) -> None:
    with _one_answer(answer) as port:
        assert status(exchange(proxies.http, _get(f"127.0.0.1:{port}"))) == 502


def test_incomplete_answers_are_not_completed(proxies: Proxies) -> None:
    for head in (b"Content-Length: 9", b"Transfer-Encoding: chunked"):
        with _one_answer(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n5\r\nabc") as port:
            received = exchange(proxies.http, _get(f"127.0.0.1:{port}"))
        assert not received.endswith(b"0\r\n\r\n")


def test_broken_connections_are_reset(proxies: Proxies) -> None:
    """HTTP/1.0 takes an end for the end of the body."""
    partial = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"
    for resets in (False, True):
        seen = threading.Event()
        with (
            _one_answer(partial, resets=resets, after=seen) as port,
            socket.create_connection(("127.0.0.1", proxies.http), scaled(10)) as link,
        ):
            link.sendall(f"GET http://127.0.0.1:{port}/ HTTP/1.0\r\n\r\n".encode())
            received = b""
            while not received.endswith(b"abc"):
                received += link.recv(1000)
            seen.set()
            with pytest.raises(ConnectionResetError):
                link.recv(1)


def test_processes_that_end_their_direction_or_vanish(proxies: Proxies, origin: WebOrigin) -> None:
    for port, sent in (
        (proxies.http, _get(f"127.0.0.1:{origin.port}")),
        (proxies.socks, _socks(1, b"\x7f\0\0\x01", origin.port) + b"GET / HTTP/1.0\r\n\r\n"),
    ):
        with socket.create_connection(("127.0.0.1", port), scaled(10)) as link:
            link.sendall(sent)
            link.shutdown(socket.SHUT_WR)
            with link.makefile("rb") as answer:
                assert answer.read().endswith(b"origin")
        with socket.create_connection(("127.0.0.1", port), scaled(10)) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            link.sendall(sent[:-3])


_RESET = struct.pack("ii", 1, 0)  # closing resets the connection


@contextlib.contextmanager
def _one_answer(
    answer: bytes, *, resets: bool = False, after: threading.Event | None = None
) -> Iterator[int]:
    """An origin that reads a head, answers with these bytes, and closes or resets afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.recv(65536)
                accepted.sendall(answer)
                if after is not None:
                    after.wait(scaled(10))
                if resets:
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


# ---- attacks ------------------------------------------------------------------------------

# Each of them is an address of this machine or of its networks, which the rules do not name.
_LOCAL = [
    *("127.1", "127.0.1", "0x7f000001", "0x7f.1", "2130706433", "0177.0.0.1", "017700000001"),
    *("127.0.0.2", "0", "0.0.0.0", "localhost", "localhost.", "LOCALHOST", "x.localhost"),
    *("10.0.0.1", "169.254.169.254", "192.168.0.1", "100.64.0.1", "224.0.0.1", "255.255.255.255"),
    *("[::]", "[::1]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
    *("[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1]", "[fd00::1]"),
]


@pytest.mark.parametrize("host", _LOCAL)
def test_local_addresses_in_every_spelling(proxies: Proxies, origin: WebOrigin, host: str) -> None:
    authority = f"{host}:{origin.port}"
    received = exchange(proxies.http, _get(authority))
    assert status(received) == 403
    assert b"x-proxy-error: blocked-by-allowlist" in received
    assert b'"reason":"not_allowed_local"' in received
    assert status(exchange(proxies.http, _connect(authority))) == 403
    assert proxies.socks is not None
    name = host.strip("[]")
    assert exchange(proxies.socks, _named(name, origin.port))[2:4] == b"\x05\x02"

    def decisions() -> list[dict[str, Any]]:
        normal = normalize(host)
        return [each for each in proxies.decisions() if each["host"] == normal]

    proxies.client.wait_for(lambda _: len(decisions()) >= 3)
    assert {each["reason"] for each in decisions()} == {"not_allowed_local"}


@pytest.mark.parametrize("host", ["[fe80::1%25lo]", "[fe80::1%lo]", "[::1%lo]", "[127.0.0.1]"])
def test_scoped_and_invalid_literals(proxies: Proxies, origin: WebOrigin, host: str) -> None:
    authority = f"{host}:{origin.port}"
    assert status(exchange(proxies.http, _get(authority))) == 400
    assert status(exchange(proxies.http, _connect(authority))) == 400
    assert proxies.socks is not None
    scoped = host.strip("[]")
    if scoped != "127.0.0.1":
        assert exchange(proxies.socks, _named(scoped, origin.port))[2:4] == b"\x05\x02"


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"])
def test_a_denied_address_in_every_spelling(client: Client, origin: WebOrigin, host: str) -> None:
    rules = network_proxy(domains={"*": "allow", "127.0.0.1": "deny"}, allowLocalBinding=True)
    received = exchange(start_proxies(client, rules).http, _get(f"{host}:{origin.port}"))
    assert b"blocked-by-denylist" in received


def test_numeric_addresses_of_socks(proxies: Proxies, origin: WebOrigin) -> None:
    assert proxies.socks is not None
    mapped = bytes(10) + b"\xff\xff\x7f\0\0\x01"
    for kind, address in ((1, b"\x7f\0\0\x02"), (4, bytes(15) + b"\x01"), (4, mapped)):
        received = exchange(proxies.socks, _socks(kind, address, origin.port))
        assert received[2:4] == b"\x05\x02"


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1", "http", ""])
def test_forbidden_ports(proxies: Proxies, port: str) -> None:
    assert status(exchange(proxies.http, _connect(f"127.0.0.1:{port}"))) == 400
    assert status(exchange(proxies.http, _get(f"127.0.0.1:{port}"))) == 400
    assert proxies.socks is not None
    assert exchange(proxies.socks, _named("127.0.0.1", 0))[2:4] == b"\x05\x02"


def test_a_target_and_a_host_that_disagree(proxies: Proxies, origin: WebOrigin) -> None:
    before = len(origin.requests)
    allowed = f"127.0.0.1:{origin.port}"
    attempts = [
        _get(allowed, header="bad.test"),
        _get("bad.test", header=allowed),
        _get(allowed, header="127.0.0.1"),
        _get(allowed, more="Host: bad.test\r\n"),
        _get(allowed, header=f"{allowed}@bad.test"),
        f"GET http://{allowed}/ HTTP/1.1\r\n Host: bad.test\r\n\r\n".encode(),
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET http:/// HTTP/1.1\r\nHost: a\r\n\r\n",
    ]
    assert [status(exchange(proxies.http, each)) for each in attempts] == [400] * len(attempts)
    assert len(origin.requests) == before
    # The host is what follows the user.
    tricky = exchange(proxies.http, _get(f"{allowed}@bad.test", header="bad.test"))
    assert b'"host":"bad.test"' in tricky


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 4\r\nTransfer-Encoding: chunked",
        "Content-Length: 4\r\nContent-Length: 5",
        "Content-Length: +4",
        "Content-Length: 4, 5",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding : chunked",
        "X: a\x00b",
        "X: a\rContent-Length: 4",
        "Content-Length\t: 4",
        "Content-Length: 99\r\nConnection: content-length",
        "Transfer-Encoding: chunked\r\nConnection: close, Transfer-Encoding",
        "Content_Length: 99",
    ],
)
def test_smuggled_requests(proxies: Proxies, origin: WebOrigin, framing: str) -> None:
    before = len(origin.requests)
    head = f"POST {origin.url}/ HTTP/1.1\r\nHost: 127.0.0.1:{origin.port}\r\n{framing}\r\n\r\n"
    hidden = f"0\r\n\r\nGET {origin.url}/hidden HTTP/1.1\r\nHost: 127.0.0.1:{origin.port}\r\n\r\n"
    received = exchange(proxies.http, (head + hidden).encode("latin-1"))
    assert status(received) in (400, 501)
    assert received.count(b"HTTP/1.1 ") == 1
    assert len(origin.requests) == before


def test_bad_chunks_end_the_request(proxies: Proxies, origin: WebOrigin) -> None:
    head = f"POST {origin.url}/ HTTP/1.1\r\nHost: 127.0.0.1:{origin.port}\r\n"
    sent = f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode()
    assert status(exchange(proxies.http, sent)) in (400, 502)


def test_oversized_heads(proxies: Proxies) -> None:
    for sent in (
        b"GET /" + b"a" * 70_000,
        b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
    ):
        assert status(exchange(proxies.http, sent)) in (400, 431)


def test_other_protocols(proxies: Proxies) -> None:
    assert status(exchange(proxies.http, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")) == 400
    assert status(exchange(proxies.http, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")) in (400, 505)
    assert proxies.socks is not None
    assert exchange(proxies.socks, b"\x04\x01\x00\x50\x7f\0\0\x01\0") == b""
    assert exchange(proxies.socks, b"\x05\x01\x02") == b"\x05\xff"
    assert exchange(proxies.socks, b"GET / HTTP/1.1\r\n\r\n") == b""
    for command in (2, 3, 9):
        sent = _socks(1, b"\x7f\0\0\x01", 1, command)
        assert exchange(proxies.socks, sent) == b"\x05\x00\x05\x07\x00\x01" + bytes(6)
    assert exchange(proxies.socks, _socks(7, b"", 1))[2:4] == b"\x05\x08"


def test_redirects_are_decided_again(client: Client, origin: WebOrigin) -> None:
    ended = client.run(
        ["/usr/bin/curl", "-sL", "-m", "5", "-w", " %{http_code}", f"{origin.url}/redirect"],
        networkProxy=network_proxy(domains={"127.0.0.1": "allow", "*": "allow"}),
    )
    assert b'"host":"169.254.169.254"' in ended.stdout
    assert ended.stdout.endswith(b" 403")


def test_refused_bodies_do_not_hide_the_refusal(proxies: Proxies) -> None:
    body = b"x" * 200_000
    head = (
        f"POST http://bad.test/ HTTP/1.1\r\nHost: bad.test\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    assert status(exchange(proxies.http, head.encode() + body)) == 403


# ---- limits and lifetimes -----------------------------------------------------------------


def test_connections_are_limited(client: Client, origin: WebOrigin) -> None:
    proxies = start_proxies(client, network_proxy(domains={"127.0.0.1": "allow"}))
    with contextlib.ExitStack() as links:
        for _ in range(MAX_CONNECTIONS):
            links.enter_context(socket.create_connection(("127.0.0.1", proxies.http)))
        refused = socket.create_connection(("127.0.0.1", proxies.http), scaled(10))
        with refused:
            try:
                assert refused.recv(1) == b""
            except ConnectionResetError:
                pass
        _terminate(client, proxies)


def test_connections_leave_descriptors_for_commands(origin: WebOrigin) -> None:
    """Each tunnel has two sockets in the server, which may have few descriptors."""
    with start_server("ours") as server, server.connect() as client:
        pid, descriptors = server.process.pid, 240
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        proxies = start_proxies(client, network_proxy(domains={"127.0.0.1": "allow"}))
        with contextlib.ExitStack() as links:
            tunnels = 0
            while tunnels < MAX_CONNECTIONS:
                link = socket.create_connection(("127.0.0.1", proxies.http), scaled(10))
                links.enter_context(link)
                try:
                    link.sendall(_connect(f"127.0.0.1:{origin.port}"))
                    if not link.recv(100).startswith(b"HTTP/1.1 200"):
                        break
                except ConnectionError:
                    break
                tunnels += 1
            assert tunnels == descriptors // 4
            assert client.run(["echo", "x"]).stdout == b"x\n"
            server.connect().close()
            _terminate(client, proxies)


def test_proxies_end_with_the_process(client: Client, origin: WebOrigin) -> None:
    proxies = start_proxies(client, network_proxy(domains={"127.0.0.1": "allow"}))
    with socket.create_connection(("127.0.0.1", proxies.http), scaled(10)) as link:
        link.sendall(_connect(f"127.0.0.1:{origin.port}"))
        assert link.recv(100).startswith(b"HTTP/1.1 200")
        _terminate(client, proxies)
        try:
            while link.recv(1000):
                pass
        except ConnectionResetError:
            pass
    for port in (proxies.http, proxies.socks):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_failed_start_leaves_no_proxies(client: Client, server: Server) -> None:
    def listening() -> set[str]:
        """The addresses on which the server listens; other programs of the machine do so too."""
        process = Path(f"/proc/{server.process.pid}")
        own = set()
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                own.add(os.readlink(entry))
        lines = [line.split() for line in (process / "net/tcp").read_text().splitlines()[1:]]
        return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}

    before = listening()
    assert before
    params = {"processId": "f", "argv": ["/no/such"], "cwd": "file:///", "env": {}, "tty": False}
    code, _ = client.failure("process/start", params | {"networkProxy": network_proxy()})
    assert code == -32603
    code, _ = client.failure(
        "process/start", params | {"networkProxy": network_proxy(domains={"": "allow"})}
    )
    assert code == -32602
    code, text = client.failure(
        "process/start", params | {"networkProxy": network_proxy(), "detach": {}}
    )
    assert (code, text) == (-32602, "a detached process cannot have a networkProxy")
    assert listening() <= before


def test_listed_hosts_go_on_without_a_connection(server: Server, origin: WebOrigin) -> None:
    with server.connect() as client:
        session = client.session_id
        proxies = start_proxies(client, network_proxy(domains={"127.0.0.1": "allow"}, timeout=1000))
    allowed = _get(f"127.0.0.1:{origin.port}")
    assert status(exchange(proxies.http, allowed)) == 200
    assert status(exchange(proxies.http, _get("other.test"))) == 403
    with server.connect(resume=session) as client:
        client.call("process/terminate", {"processId": proxies.process_id})
        client.notice("process/closed", proxies.process_id)


def test_questions_under_way_end_with_their_process(client: Client) -> None:
    proxies = start_proxies(client, network_proxy(timeout=60_000))
    links = [socket.create_connection(("127.0.0.1", proxies.http)) for _ in range(3)]
    for link in links:
        link.sendall(_get("asked.test"))
    while len(client.requests) < 3:
        client.receive()
    _terminate(client, proxies)
    for link in links:
        link.settimeout(scaled(10))
        with contextlib.suppress(ConnectionResetError):
            assert link.recv(1000) == b""
        link.close()
    client.send({"id": 1, "result": {"decision": {"type": "allow"}}})  # it is over, and ignored
    assert client.call("environment/status")


def _terminate(client: Client, proxies: Proxies) -> None:
    client.call("process/terminate", {"processId": proxies.process_id})
    client.notice("process/closed", proxies.process_id)


# ---- the server's own proxy ---------------------------------------------------------------


def test_upstream_proxy(origin: WebOrigin) -> None:
    """Names go through the proxy of the server, addresses of this machine do not."""
    url = origin.url.replace("://", "://me:secret@")
    variables = {"HTTP_PROXY": url, "HTTPS_PROXY": url}
    with start_server("ours", env=variables) as server, server.connect() as client:
        rules: dict[str, Any] = {"domains": {"8.8.8.8": "allow", "127.0.0.1": "allow"}}
        proxies = start_proxies(client, network_proxy(allowUpstreamProxy=True, **rules))
        assert status(exchange(proxies.http, _get("8.8.8.8"))) == 200
        assert origin.requests[-1].startswith("GET http://8.8.8.8/ HTTP/1.1\n")
        assert "Proxy-Authorization: Basic bWU6c2VjcmV0\n" in origin.requests[-1]
        assert status(exchange(proxies.http, _get(f"127.0.0.1:{origin.port}"))) == 200
        assert origin.requests[-1].startswith("GET / HTTP/1.1\n")
        assert "Proxy-Authorization" not in origin.requests[-1]
        # The origin does not know CONNECT.
        assert status(exchange(proxies.http, _connect("8.8.8.8:443"))) == 502


def test_a_name_that_only_the_upstream_proxy_knows(origin: WebOrigin) -> None:
    with start_server("ours", env={"HTTP_PROXY": origin.url}) as server, server.connect() as client:
        for rules, expected in (({"bad.test": "deny"}, 200), ({"8.8.8.8": "deny"}, 403)):
            settings = network_proxy(
                allowUpstreamProxy=True, allowLocalBinding=True, domains={"*": "allow", **rules}
            )
            answer = exchange(start_proxies(client, settings).http, _get("a.invalid"))
            assert status(answer) == expected
        assert b"Some rules are about addresses" in answer
    assert sum(head.startswith("GET http://a.invalid/ ") for head in origin.requests) == 1


def test_tls_passes_untouched(proxies: Proxies, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "origin", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            accepted, _ = server.accept()
            with context.wrap_socket(accepted, server_side=True) as secure:
                secure.sendall(secure.recv(100))

        thread = threading.Thread(target=serve)
        thread.start()
        with socket.create_connection(("127.0.0.1", proxies.http), scaled(10)) as link:
            link.sendall(_connect(f"127.0.0.1:{server.getsockname()[1]}"))
            assert b"\r\n\r\n" in link.recv(1000)
            client_context = ssl.create_default_context(cafile=str(pair.certificate))
            with client_context.wrap_socket(link, server_hostname="127.0.0.1") as secure:
                secure.sendall(b"secret")
                assert secure.recv(100) == b"secret"
        thread.join()
