"""Forwarding: each stream is joined to a WebSocket of its own, and nothing is looked at."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    DEFAULT_TIMEOUT,
    KINDS,
    PING,
    PONG,
    TEXT,
    Disconnected,
    RpcFailure,
    Server,
    b64,
    frame_bytes,
    scaled,
    start_server,
    uri,
)
from tests.support.raw_links import Inbox
from tests.support.relay import (
    ENVIRONMENT,
    QUICK_BACKOFF,
    RESET_REASON,
    RelayLink,
    connect,
    relay_link,
    start_executor,
    wait_attached,
    wait_logged,
)
from tests.support.server_internals import eventually, resident_bytes

from exec_server.relay.frames import Kind

MIB = 1_048_576


class Peer:
    """The destination's end of one connection, frame by frame."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._inbox = Inbox(lambda: sock.recv(262_144), sock.fileno())
        self.head = self._inbox.until(b"\r\n\r\n", self._deadline()).decode().split("\r\n")

    def _deadline(self) -> float:
        return time.monotonic() + scaled(DEFAULT_TIMEOUT)

    def header(self, name: str) -> str | None:
        found = (line.partition(":") for line in self.head[1:])
        return next((value.strip() for key, _, value in found if key.lower() == name), None)

    def accept(self) -> None:
        """Grant the upgrade."""
        key = f"{self.header('sec-websocket-key')}258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        digest = b64(hashlib.sha1(key.encode()).digest())
        self.sock.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            + f"sec-websocket-accept: {digest}\r\n\r\n".encode()
        )

    def send(self, opcode: int, payload: bytes = b"", *, fin: bool = True) -> None:
        self.sock.sendall(frame_bytes(opcode, payload, fin=fin, mask=False))

    def frame(self) -> tuple[int, bool, bytes]:
        """The next frame: opcode, whether it is the last of its message, payload."""
        first, second = self._inbox.exactly(2, self._deadline())
        assert second & 0x80, "a client masks what it sends"
        size = second & 0x7F
        if size == 126:
            size = struct.unpack("!H", self._inbox.exactly(2, self._deadline()))[0]
        elif size == 127:
            size = struct.unpack("!Q", self._inbox.exactly(8, self._deadline()))[0]
        key = self._inbox.exactly(4, self._deadline())
        payload = self._inbox.exactly(size, self._deadline())
        stream = (key * (size // 4 + 1))[:size]
        mixed = int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")
        return first & 0x0F, bool(first & 0x80), mixed.to_bytes(size, "big")

    def message(self) -> tuple[int, bytes]:
        """The next message, put together."""
        opcode, last, payload = self.frame()
        while not last:
            following, last, more = self.frame()
            assert following == CONTINUATION
            payload += more
        return opcode, payload

    def ending(self) -> int | None:
        """How the connection ends: the code of a close frame, None without one."""
        try:
            opcode, _, payload = self.frame()
        except Disconnected:
            return None
        assert opcode == CLOSE
        return int.from_bytes(payload[:2], "big")


class Destination:
    """A WebSocket server that does what a test says."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(scaled(DEFAULT_TIMEOUT))
        self._peers: list[Peer] = []
        port = self._listener.getsockname()[1]
        self.host = f"127.0.0.1:{port}"
        self.url = f"ws://{self.host}/some/path?token=%2F&x"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.sock.close()
        self._listener.close()

    def next(self) -> Peer:
        """The next connection, with its request."""
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers.append(Peer(sock))
        return self._peers[-1]

    def is_left_alone(self) -> bool:
        """Whether nobody has connected by now."""
        self._listener.setblocking(False)
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            return True
        finally:
            self._listener.settimeout(scaled(DEFAULT_TIMEOUT))
        return False


Started = tuple[ThreadedRelayService, Destination]


@contextlib.contextmanager
def _forwarding(kind: str = "ours", **options: Any) -> Iterator[Started]:
    with ThreadedRelayService() as service, Destination() as destination:
        flags = ("forward", "--connect", destination.url)
        with start_executor(service, *flags, kind=kind, **options):
            yield service, destination


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest) -> Iterator[Started]:
    with _forwarding(request.param) as running:
        yield running


@pytest.fixture
def joined(started: Started) -> Iterator[tuple[RelayLink, Peer]]:
    """A stream and its connection."""
    service, destination = started
    with RelayLink(service) as link:
        peer = destination.next()
        peer.accept()
        yield link, peer


@pytest.mark.quick
def test_the_destination_is_called_after_a_handshake_and_once(started: Started) -> None:
    service, destination = started
    with RelayLink(service, handshake=False) as link:
        link.send_kind(Kind.HANDSHAKE, b"bad")
        assert link.wait_reset() == RESET_REASON
        assert destination.is_left_alone()
        link.finish(link.begin(past=service))
        peer = destination.next()
        assert peer.head[0] == "GET /some/path?token=%2F&x HTTP/1.1"
        names = sorted(line.partition(":")[0].lower() for line in peer.head[1:] if line)
        assert names == [
            *("connection", "host", "sec-websocket-key", "sec-websocket-version", "upgrade")
        ]
        assert peer.header("host") == destination.host
        peer.accept()
        link.send_text(b"hello")
        assert peer.message() == (BINARY, b"hello")
        assert destination.is_left_alone()


def test_messages_pass_unchanged_and_unread(joined: tuple[RelayLink, Peer]) -> None:
    link, peer = joined
    messages = [b"{}", b"not JSON at all", bytes(range(256)), b"[1, 2]", b"x" * 200_000]
    for message in messages:
        link.send_text(message)
        assert peer.message() == (BINARY, message)
    for message in messages:
        peer.send(BINARY, message)
        assert link.receive(scaled(DEFAULT_TIMEOUT)) == message
    peer.send(TEXT, "grüße".encode())
    assert link.receive(scaled(DEFAULT_TIMEOUT)) == "grüße".encode()
    peer.send(BINARY, b"in ", fin=False)
    peer.send(CONTINUATION, b"pieces")
    assert link.receive(scaled(DEFAULT_TIMEOUT)) == b"in pieces"


def test_what_is_said_before_the_destination_answers_is_kept(started: Started) -> None:
    service, destination = started
    with RelayLink(service) as link:
        peer = destination.next()
        for number in range(50):
            link.send_text(str(number).encode())
        peer.accept()
        assert [peer.message()[1] for _ in range(50)] == [str(n).encode() for n in range(50)]


def test_pings_of_the_destination_are_answered(joined: tuple[RelayLink, Peer]) -> None:
    link, peer = joined
    peer.send(PING, b"still there?")
    assert peer.frame() == (PONG, True, b"still there?")
    link.send_text(b"yes")
    assert peer.message() == (BINARY, b"yes")


def test_an_empty_message_of_the_destination_ends_the_stream(
    joined: tuple[RelayLink, Peer],
) -> None:
    link, peer = joined
    peer.send(TEXT, b"last words")
    peer.send(TEXT, b"")
    assert link.receive(scaled(DEFAULT_TIMEOUT)) == b"last words"
    assert link.wait_reset() == RESET_REASON


def test_a_destination_that_closes_has_its_last_words_delivered(
    joined: tuple[RelayLink, Peer],
) -> None:
    link, peer = joined
    for number in range(20):
        peer.send(TEXT, str(number).encode())
    peer.send(CLOSE, struct.pack("!H", 1000) + b"done")
    received = [link.receive(scaled(DEFAULT_TIMEOUT)) for _ in range(20)]
    assert received == [str(number).encode() for number in range(20)]
    assert link.wait_reset() == RESET_REASON
    assert peer.ending() == 1000


def test_a_destination_that_vanishes_ends_the_stream(joined: tuple[RelayLink, Peer]) -> None:
    link, peer = joined
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.sock.close()
    assert link.wait_reset() == RESET_REASON


@pytest.mark.parametrize("leave", ["reset", "close"])
def test_a_client_that_leaves_takes_its_connection_along(
    joined: tuple[RelayLink, Peer], leave: str
) -> None:
    link, peer = joined
    if leave == "reset":
        link.send_kind(Kind.RESET, reason="enough")
    else:
        link.close()
    assert peer.ending() is None


def test_a_client_that_breaks_the_rules_loses_its_connection(
    joined: tuple[RelayLink, Peer],
) -> None:
    link, peer = joined
    link.send_frame(link.seal(bytes(4)))
    assert link.wait_reset() == RESET_REASON
    assert peer.ending() is None


_REFUSALS: dict[str, Callable[[Peer], Any]] = {
    "403": lambda peer: peer.sock.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n"),
    "no HTTP": lambda peer: peer.sock.sendall(b"hello\r\n\r\n"),
    "hangs up": lambda peer: peer.sock.close(),
}


@pytest.mark.parametrize("how", _REFUSALS)
def test_a_destination_that_refuses_ends_the_stream(started: Started, how: str) -> None:
    service, destination = started
    with RelayLink(service) as link:
        link.send_text(b"hello")
        _REFUSALS[how](destination.next())
        assert link.wait_reset() == RESET_REASON


def test_streams_have_connections_of_their_own(started: Started) -> None:
    service, destination = started
    links, peers = [], []
    for _ in range(10):
        links.append(RelayLink(service))
        peers.append(destination.next())
        peers[-1].accept()
    for number, link in enumerate(links):
        link.send_text(f"question {number}".encode())
    for number, peer in enumerate(peers):
        assert peer.message() == (BINARY, f"question {number}".encode())
        peer.send(TEXT, f"answer {number}".encode())
    for number, link in enumerate(links):
        assert link.receive(scaled(DEFAULT_TIMEOUT)) == f"answer {number}".encode()
        link.close()
    for peer in peers:
        assert peer.ending() is None


def test_large_messages_pass_both_ways(joined: tuple[RelayLink, Peer]) -> None:
    link, peer = joined
    message = os.urandom(MIB) * 20
    link.send_text(message)
    assert peer.message() == (BINARY, message)
    peer.send(BINARY, message)
    assert link.receive(scaled(20)) == message


# ---- ours alone -------------------------------------------------------------------------


def test_a_destination_that_does_not_answer_ends_the_stream() -> None:
    constants = {"net.client_stream.CONNECT_SECONDS": scaled(0.3)}
    with _forwarding(constants=constants) as (service, destination), RelayLink(service) as link:
        peer = destination.next()
        assert link.wait_reset() == RESET_REASON
        assert peer.ending() is None


def test_a_destination_that_is_not_there_ends_the_stream() -> None:
    with ThreadedRelayService() as service:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            url = f"ws://127.0.0.1:{holder.getsockname()[1]}"
        with start_executor(service, "forward", "--connect", url) as executor:
            with RelayLink(service) as link:
                assert link.wait_reset() == RESET_REASON
            assert "the destination cannot be reached" in executor.stderr()


def test_a_lost_link_closes_all_connections() -> None:
    with _forwarding(preparation=QUICK_BACKOFF) as (service, destination):
        links = [RelayLink(service) for _ in range(3)]
        peers = [destination.next() for _ in links]
        for peer in peers:
            peer.accept()
        links[0].send_text(b"hello")
        assert peers[0].message() == (BINARY, b"hello")
        service.executor(ENVIRONMENT).abort()
        for link, peer in zip(links, peers, strict=True):
            assert peer.ending() is None
            link.close()
        service.until(lambda: len(service.service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 2)
        service.wait_for_executor(ENVIRONMENT)
        with RelayLink(service):
            destination.next().accept()


def test_a_destination_that_does_not_read_costs_little(tmp_path: Path) -> None:
    """Its client is held to what a stream may keep; another one does not notice."""
    with ThreadedRelayService(record=False) as service, Destination() as destination:
        flags = ("forward", "--connect", destination.url)
        with (
            start_executor(service, *flags) as executor,
            RelayLink(service) as stalled,
            RelayLink(service) as other,
        ):
            peers = [destination.next(), destination.next()]
            for peer in peers:
                peer.accept()
            before = resident_bytes(executor)
            assert _sends_until_reset(stalled, peers[0])
            assert resident_bytes(executor) - before < 64 * MIB
            other.send_text(b"hello")
            assert peers[1].message() == (BINARY, b"hello")
            # What was taken arrives whole, then the end.
            assert peers[0].message() == (BINARY, bytes(100_000))


def _sends_until_reset(link: RelayLink, peer: Peer) -> bool:
    """Send what nobody reads, until the stream is ended for it."""
    for _ in range(1000):
        link.send_text(bytes(100_000))
        if link.drain():
            return True
    return False


def test_everything_works_against_a_server_of_ours(tmp_path: Path) -> None:
    with ThreadedRelayService(record=False) as service, start_server("ours") as server:
        flags = ("forward", "--connect", server.url)
        with start_executor(service, *flags), connect(service) as client:
            assert client.run(["echo", "hello"]).stdout == b"hello\n"
            content = os.urandom(MIB) * 8
            path = uri(tmp_path / "file")
            written = client.call(
                "fs/writeFile", {"path": path, "dataBase64": b64(content)}, timeout=20
            )
            assert written == {}
            answer = client.call("fs/readFile", {"path": path}, timeout=20)
            assert base64.b64decode(answer["dataBase64"]) == content
            size = 8 * MIB
            run = client.run(["sh", "-c", f"yes 0123456 | head -c {size}"], timeout=20)
            assert len(run.stdout) == size
            session = client.session_id
            client.close()
            # Sessions are the destination's.
            with _resumed(server, session) as direct:
                assert direct.session_id == session


def _resumed(server: Server, session: str) -> Any:
    def attempt() -> Any:
        client = server.connect(initialize=False)
        try:
            client.initialize(session)
        except RpcFailure:
            client.close()
            return None
        return client

    return eventually("the session is free", attempt)


def test_a_session_survives_the_forwarder() -> None:
    with ThreadedRelayService() as service, start_server("ours") as server:
        flags = ("forward", "--connect", server.url)
        with start_executor(service, *flags, preparation=QUICK_BACKOFF) as executor:
            with connect(service) as client:
                client.start(["cat"], process_id="cat", pipeStdin=True)
                service.executor(ENVIRONMENT).abort()
                assert relay_link(client).wait_reset() == "executor_disconnected"
            wait_logged(executor, "backoff")
            wait_attached(service, executor)
            again = eventually("the session is free", lambda: _through(service, client.session_id))
            with again:
                assert again.write("cat", b"still here", "w") == "accepted"
                again.notice("process/output", "cat")


def _through(service: ThreadedRelayService, session: str) -> Any:
    with contextlib.suppress(RpcFailure):
        return connect(service, resume=session)
    return None
