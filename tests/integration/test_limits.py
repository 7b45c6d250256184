"""What a client can make the server hold: everything is bounded, and other clients do not notice.

Memory is that of all processes of the server. The figures of the idle server are printed, so
that a run shows them even when it passes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.certificates import make_pair
from tests.support.client import (
    BINARY,
    CONTINUATION,
    PING,
    TEXT,
    Client,
    Disconnected,
    NothingArrived,
    Server,
    WebSocketLink,
    b64,
    frame_bytes,
    scaled,
    start_server,
    upgrade_request,
    uri,
)
from tests.support.server_internals import eventually, load_sandboxes, own_processes, stat_fields

from exec_server.process.output import SESSION_RECENT_BYTES

pytestmark = pytest.mark.measured

_MIB = 1_048_576
_STATUS = b'{"id":9,"method":"environment/status"}'
_READY = b'{"id":9,"result":{"status":"ready"}}'


@pytest.fixture
def server(fresh_server: Server) -> Server:
    """A server for each test: its memory and its connections are counted.

    Its sandboxes are loaded, which it would otherwise do when it is idle, in the middle of a test.
    """
    with fresh_server.connect() as client:
        load_sandboxes(client)
    return fresh_server


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory(server: Server) -> int:
    """What all processes of the server hold."""
    return sum(_resident(pid) for pid in own_processes(server))


def _peak(server: Server, act: Callable[[], None]) -> int:
    """By how much the memory grows while something is done."""
    _wait_until_idle(server)
    before = _memory(server)
    act()
    _wait_until_idle(server)
    return _memory(server) - before


def _ticks(server: Server) -> int:
    """The processor time that all processes of the server have used."""
    fields = [stat_fields(pid) for pid in own_processes(server)]
    return sum(int(field[11]) + int(field[12]) for field in fields)


def _wait_until_idle(server: Server) -> None:
    """Until it has dealt with all it has: a busy server only looks as if it took no more."""
    deadline = time.monotonic() + scaled(30)
    quiet, seen = 0, -1
    while quiet < 4:
        assert time.monotonic() < deadline, "the server is busy without end"
        now = _ticks(server)
        quiet, seen = (quiet + 1 if now == seen else 0), now
        time.sleep(0.05)


def _stuff(server: Server, sock: socket.socket, data: bytes, limit: int) -> int:
    """Sends the same bytes over and over until an idle server takes no more, or the limit."""
    sock.settimeout(0.1)
    sent = 0
    view = memoryview(data)
    stuck_at = -1
    while sent < limit:
        try:
            sent += sock.send(view[sent % len(data) :])
        except TimeoutError:
            if stuck_at == sent:
                break
            stuck_at = sent
            _wait_until_idle(server)
    sock.settimeout(scaled(10))
    return sent


@pytest.fixture
def other(server: Server) -> Iterator[Client]:
    """Somebody else, who must not notice anything."""
    with server.connect() as connected:
        yield connected


def _is_responsive(other: Client) -> None:
    """Answers come quickly; the slowest of some may have met a pause of the machine."""
    times = []
    for _ in range(20):
        began = time.monotonic()
        assert other.call("environment/status") == {"status": "ready"}
        times.append(time.monotonic() - began)
    assert sorted(times)[10] < scaled(0.05), times


# ---- the idle server ------------------------------------------------------------------


def test_idle_memory(fresh_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_server.connect() as client:
        client.run(["true"])
        before = _sizes(fresh_server)
        load_sandboxes(client)
        after = _sizes(fresh_server)
    with capsys.disabled():
        print("\nidle memory in MB, before and with sandboxes:", before, after)
    assert [len(before), len(after)] == [2, 3]  # the launcher is started on first need
    assert sum(before) < 50
    assert max(after) < 40


def _sizes(server: Server) -> list[float]:
    return [round(_resident(pid) / 1e6, 1) for pid in own_processes(server)]


def test_idle_connections(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    warm = [server.connect() for _ in range(50)]
    before = _memory(server)
    clients = [server.connect() for _ in range(1000)]
    cost = (_memory(server) - before) / 1000 / 1024
    with capsys.disabled():
        print(f"\nan idle connection costs {cost:.1f} KiB")
    assert cost < 40
    assert clients[-1].call("environment/status") == {"status": "ready"}
    for client in warm + clients:
        client.close()


# ---- floods from a client that does not read -------------------------------------------


def test_ping_flood(server: Server, other: Client) -> None:
    """100,000 pings whose pongs nobody reads; the reference keeps them all, 870 MB."""
    link = server.link()
    ping = frame_bytes(PING, b"p" * 125)
    assert _peak(server, lambda: link.send_bytes(ping * 100_000)) < 5 * _MIB
    _is_responsive(other)
    link.send_frame(PING, b"last")
    while link.receive_frame(scaled(10)).payload != b"last":
        pass
    link.close()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"x", id="malformed"),
        pytest.param(b'{"method":"no/such"}', id="notification"),
        pytest.param(b'{"id":1,"method":"no/such"}', id="unknown method"),
        pytest.param(b'{"id":1,"method":"initialize"}', id="initialize"),
        pytest.param(b'{"id":1,"method":"environment/info"}', id="control"),
        pytest.param(b'{"id":1,"method":"fs/readDirectory","params":{"path":"/usr/bin"}}', id="fs"),
    ],
)
def test_flood_of_messages_whose_answers_nobody_reads(
    server: Server, other: Client, message: bytes
) -> None:
    client = server.connect()
    frame = frame_bytes(TEXT, message)
    block = frame * (_MIB // len(frame))
    sent = 0

    def flood() -> None:
        nonlocal sent
        sent = _stuff(server, client.websocket.sock, block, 64 * _MIB)

    growth = _peak(server, flood)
    assert sent < 64 * _MIB, "the server takes messages without end"
    assert growth < 48 * _MIB
    _is_responsive(other)
    # What was taken is answered when the client reads: nothing is lost, nothing hangs. Sent
    # is counted in whole messages that the server got completely.
    for _ in range(min(300, sent // len(frame) // 2)):
        client.link.receive(scaled(10))
    client.close()
    _is_responsive(other)


def test_answers_nobody_reads(server: Server, other: Client, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * _MIB))
    client = server.connect()

    def ask() -> None:
        for _ in range(60):
            client.request("fs/readFile", {"path": uri(tmp_path / "file")})
        time.sleep(0.5)  # whatever it would read ahead, it has by then

    assert _peak(server, ask) < 40 * _MIB
    _is_responsive(other)
    for _ in range(60):
        assert len(client.receive(timeout=20)["result"]["dataBase64"]) == 4 * _MIB
    client.close()


def test_requests_without_end_behind_one_that_waits(
    server: Server, other: Client, tmp_path: Path
) -> None:
    """The queue of a connection is full: nothing more is read, even if somebody wants its
    session and the connection has to show that it lives."""
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    client = server.connect()
    client.request(
        "fs/writeFile", {"path": uri(tmp_path / "fifo"), "dataBase64": b64(bytes(300_000))}
    )
    for _ in range(200):
        client.request("fs/getMetadata", {"path": "/"})
    frame = frame_bytes(TEXT, b'{"id":1,"method":"fs/getMetadata","params":{"path":"/"}}')
    with server.connect(initialize=False) as rival:
        params = {"clientName": "x", "resumeSessionId": client.session_id}
        assert rival.failure("initialize", params)[0] == -32010
    sent = 0

    def flood() -> None:
        nonlocal sent
        sent = _stuff(server, client.websocket.sock, frame * 10_000, 48 * _MIB)

    assert _peak(server, flood) < 20 * _MIB
    assert sent < 48 * _MIB
    _is_responsive(other)
    client.close()
    os.close(reader)


def test_output_that_is_not_read(
    server: Server, other: Client, python: Callable[[str], list[str]]
) -> None:
    """Recent output is kept for a moment, then 1 MiB of each process in chunks.

    The server returns the memory of the recent output to the kernel with its next clean-up.
    """
    client = server.connect()
    before = _resident(server.process.pid)

    def grown() -> int:
        return _resident(server.process.pid) - before

    for _ in range(8):
        client.start(python("import os\nwhile True: os.write(1, bytes(65536))"))
    time.sleep(0.5)
    assert grown() < SESSION_RECENT_BYTES + 30 * _MIB
    _is_responsive(other)
    eventually("less memory", lambda: grown() < 30 * _MIB or None, 15)
    client.close()


# ---- large messages -------------------------------------------------------------------


def _announce(link: WebSocketLink, size: int) -> None:
    link.send_bytes(bytes((0x80 | TEXT, 0x80 | 127)) + struct.pack(">Q", size) + bytes(4))


def test_large_messages_that_stall(server: Server, other: Client) -> None:
    """16 clients announce 64 MiB each and send 24 MiB: only four of them are taken in.

    A buffer is larger than the bytes received, but never larger than its message.
    """
    links = [server.link() for _ in range(16)]

    def send() -> None:
        for link in links:
            _announce(link, 64 * _MIB)
        for link in links:
            _stuff(server, link.sock, bytes(_MIB), 24 * _MIB)

    # Four are read; of the others the kernel has what fits into its buffers.
    assert _peak(server, send) < 4 * 64 * _MIB + 30 * _MIB
    _is_responsive(other)
    # A large message has to wait for room, and gets it when the stalled ones are gone.
    waiting = server.connect()
    waiting.websocket.send_text(_STATUS + b" " * (2 * _MIB))
    with pytest.raises(NothingArrived):
        waiting.link.receive(0.3)
    for link in links:
        link.close()
    assert waiting.link.receive(scaled(10)) == _READY
    waiting.close()


def test_fragments_that_stall(server: Server, other: Client) -> None:
    """The same for messages that never say how large they will be."""
    links = [server.link() for _ in range(16)]
    fragment = frame_bytes(CONTINUATION, bytes(200_000), fin=False)

    def send() -> None:
        for link in links:
            link.send_frame(BINARY, b"", fin=False)
        for link in links:
            _stuff(server, link.sock, fragment, 16 * _MIB)

    assert _peak(server, send) < 4 * 16 * _MIB * 1.25 + 30 * _MIB
    _is_responsive(other)
    for link in links:
        link.close()


@pytest.mark.parametrize(
    ("count", "announced", "sent"),
    [
        pytest.param(4, 64 * _MIB, 16 * _MIB, id="large"),
        pytest.param(100, _MIB, 900_000, id="many"),
    ],
)
def test_memory_of_unfinished_messages_returns(
    server: Server, count: int, announced: int, sent: int
) -> None:
    """Within 10 s of the end of their connections."""
    warm = [server.connect() for _ in range(count)]
    for client in warm:
        client.close()
    _wait_until_idle(server)
    before = _memory(server)
    links = [server.link() for _ in range(count)]
    for link in links:
        _announce(link, announced)
        _stuff(server, link.sock, bytes(65_536), sent)
    _wait_until_idle(server)
    assert _memory(server) - before > count * sent * 0.75
    for link in links:
        link.close()
    deadline = time.monotonic() + scaled(10)
    while (kept := _memory(server) - before) > 20 * _MIB:
        assert time.monotonic() < deadline, f"{kept} bytes are kept"
        time.sleep(0.1)


def test_memory_of_unfinished_messages_with_tls_returns(tmp_path: Path) -> None:
    """The objects of TLS refer to each other, so that they stay until a garbage collection."""
    pair = make_pair(tmp_path, "server", "127.0.0.1")
    context = ssl.create_default_context(cafile=str(pair.certificate))
    message = frame_bytes(TEXT, bytes(12 * _MIB), fin=False)
    message += frame_bytes(CONTINUATION, bytes(30 * _MIB), fin=False)[: 6 * _MIB]
    flags = ("--listen", "wss://127.0.0.1:0", *pair.flags)
    with start_server("ours", *flags) as server:
        for link in [_secure_link(server, context) for _ in range(4)]:
            link.close()
        _wait_until_idle(server)
        before = _memory(server)
        for _ in range(6):
            links = [_secure_link(server, context) for _ in range(4)]
            for link in links:
                with contextlib.suppress(TimeoutError):
                    link.sendall(message)
            for link in links:
                link.close()
        deadline = time.monotonic() + scaled(10)
        while (kept := _memory(server) - before) > 20 * _MIB:
            assert time.monotonic() < deadline, f"{kept} bytes are kept"
            time.sleep(0.1)


def _secure_link(server: Server, context: ssl.SSLContext) -> ssl.SSLSocket:
    port = int(server.url.rpartition(":")[2])
    dialled = socket.create_connection(("127.0.0.1", port), scaled(10))
    secured = context.wrap_socket(dialled, server_hostname="127.0.0.1")
    secured.sendall(upgrade_request("/", (), host=f"127.0.0.1:{port}"))
    assert secured.recv(4096).startswith(b"HTTP/1.1 101 ")
    secured.settimeout(scaled(1))
    return secured


def test_tiny_fragments(server: Server, other: Client) -> None:
    """Half a million fragments of two bytes are one megabyte, not one megabyte of objects."""
    link = server.link()
    fragments = frame_bytes(CONTINUATION, b"  ", fin=False) * 500_000

    def send() -> None:
        link.send_frame(TEXT, b"", fin=False)
        link.send_bytes(fragments)
        link.ping(b"taken", timeout=20)

    assert _peak(server, send) < 12 * _MIB
    link.send_frame(CONTINUATION, b"?")
    assert b'"id":-1' in link.receive(scaled(10))
    link.close()


def test_bytes_after_an_offence_are_not_kept(server: Server, other: Client) -> None:
    link = server.link()
    link.send_frame(3, b"")
    assert _peak(server, lambda: link.send_bytes(bytes(100 * _MIB))) < 10 * _MIB
    with pytest.raises(Disconnected) as end:
        link.receive(scaled(5))
    assert end.value.close_code == 1002
    link.close()


def test_largest_message_leaves_nothing_behind(server: Server, other: Client) -> None:
    frame = frame_bytes(TEXT, _STATUS + b" " * (64 * _MIB - len(_STATUS)))

    def send() -> None:
        with server.connect() as client:
            for _ in range(3):
                client.websocket.send_bytes(frame)
                assert client.link.receive(scaled(30)) == _READY

    # The C library keeps up to half of one for the next time.
    assert _peak(server, send) < 48 * _MIB


# ---- large files ----------------------------------------------------------------------


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """512 MiB that take no place: the largest file that may be read at once."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(512 * _MIB)
    return path


