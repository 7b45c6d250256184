"""Clients that stop reading: only their own output waits, memory is bounded, nothing is lost."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.certificates import make_pair
from tests.support.client import (
    Client,
    Server,
    descendants,
    scaled,
    start_server,
    start_stdio,
    survivors,
)
from tests.support.server_internals import commands, eventually, own_processes, resident_bytes

pytestmark = pytest.mark.measured

Python = Callable[[str], list[str]]
_MIB = 1_048_576


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server for each test, by default without TLS: its memory is measured."""
    scheme = getattr(request, "param", "ws")
    listen = {
        "ws": ("--listen", "ws://127.0.0.1:0"),
        "wss": ("--listen", "wss://127.0.0.1:0", *make_pair(tmp_path, "server").flags),
        "unix": ("--listen", f"unix:{tmp_path}/s"),
    }[scheme]
    with start_server("ours", *listen) as running:
        yield running


every_listener = pytest.mark.parametrize("server", ["ws", "wss", "unix"], indirect=True)


def _flood(size: int, mark: Path) -> list[str]:
    """A child that prints so much and then leaves a mark."""
    return ["/bin/sh", "-c", f"yes 0123456 | head -c {size}; touch {mark}"]


def _assert_stays_away(mark: Path) -> None:
    """Nothing announces that a child waits; so look a little while whether it goes on."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert not mark.exists(), "the server took in what nobody read"
        time.sleep(0.02)


@every_listener
def test_unread_output_waits_in_the_child_and_arrives_whole_later(
    server: Server, tmp_path: Path
) -> None:
    size = 40 * _MIB
    with server.connect() as stalled, server.connect() as other:
        before = resident_bytes(server)
        stalled.start(_flood(size, tmp_path / "done"), process_id="flood")
        _assert_stays_away(tmp_path / "done")
        assert resident_bytes(server) - before < 16 * _MIB
        assert other.run(["echo", "fine"]).stdout == b"fine\n"
        run = stalled.collect("flood", timeout=40)
        assert run.stdout == b"0123456\n" * (size // 8)
        assert run.exit_code == 0
        assert (tmp_path / "done").exists()


def test_many_stalled_processes_cost_little(server: Server, tmp_path: Path) -> None:
    with server.connect() as stalled, server.connect() as other:
        before = resident_bytes(server)
        names = [f"flood-{number}" for number in range(20)]
        for name in names:
            params = {"processId": name, "argv": _flood(4 * _MIB, tmp_path / name), "tty": False}
            params |= {"cwd": "file:///", "env": {"PATH": "/usr/bin:/bin"}}
            stalled.request("process/start", params)
        eventually("all of them run", lambda: len(commands(server)) == len(names))
        assert other.run(["echo", "fine"]).stdout == b"fine\n"
        time.sleep(0.3)
        assert resident_bytes(server) - before < 24 * _MIB
        for name in names:
            assert len(stalled.collect(name, timeout=40).stdout) == 4 * _MIB


def test_terminal_output_waits_too(server: Server, tmp_path: Path) -> None:
    size = 8 * _MIB
    script = f"stty -onlcr; yes 0123456 | head -c {size}; touch {tmp_path}/done"
    with server.connect() as stalled:
        name = stalled.start(["/bin/sh", "-c", script], tty=True)
        _assert_stays_away(tmp_path / "done")
        assert stalled.collect(name, timeout=40).pty == b"0123456\n" * (size // 8)


@every_listener
def test_terminate_works_while_output_is_stalled(server: Server, tmp_path: Path) -> None:
    with server.connect() as stalled:
        name = stalled.start(_flood(400 * _MIB, tmp_path / "done"))
        _assert_stays_away(tmp_path / "done")
        own = own_processes(server)
        family = {p: s for p, s in descendants(server.process.pid).items() if p not in own}
        assert family
        terminate = stalled.request("process/terminate", {"processId": name})
        assert survivors(family) == []  # without a single read by the client
        assert stalled.result(terminate) == {"running": True}
        assert stalled.collect(name).exit_code == 137


def test_requests_of_a_stalled_client_are_taken_and_answered_later(server: Server) -> None:
    with server.connect() as stalled:
        name = stalled.start(["yes"])
        time.sleep(0.2)
        requests = [stalled.request("environment/status") for _ in range(100)]
        stalled.request("process/terminate", {"processId": name})
        for request in requests:
            assert stalled.result(request) == {"status": "ready"}
        assert stalled.collect(name).exit_code == 137


@every_listener
def test_unread_answers_are_bounded(server: Server) -> None:
    """Each answer has the whole retained output: 100 of them would be 140 MB."""
    with server.connect() as stalled, server.connect() as other:
        # The process runs on: the output of one that has ended is dropped after 80 s.
        script = f"head -c {_MIB} /dev/zero; exec sleep 600"
        stalled.start(["/bin/sh", "-c", script], process_id="big")
        eventually("all is there", lambda: _retained(stalled, "big") == _MIB)
        before = resident_bytes(server)
        requests = [stalled.request("process/read", {"processId": "big"}) for _ in range(100)]
        assert other.run(["echo", "fine"]).stdout == b"fine\n"
        time.sleep(0.3)
        assert resident_bytes(server) - before < 40 * _MIB
        for request in requests:
            assert len(stalled.result(request, timeout=30)["chunks"]) >= 128


def _retained(client: Client, process_id: str) -> int:
    """How many bytes of output a read returns."""
    chunks = client.call("process/read", {"processId": process_id})["chunks"]
    return sum(len(base64.b64decode(chunk["chunk"])) for chunk in chunks)


def test_processes_of_a_stalled_client_go_on_once_it_is_gone(
    server: Server, tmp_path: Path
) -> None:
    stalled = server.connect()
    stalled.start(_flood(20 * _MIB, tmp_path / "done"))
    _assert_stays_away(tmp_path / "done")
    stalled.websocket.abort()
    eventually("the child has written everything", (tmp_path / "done").exists)


def test_exit_of_a_stalled_process_follows_when_the_client_reads(
    server: Server, tmp_path: Path
) -> None:
    """The child fits its output into the pipe and ends while the client is stalled."""
    with server.connect() as stalled:
        flood = stalled.start(["yes"])
        time.sleep(0.2)
        request = stalled.request(
            "process/start",
            {
                "processId": "short",
                "argv": ["/bin/sh", "-c", f"echo x; touch {tmp_path}/done; exit 3"],
                "cwd": "file:///",
                "env": {"PATH": "/usr/bin:/bin"},
                "tty": False,
            },
        )
        eventually("the child has run", (tmp_path / "done").exists)
        stalled.request("process/terminate", {"processId": flood})
        assert stalled.result(request)["processId"] == "short"
        run = stalled.collect("short")
        assert (run.stdout, run.exit_code) == (b"x\n", 3)
        stalled.collect(flood)


@every_listener
def test_slow_reader_gets_everything_in_order(server: Server) -> None:
    with server.connect() as client:
        name = client.start(["seq", "300000"])
        while not any(n["method"] == "process/closed" for n in client.notifications):
            client.receive()
            if len(client.notifications) % 20 == 0:
                time.sleep(0.005)
        seqs = [n["params"]["seq"] for n in client.notifications]
        assert seqs == list(range(1, len(seqs) + 1))
        expected = "".join(f"{number}\n" for number in range(1, 300_001))
        assert client.collect(name).stdout == expected.encode()


def test_stdio_client_that_does_not_read_stalls_its_child(tmp_path: Path) -> None:
    size = 20 * _MIB
    with start_stdio("ours") as (server, client):
        client.initialize()
        before = resident_bytes(server)
        client.start(_flood(size, tmp_path / "done"), process_id="flood")
        _assert_stays_away(tmp_path / "done")
        assert resident_bytes(server) - before < 16 * _MIB
        assert client.collect("flood", timeout=40).stdout == b"0123456\n" * (size // 8)


def test_output_of_one_process_does_not_starve_another_connection(server: Server) -> None:
    with server.connect() as busy, server.connect() as other:
        name = busy.start(["yes"])
        slowest = 0.0
        for _ in range(50):
            for _ in range(20):
                busy.receive()
            before = time.monotonic()
            other.call("environment/status")
            slowest = max(slowest, time.monotonic() - before)
        assert slowest < scaled(1)
        busy.call("process/terminate", {"processId": name})
