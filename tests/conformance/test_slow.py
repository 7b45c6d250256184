"""What takes more than a minute of waiting, on all servers at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import (
    PING,
    Client,
    Server,
    b64,
    descendants,
    reference_binary,
    scaled,
    start_server,
    survivors,
)

# The default retention of sessions and of closed processes, and a time that is certainly before it.
RETENTION_SECONDS = 80.0
EARLIER_SECONDS = 75.0


def _ping_after_30_seconds(server: Server) -> None:
    link = server.link()
    began = time.monotonic()
    frame = link.receive_frame(scaled(40))
    assert (frame.opcode, frame.payload) == (PING, b"")
    # At the earliest after 30 s; a busy machine may be late by a few.
    assert 28 < time.monotonic() - began < 30 + scaled(3)
    link.close()


def _processes_die_with_their_session(server: Server) -> None:
    client = server.connect()
    helpers = descendants(server.process.pid)
    client.start(["sleep", "300"])
    client.start(["bash", "-c", "trap '' HUP TERM; sleep 300 & wait"], tty=True)
    client.close()
    family = descendants(server.process.pid)
    family = {pid: start for pid, start in family.items() if pid not in helpers}
    assert len(family) >= 2
    began = time.monotonic()
    assert survivors(family, timeout=RETENTION_SECONDS + 10) == []
    assert time.monotonic() - began > RETENTION_SECONDS - 2


def _session_is_resumed_late(server: Server) -> None:
    with server.connect() as client:
        name = client.start(["/bin/sh", "-c", "sleep 5; echo late; exit 7"])
    time.sleep(EARLIER_SECONDS)
    with server.connect(resume=client.session_id) as late:
        read = late.call("process/read", {"processId": name, "waitMs": 0})
        assert [chunk["chunk"] for chunk in read["chunks"]] == [b64("late\n")]
        assert (read["exitCode"], read["closed"]) == (7, True)


def _session_is_resumed_too_late(server: Server) -> None:
    with server.connect() as client:
        client.start(["/bin/sh", "-c", "echo early"])
    time.sleep(RETENTION_SECONDS + scaled(3))
    params = {"clientName": "test", "resumeSessionId": client.session_id}
    with server.connect(initialize=False) as late:
        expected = (-32600, f"unknown session id {client.session_id}")
        assert late.failure("initialize", params) == expected


def _stay(client: Client, seconds: float) -> None:
    """Wait; each request also answers the pings that have come."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(1)
        client.call("environment/status", {})


def _closed_process_is_forgotten(server: Server) -> None:
    with server.connect() as client:
        client.run(["echo", "x"], process_id="p")
        _stay(client, EARLIER_SECONDS)
        assert client.call("process/read", {"processId": "p"})["exitCode"] == 0
        _stay(client, RETENTION_SECONDS - EARLIER_SECONDS + scaled(3))
        expected = (-32600, "unknown process id p")
        assert client.failure("process/read", {"processId": "p"}) == expected
        write = {"processId": "p", "chunk": "", "writeId": "1"}
        assert client.call("process/write", write) == {"status": "unknownProcess"}
        assert client.call("process/terminate", {"processId": "p"}) == {"running": False}
        client.run(["true"], process_id="p")  # the id is free


_WAITS: list[Callable[[Server], None]] = [
    _ping_after_30_seconds,
    _processes_die_with_their_session,
    _session_is_resumed_late,
    _session_is_resumed_too_late,
    _closed_process_is_forgotten,
]


def _wait(kind: str, wait: Callable[[Server], None]) -> None:
    with start_server(kind) as server:
        wait(server)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_everything_that_waits() -> None:
    """One test for both servers: after each other they would take twice as long."""
    kinds = ["ours"] if reference_binary() is None else ["ours", "reference"]
    with ThreadPoolExecutor(len(kinds) * len(_WAITS)) as pool:
        futures = [pool.submit(_wait, kind, wait) for kind in kinds for wait in _WAITS]
        for future in futures:
            future.result()