def test_large_file_nobody_reads(server: Server, other: Client, sparse: Path) -> None:
    clients = [server.connect() for _ in range(4)]

    def ask() -> None:
        for client in clients:
            client.request("fs/readFile", {"path": uri(sparse)})
            # The answer is under way when its first part is here.
            client.websocket.sock.recv(1, socket.MSG_PEEK)
        time.sleep(0.3)

    assert _peak(server, ask) < 30 * _MIB
    _is_responsive(other)
    for client in clients:
        client.close()


def test_large_file_read_slowly(server: Server, other: Client, sparse: Path) -> None:
    client = server.connect()
    before = _memory(server)
    client.request("fs/readFile", {"path": uri(sparse)})
    for step in range(40):
        client.websocket.sock.recv(_MIB)
        if step % 10 == 0:
            _is_responsive(other)
        assert _memory(server) - before < 30 * _MIB
    client.close()


def test_large_file_read_to_its_end(server: Server, sparse: Path) -> None:
    """Every byte arrives, however little of it was held at a time."""
    os.truncate(sparse, 160 * _MIB)
    client = server.connect()
    before = peak = _memory(server)
    client.websocket.frames.clear()
    client.request("fs/readFile", {"path": uri(sparse)})
    total = 0
    while True:
        frame = client.websocket.receive_frame(scaled(10))
        client.websocket.frames.clear()
        total += len(frame.payload)
        peak = max(peak, _memory(server))
        if frame.fin:
            break
    encoded = (160 * _MIB + 2) // 3 * 4
    assert total == encoded + len(b'{"id":2,"result":{"dataBase64":""}}')
    assert peak - before < 30 * _MIB
    assert client.call("environment/status") == {"status": "ready"}
    client.close()


