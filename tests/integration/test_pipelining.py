"""Requests sent without waiting: all answered, in the right order, whatever holds some of them up.

A slow file operation is a write to a FIFO whose reader is this test: it goes on exactly when
the test reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import (
    TEXT,
    Client,
    NothingArrived,
    Server,
    b64,
    frame_bytes,
    scaled,
    start_server,
    uri,
)
from tests.support.server_internals import start_patched

_MANY = 5000


class SlowWrite:
    """A fs/writeFile that is under way until `finish`."""

    def __init__(self, client: Client, folder: Path, name: str = "fifo") -> None:
        os.mkfifo(folder / name)
        self._reader = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
        data = {"path": uri(folder / name), "dataBase64": b64(bytes(300_000))}
        self.id = client.request("fs/writeFile", data)
        self._left = 300_000
        # It is under way when the FIFO is full.
        while self._left == 300_000:
            with contextlib.suppress(BlockingIOError):
                self._left -= len(os.read(self._reader, 1))
            time.sleep(0.002)

    def finish(self) -> None:
        deadline = time.monotonic() + scaled(10)
        while self._left and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                self._left -= len(os.read(self._reader, 65_536))

    def close(self) -> None:
        os.close(self._reader)


@pytest.fixture
def slow_write(tmp_path: Path) -> Iterator[Callable[..., SlowWrite]]:
    """Makes slow writes, and lets go of their FIFOs in the end."""
    made: list[SlowWrite] = []

    def make(client: Client, name: str = "fifo") -> SlowWrite:
        made.append(SlowWrite(client, tmp_path, name))
        return made[-1]

    yield make
    for write in made:
        write.close()


def _answered(client: Client) -> list[Any]:
    return [message["id"] for message in client.messages if "method" not in message]


def _mixed(folder: Path, count: int) -> list[dict[str, Any]]:
    """Requests of many methods, some of which fail."""
    (folder / "file").write_text("content")
    kinds: list[tuple[str, Any]] = [
        ("environment/status", None),
        ("fs/readFile", {"path": uri(folder / "file")}),
        ("fs/getMetadata", {"path": uri(folder / "file")}),
        ("environment/info", None),
        ("fs/readDirectory", {"path": uri(folder)}),
        ("process/read", {"processId": "none"}),
        ("fs/canonicalize", {"path": uri(folder)}),
        ("process/terminate", {"processId": "none"}),
        ("no/such", {}),
        ("fs/readFile", {"path": uri(folder / "missing")}),
        ("process/write", {"processId": "none", "chunk": "", "writeId": "w"}),
        ("fs/createDirectory", {"path": uri(folder / "made"), "recursive": True}),
    ]
    return [
        {"id": number, "method": kinds[number % len(kinds)][0]}
        | {"params": kinds[number % len(kinds)][1]}
        for number in range(1000, 1000 + count)
    ]


@pytest.mark.quick
@pytest.mark.parametrize("flags", [(), ("--concurrent-requests", "8")], ids=["one", "eight"])
def test_thousands_of_requests_are_all_answered(flags: tuple[str, ...], tmp_path: Path) -> None:
    """All sent before anything is read. The reference hangs at about 600."""
    with start_server("ours", *flags) as server, server.connect() as client:
        requests = _mixed(tmp_path, _MANY)
        data = b"".join(frame_bytes(TEXT, json.dumps(request).encode()) for request in requests)
        client.websocket.send_bytes(data)
        for _ in requests:
            client.receive(timeout=20)
        client.messages = client.messages[-_MANY:]
        assert sorted(_answered(client)) == [request["id"] for request in requests]
        kinds = {message["id"] % 12: set(message) for message in client.messages}
        assert len(kinds) == 12
        assert client.call("environment/status") == {"status": "ready"}


def test_main_lane_is_answered_in_order(client: Client, tmp_path: Path) -> None:
    """Some are answered at once, some from a thread; none overtakes another."""
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "large").write_bytes(bytes(300_000))
    ids = []
    for _ in range(100):
        ids.append(client.request("fs/readFile", {"path": uri(tmp_path / "large")}))
        ids.append(client.request("fs/readFile", {"path": uri(tmp_path / "small")}))
        ids.append(client.request("fs/readDirectory", {"path": uri(tmp_path)}))
        ids.append(client.request("fs/getMetadata", {"path": uri(tmp_path)}))
    client.result(ids[-1], timeout=20)
    assert _answered(client)[1:] == ids


def test_hundreds_of_starts_are_all_answered(client: Client) -> None:
    names = [f"p{number}" for number in range(300)]
    for name in names:
        params = {"processId": name, "argv": ["/bin/true"], "cwd": "/", "env": {}, "tty": False}
        client.request("process/start", params)
    for name in names:
        client.collect(name, timeout=30)
    starts = [message["id"] for message in client.messages if "result" in message][1:]
    assert starts == sorted(starts)
    assert len(starts) == 300


def test_writes_and_reads_of_one_file_keep_their_order(client: Client, tmp_path: Path) -> None:
    path = uri(tmp_path / "file")
    reads = []
    for number in range(200):
        client.request("fs/writeFile", {"path": path, "dataBase64": b64(str(number))})
        reads.append(client.request("fs/readFile", {"path": path}))
    for number, read in enumerate(reads):
        assert client.result(read, timeout=20) == {"dataBase64": b64(str(number))}


def test_long_polls_step_aside(client: Client) -> None:
    process = client.start(["sleep", "600"])
    polls = [
        client.request("process/read", {"processId": process, "waitMs": 60_000})
        for _ in range(3000)
    ]
    # Everything else goes on, although all of them wait.
    assert client.call("fs/getMetadata", {"path": "/"})["isDirectory"]
    assert client.run(["echo", "hello"]).stdout == b"hello\n"
    assert client.call("process/terminate", {"processId": process}) == {"running": True}
    for poll in polls:
        assert client.result(poll)["exited"]


def test_more_long_polls_than_may_step_aside() -> None:
    """Beyond the limit they queue in order; all are answered when there is news."""
    with (
        start_patched({"server.lanes.PARKED_REQUESTS": 50}) as server,
        server.connect() as client,
        server.connect() as other,
    ):
        process = client.start(["cat"], pipeStdin=True)
        polls = [
            client.request("process/read", {"processId": process, "waitMs": 3_000})
            for _ in range(100)
        ]
        assert other.call("environment/status") == {"status": "ready"}
        assert client.call("process/terminate", {"processId": process}) == {"running": True}
        for poll in polls:
            assert client.result(poll)["exited"]


def test_full_stdin_steps_aside(client: Client) -> None:
    process = client.start(["sleep", "600"], pipeStdin=True)
    writes = [
        client.request("process/write", {"processId": process, "chunk": b64(bytes(size))})
        for size in [60_000] * 60 + [100] * 2000
    ]
    assert client.call("fs/getMetadata", {"path": "/"})["isDirectory"]
    assert client.call("process/terminate", {"processId": process}) == {"running": True}
    for write in writes:
        client.answer(write)


def test_control_methods_overtake_a_slow_file_operation(
    client: Client, slow_write: Callable[..., SlowWrite]
) -> None:
    process = client.start(["sleep", "600"])
    write = slow_write(client)
    behind = client.request("fs/getMetadata", {"path": "/"})
    assert client.call("environment/status") == {"status": "ready"}
    assert client.call("process/signal", {"processId": process, "signal": "interrupt"}) == {}
    assert client.call("process/terminate", {"processId": process}) in (
        {"running": True},
        {"running": False},
    )
    assert client.collect(process).exit_code != 0
    assert write.id not in _answered(client)
    assert behind not in _answered(client)
    write.finish()
    assert client.result(write.id) == {}
    assert client.result(behind)["isDirectory"]


def test_control_methods_do_not_overtake_the_start_they_mean(
    client: Client, slow_write: Callable[..., SlowWrite]
) -> None:
    write = slow_write(client)
    params = {"argv": ["sleep", "600"], "cwd": "/", "env": {"PATH": "/bin:/usr/bin"}, "tty": False}
    start = client.request("process/start", params | {"processId": "p"})
    terminate = client.request("process/terminate", {"processId": "p"})
    assert client.call("process/terminate", {"processId": "other"}) == {"running": False}
    write.finish()
    assert client.result(start)["processId"] == "p"
    assert client.result(terminate) == {"running": True}
    assert client.collect("p").exit_code == 137
    order = _answered(client)
    assert order.index(write.id) < order.index(start) < order.index(terminate)


def test_closing_a_handle_waits_for_its_reads(
    client: Client, tmp_path: Path, slow_write: Callable[..., SlowWrite]
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    client.call("fs/open", {"handleId": "h", "path": uri(tmp_path / "file")})
    write = slow_write(client)
    read = client.request("fs/readBlock", {"handleId": "h", "offset": 0, "len": 7})
    close = client.request("fs/close", {"handleId": "h"})
    write.finish()
    assert client.result(read)["chunk"] == b64("content")
    assert client.result(close) == {}


def test_control_methods_overtake_output_that_is_not_read(
    server: Server, python: Callable[[str], list[str]]
) -> None:
    """The terminate works although its answer waits behind what the client does not read."""
    with server.connect() as client, server.connect() as other:
        process = client.start(python("import os\nwhile True: os.write(1, bytes(65536))"))
        marker = client.start(["sleep", "600"])
        client.notice("process/output", process)
        time.sleep(0.3)  # its output fills all buffers meanwhile
        for name in (process, marker):
            client.request("process/terminate", {"processId": name})
        assert other.call("environment/status") == {"status": "ready"}
        client.collect(process, timeout=20)
        client.collect(marker, timeout=20)


def test_two_lanes_of_several_places(tmp_path: Path, slow_write: Callable[..., SlowWrite]) -> None:
    with start_server("ours", "--concurrent-requests", "2") as server, server.connect() as client:
        first, second = slow_write(client, "a"), slow_write(client, "b")
        third = client.request("fs/getMetadata", {"path": "/"})
        for _ in range(3):
            assert client.call("environment/status") == {"status": "ready"}
        assert client.call("fs/close", {"handleId": "none"}) == {}
        assert client.failure("no/such", {})[0] == -32601
        with pytest.raises(NothingArrived):
            client.result(third, timeout=0.2)
        second.finish()
        assert client.result(second.id) == {}
        assert client.result(third)["isDirectory"]
        assert first.id not in _answered(client)
        first.finish()
        assert client.result(first.id) == {}


def test_one_connection_does_not_hold_up_another(
    server: Server, tmp_path: Path, slow_write: Callable[..., SlowWrite]
) -> None:
    with server.connect() as busy, server.connect() as other:
        write = slow_write(busy)
        for _ in range(200):
            busy.request("fs/getMetadata", {"path": "/"})
        for _ in range(50):
            assert other.call("fs/getMetadata", {"path": "/"})["isDirectory"]
        write.finish()
