"""Much at once through one link: nothing is lost, nobody suffers for another, memory is bounded."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import DEFAULT_TIMEOUT, Client, RpcFailure, Server, b64, scaled, uri
from tests.support.relay import (
    ENVIRONMENT,
    RESET_REASON,
    RelayLink,
    StreamReset,
    connect,
    is_served,
    relay_link,
    start_executor,
)
from tests.support.server_internals import eventually, resident_bytes

from exec_server.relay.frames import Kind

pytestmark = pytest.mark.measured

MIB = 1_048_576
MESSAGE_BYTES = 64 * MIB
READY = {"status": "ready"}


@pytest.fixture(scope="module")
def executor() -> Iterator[tuple[ThreadedRelayService, Server]]:
    """One executor for all tests here: none may leave anything behind that disturbs the next."""
    with ThreadedRelayService(record=False) as service:
        with start_executor(service) as running:
            yield service, running
        assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 1


@pytest.fixture
def service(executor: tuple[ThreadedRelayService, Server]) -> ThreadedRelayService:
    return executor[0]


@pytest.fixture
def server(executor: tuple[ThreadedRelayService, Server]) -> Server:
    return executor[1]


@pytest.fixture
def client(service: ThreadedRelayService) -> Iterator[Client]:
    with connect(service) as connected:
        yield connected


@pytest.fixture
def other(service: ThreadedRelayService) -> Iterator[Client]:
    """A stream that must not notice anything."""
    with connect(service) as connected:
        yield connected
        assert connected.call("environment/status") == READY


# ---- many requests ----------------------------------------------------------------------


def test_a_flood_of_requests_disturbs_nobody(client: Client, other: Client, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    path = {"path": uri(tmp_path / "file")}
    kinds = [("environment/status", None), ("fs/readFile", path), ("fs/getMetadata", path)]
    requests = [client.request(*kinds[number % 3]) for number in range(1000)]
    for _ in range(20):
        assert other.call("environment/status") == READY
    assert other.run(["echo", "hello"]).stdout == b"hello\n"
    for number, request in enumerate(requests):
        result = client.result(request)
        assert number % 3 != 1 or base64.b64decode(result["dataBase64"]) == b"content"


@contextlib.contextmanager
def _slow_write(client: Client, folder: Path) -> Iterator[None]:
    """Requests of the client wait behind a write to a FIFO; in the end it goes on."""
    os.mkfifo(folder / "fifo")
    reader = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        data = {"path": uri(folder / "fifo"), "dataBase64": b64(bytes(300_000))}
        request = client.request("fs/writeFile", data)
        left = 300_000 - len(eventually("the write has begun", lambda: _read_some(reader, 1)))
        yield
        while left:
            left -= len(eventually("the write goes on", lambda: _read_some(reader, 65_536)))
        assert client.result(request) == {}
    finally:
        os.close(reader)


def _read_some(descriptor: int, size: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, size)
    return b""


def test_requests_wait_behind_a_slow_one(client: Client, other: Client, tmp_path: Path) -> None:
    with _slow_write(client, tmp_path):
        requests = [client.request("fs/getMetadata", {"path": "file:///"}) for _ in range(256)]
        assert relay_link(client).outcome(other) == []
    for request in requests:
        assert client.result(request)["isDirectory"]


def test_too_many_requests_behind_a_slow_one_end_the_stream(
    client: Client, other: Client, tmp_path: Path
) -> None:
    with contextlib.suppress(StreamReset), _slow_write(client, tmp_path):
        for _ in range(257):
            client.request("fs/getMetadata", {"path": "file:///"})
        relay_link(client).receive(scaled(DEFAULT_TIMEOUT))  # nothing but the reset
        pytest.fail("a request was answered before the slow one")
    assert other.call("environment/status") == READY


def test_many_streams_work_at_once(service: ThreadedRelayService) -> None:
    clients = [connect(service) for _ in range(40)]
    for number, client in enumerate(clients):
        client.request(
            "process/start",
            {
                "processId": "p",
                "argv": [
                    "sh",
                    "-c",
                    f"i=0; while [ $i -lt 50 ]; do echo {number}.$i; i=$((i+1)); done",
                ],
                "cwd": "file:///",
                "env": {"PATH": "/usr/bin:/bin"},
                "tty": False,
            },
        )
    for number, client in enumerate(clients):
        expected = "".join(f"{number}.{i}\n" for i in range(50)).encode()
        assert client.collect("p").stdout == expected
        client.close()


# ---- slow clients -----------------------------------------------------------------------


def test_a_large_answer_leaves_turns_for_others(
    service: ThreadedRelayService, other: Client, tmp_path: Path
) -> None:
    content = os.urandom(MIB) * 24
    (tmp_path / "large").write_bytes(content)
    received: list[bytes] = []

    def read() -> None:
        with connect(service) as reader:
            answer = reader.call("fs/readFile", {"path": uri(tmp_path / "large")}, timeout=30)
            received.append(base64.b64decode(answer["dataBase64"]))

    thread = threading.Thread(target=read)
    thread.start()
    answers = 0
    while thread.is_alive():
        assert other.call("environment/status") == READY
        answers += 1
    thread.join()
    assert received == [content]
    # It could not have been answered more than a few times before and after.
    assert answers > 10


def test_a_client_that_does_not_read_is_given_up_by_the_relay_alone(
    service: ThreadedRelayService, server: Server, other: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.service.hosting.hub, "stall_seconds", 0.2)
    before = resident_bytes(server)
    with connect(service) as stalled:
        stalled.start(["sh", "-c", "yes 0123456"], process_id="flood")
        name = relay_link(stalled).stream_id
        # The relay does not read us while it waits for that client, then ends its stream.
        service.until(lambda: service.service.harness(name) is None)
        assert other.run(["echo", "hello"]).stdout == b"hello\n"
        assert resident_bytes(server) - before < 32 * MIB
        session = stalled.session_id
    with connect(service, resume=session) as again:
        assert again.call("process/terminate", {"processId": "flood"}) == {"running": True}


def test_output_waits_for_a_slow_client_and_arrives_whole(
    service: ThreadedRelayService, server: Server, other: Client, tmp_path: Path
) -> None:
    size = 24 * MIB
    before = resident_bytes(server)
    with connect(service) as slow:
        script = f"yes 0123456 | head -c {size}; touch {tmp_path}/done"
        slow.start(["sh", "-c", script], process_id="flood")
        eventually("the relay is full", lambda: not service.executor(ENVIRONMENT).is_read)
        assert not (tmp_path / "done").exists()
        assert resident_bytes(server) - before < 16 * MIB
        run = slow.collect("flood", timeout=40)
        assert run.stdout == b"0123456\n" * (size // 8)
        assert run.exit_code == 0


def test_output_of_two_clients_is_interleaved(service: ThreadedRelayService) -> None:
    """While one prints without end, the other gets all of its own."""
    with connect(service) as loud, connect(service) as quiet:
        stop = threading.Event()
        loud.start(["sh", "-c", "yes 0123456"], process_id="flood")

        def read() -> None:
            while not stop.is_set():
                loud.receive()

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for number in range(5):
                assert quiet.run(["echo", str(number)]).stdout == f"{number}\n".encode()
        finally:
            stop.set()
            thread.join()
        loud.notifications.clear()
        assert loud.call("process/terminate", {"processId": "flood"}) == {"running": True}


# ---- large messages ---------------------------------------------------------------------


def test_a_message_of_the_largest_size_passes(
    service: ThreadedRelayService, tmp_path: Path
) -> None:
    content = os.urandom(MIB) * 47
    with connect(service) as client:
        params = {"path": uri(tmp_path / "large"), "dataBase64": b64(content)}
        message = json.dumps({"id": 50, "method": "fs/writeFile", "params": params}).encode()
        client.link.send_text(message.ljust(MESSAGE_BYTES))
        assert client.result(50, timeout=40) == {}
        assert (tmp_path / "large").read_bytes() == content
        answer = client.call("fs/readFile", {"path": uri(tmp_path / "large")}, timeout=40)
        assert base64.b64decode(answer["dataBase64"]) == content


def test_an_answer_that_is_too_large_is_an_error(client: Client, tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(60 * MIB)
    with pytest.raises(RpcFailure) as failure:
        client.call("fs/readFile", {"path": uri(tmp_path / "huge")})
    assert failure.value.code == -32603
    assert failure.value.message.endswith(f"a relay carries {MESSAGE_BYTES}")
    assert client.call("environment/status") == READY


def _half(link: RelayLink, size: int, sent: int) -> None:
    """The length of a message, and as much of it."""
    link.send_frame(link.seal(size.to_bytes(4, "big") + b'{"id": 9'))
    for _ in range(sent // 60_000):
        link.send_frame(link.seal(b" " * 60_000))


def test_half_messages_of_many_clients_share_a_room() -> None:
    constants = {"net.relay_executor.RECEIVING_BYTES": 40 * MIB}
    size = 8 * MIB
    with (
        ThreadedRelayService(record=False) as service,
        start_executor(service, constants=constants) as server,
        connect(service) as other,
        contextlib.ExitStack() as stack,
    ):
        links = [stack.enter_context(RelayLink(service)) for _ in range(100)]
        before = resident_bytes(server)
        for link in links:
            _half(link, size, sent=size // 16)
        # Each takes its size but for the first mebibyte: room for five.
        refused = [link for link in links if _is_reset(link, other)]
        assert len(refused) == 95
        assert resident_bytes(server) - before < 80 * MIB
        with RelayLink(service) as late:
            _half(late, 2 * MIB, sent=MIB // 2)  # what is left of the room
            assert not _is_reset(late, other)
        # One of them is completed, the others go, and all of the room is free again.
        accepted = [link for link in links if link not in refused]
        text = b', "method": "environment/status"}'
        missing = size - len(b'{"id": 9') - (size // 16 // 60_000) * 60_000
        for start in range(0, missing, 60_000):
            piece = text.rjust(missing)[start : start + 60_000]
            accepted[0].send_frame(accepted[0].seal(piece))
        assert json.loads(accepted[0].receive(scaled(DEFAULT_TIMEOUT)))["id"] == 9
        for link in accepted[1:]:
            link.send_kind(Kind.RESET, reason="done")
            assert link.outcome(other) == []
        others = [stack.enter_context(RelayLink(service)) for _ in range(5)]
        for link in others:
            _half(link, size, sent=size // 16)
        assert [_is_reset(link, other) for link in others] == [False] * 5


def _is_reset(link: RelayLink, other: Client) -> bool:
    return link.outcome(other) != []


def test_a_large_message_that_stops_half_way_ends_its_stream() -> None:
    constants = {"net.relay_stream.STALL_SECONDS": scaled(0.3)}
    with (
        ThreadedRelayService() as service,
        start_executor(service, constants=constants),
        RelayLink(service) as link,
        connect(service) as other,
    ):
        _half(link, 8 * MIB, sent=MIB)
        assert link.wait_reset() == RESET_REASON
        assert other.call("environment/status") == READY
        assert is_served(service)
