"""The WebSocket client without an event loop, with a peer in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.support.raw_links import frame_bytes
from tests.support.raw_servers import upgrade_answer

from exec_server.errors import ConnectFailed, ConnectionLost
from exec_server.net.websocket import blocking
from exec_server.net.websocket.blocking import BlockingSocket
from exec_server.net.websocket.frames import FrameReader, Opcode

Handle = Callable[[socket.socket, list[str]], None]


@contextmanager
def _serving(listener: socket.socket, handle: Handle) -> Iterator[None]:
    """Accept one connection, read the head of its request, and let `handle` answer."""

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += peer.recv(1)
            handle(peer, head.decode().split("\r\n")[:-2])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listener.close()


def _upgrade(peer: socket.socket, request: list[str], following: bytes = b"") -> None:
    peer.sendall(upgrade_answer(request) + following)


def _text(payload: bytes) -> bytes:
    return frame_bytes(Opcode.TEXT, payload, mask=False)


def test_messages_pass_both_ways_and_pings_are_answered() -> None:
    received = []
    heads = []

    def handle(peer: socket.socket, request: list[str]) -> None:
        heads.append(request)
        _upgrade(peer, request, _text(b"early"))
        peer.sendall(frame_bytes(Opcode.PING, b"here?", mask=False) + _text(b"late")[:3])
        peer.sendall(_text(b"late")[3:])
        frames = FrameReader()
        while True:
            frames.feed(peer.recv(4096))
            while (event := frames.next_event()) is not None:
                received.append(event)
                if event.opcode is Opcode.CLOSE:
                    return

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with _serving(listener, handle):
        link = BlockingSocket.open_tcp("localhost", port, [("Authorization", "Bearer x")])
        assert link.fileno() >= 0
        messages: list[bytes] = []
        while len(messages) < 2:
            messages += link.receive()
        link.send("ż".encode())
        link.ping()
        link.close()
    assert messages == [b"early", b"late"]
    assert f"Host: localhost:{port}" in heads[0]
    assert heads[0][-1] == "Authorization: Bearer x"
    assert [(event.opcode, event.payload) for event in received] == [
        (Opcode.PONG, b"here?"),
        (Opcode.TEXT, "ż".encode()),
        (Opcode.PING, b""),
        (Opcode.CLOSE, b"\x03\xe8"),
    ]


@pytest.mark.parametrize(
    ("following", "text"),
    [
        (frame_bytes(Opcode.CLOSE, b"\x03\xe9", mask=False), "closed by the peer"),
        (frame_bytes(Opcode.TEXT, b"x", mask=True), "protocol violation"),
        (b"", "without a close frame"),
    ],
)
def test_messages_before_the_end_are_delivered(following: bytes, text: str) -> None:
    def handle(peer: socket.socket, request: list[str]) -> None:
        _upgrade(peer, request, _text(b"last") + following)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(4096):
            pass

    listener = socket.create_server(("127.0.0.1", 0))
    with _serving(listener, handle):
        link = BlockingSocket.open_tcp("127.0.0.1", listener.getsockname()[1], [])
        assert link.receive() == [b"last"]
        with pytest.raises(ConnectionLost, match=text):
            link.receive()
        link.close()
        with pytest.raises(ConnectionLost, match="cannot send"):
            link.send(b"x")
        link.close()  # once more, without an effect


def test_unix_sockets_of_this_user_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(peer: socket.socket, request: list[str]) -> None:
        _upgrade(peer, request)
        peer.recv(4096)

    for is_foreign in (False, True):
        path = str(tmp_path / f"socket-{is_foreign}")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        if not is_foreign:
            with _serving(listener, answer):
                BlockingSocket.open_unix(path, []).close()
            continue
        monkeypatch.setattr("os.geteuid", lambda: 4_000_000)
        monkeypatch.setattr("exec_server.net.unix_peer.peer_user", lambda _: 4_000_001)
        with pytest.raises(ConnectFailed, match="nothing was sent"):
            BlockingSocket.open_unix(path, [])
        listener.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "connection ended"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "403"),
        (b"x" * 20_000, "long"),
    ],
)
def test_other_answers_are_refused(answer: bytes, text: str) -> None:
    def handle(peer: socket.socket, _: list[str]) -> None:
        peer.sendall(answer)

    listener = socket.create_server(("127.0.0.1", 0))
    with _serving(listener, handle), pytest.raises(ConnectFailed, match=text):
        BlockingSocket.open_tcp("127.0.0.1", listener.getsockname()[1], [])


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        BlockingSocket.open_tcp("127.0.0.1", port, [])


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        BlockingSocket.open_tcp("127.0.0.1", silent.getsockname()[1], [])


def test_a_silent_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.01)
    link = BlockingSocket(ours)
    with pytest.raises(ConnectionLost, match="cannot receive"):
        link.receive()
    # A ping that cannot be answered ends the connection after the messages before it.
    theirs.sendall(_text(b"one") + frame_bytes(Opcode.PING, b"", mask=False))
    theirs.close()
    assert link.receive() == [b"one"]
    with pytest.raises(ConnectionLost, match="cannot send"):
        link.receive()
    link.close()


@pytest.mark.parametrize("is_upgraded", [False, True], ids=["head", "first message"])
def test_a_peer_that_drips_bytes_does_not_prolong_the_wait(
    monkeypatch: pytest.MonkeyPatch, is_upgraded: bool
) -> None:
    monkeypatch.setattr(blocking, "SECONDS", 0.2)
    given_up = threading.Event()

    def handle(peer: socket.socket, request: list[str]) -> None:
        ping = frame_bytes(Opcode.PING, b"", mask=False)
        if is_upgraded:
            _upgrade(peer, request)
        for _ in range(1000):
            if given_up.wait(0.02):
                return
            peer.sendall(ping if is_upgraded else b"H")
        raise AssertionError("the wait has no limit")

    def first_messages(port: int) -> None:
        with closing(BlockingSocket.open_tcp("127.0.0.1", port, [])) as link:
            link.receive_first()

    listener = socket.create_server(("127.0.0.1", 0))
    with _serving(listener, handle):
        try:
            with pytest.raises((ConnectionLost, TimeoutError), match="timed out"):
                first_messages(listener.getsockname()[1])
        finally:
            given_up.set()


def test_frames_that_complete_no_message_are_counted() -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(BlockingSocket(ours)) as link:
        theirs.sendall(frame_bytes(Opcode.PING, b"", mask=False))
        theirs.sendall(frame_bytes(Opcode.PONG, b"", mask=False))
        theirs.sendall(frame_bytes(Opcode.TEXT, b"", fin=False, mask=False))
        theirs.sendall(frame_bytes(Opcode.CONTINUATION, b"one", mask=False))
        assert link.receive_first() == [b"one"]
        assert (link.take_useless(), link.take_useless()) == (3, 0)


def test_the_first_message_may_come_in_parts() -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(BlockingSocket(ours)) as link:
        later = threading.Timer(0.02, theirs.sendall, [_text(b"one")[2:]])
        theirs.sendall(_text(b"one")[:2])
        later.start()
        assert link.receive_first() == [b"one"]
        later.join()


def test_a_ping_after_the_time_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    with theirs, closing(BlockingSocket(ours)) as link:
        theirs.sendall(frame_bytes(Opcode.PING, b"", mask=False))
        with pytest.raises(ConnectionLost, match="timed out"):
            link.receive_first()