def test_lost_client_of_a_large_read_leaves_nothing_open(sparse: Path) -> None:
    with start_server("ours") as server:
        for _ in range(3):
            client = server.connect()
            client.request("fs/readFile", {"path": uri(sparse)})
            client.websocket.sock.recv(100_000)
            client.websocket.abort()
        deadline = time.monotonic() + scaled(5)
        if os.geteuid() != 0:
            return  # only root may look
        while _has_open(server, sparse):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _has_open(server: Server, path: Path) -> bool:
    for pid in own_processes(server):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if entry.readlink() == path:
                    return True
            except OSError:
                continue
    return False


# ---- watches --------------------------------------------------------------------------


def _is_change(notification: dict[str, Any]) -> bool:
    return bool(notification["method"] == "fs/missingChanged")


def test_watches_share_one_inotify_instance(server: Server, tmp_path: Path) -> None:
    """A user has 128 instances by default, for all programs together."""
    clients = [server.connect() for _ in range(150)]
    for number, client in enumerate(clients):
        missing = [uri(tmp_path / f"m{number}"), uri(tmp_path / "shared")]
        result = client.call("fs/watchMissing", {"watchId": 1, "missing": missing})
        assert result == {"watching": True}
    (tmp_path / "m7").touch()
    assert clients[7].wait_for(_is_change)["params"] == {"watchId": 1}
    (tmp_path / "shared").touch()
    for client in clients[:7] + clients[8:]:
        assert client.wait_for(_is_change)["params"] == {"watchId": 1}
    for client in clients:
        client.close()
