"""A server without /proc, and one whose /proc hides processes (hidepid=2)."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.barriers import User, start_server_as
from tests.support.client import Client, RpcFailure, Server, b64, descendants, survivors, uri
from tests.support.sandbox import Scratch, workspace_write

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts another /proc"),
]

_WARNING = "Warning: /proc is not mounted: "
# A child with its own session, which ends neither with its parent nor with its streams. It is not
# dumpable, like ssh-agent, so that /proc can hide it.
_DAEMON = """
import ctypes, os, time
if os.fork():
    time.sleep(600 if {waits} else 0)
    os._exit(0)
os.setsid()
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
os.write(1, b"daemon")
for descriptor in range(3):
    os.close(descriptor)
time.sleep(600)
"""


# Without /proc all 4 million pids are tried; most machines use the first 32,768 only.
_KNOWN_PIDS = """
from exec_server.process import strays
strays._MAX_PID = {largest}
from exec_server.cli.main import main
main()
"""


@pytest.fixture(autouse=True)
def known_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = int(Path("/proc/sys/kernel/pid_max").read_text())
    command = [sys.executable, "-c", _KNOWN_PIDS.format(largest=largest)]
    monkeypatch.setenv("EXEC_SERVER_COMMAND", shlex.join(command))


@pytest.fixture(params=["root", "ordinary"])
def user(request: pytest.FixtureRequest) -> User:
    user: User = request.param
    return user


@pytest.fixture
def workspace(user: User) -> Iterator[Path]:
    with Scratch(os.geteuid() if user == "root" else 20_000) as scratch:
        yield scratch.base


def _start_daemon(server: Server, client: Client, *, waits: bool) -> tuple[str, dict[int, str]]:
    """A command with a daemon; returns its id, and all processes that it has started."""
    before = descendants(server.process.pid)
    name = client.start([sys.executable, "-c", _DAEMON.format(waits=waits)])
    client.notice("process/output", name)
    after = descendants(server.process.pid)
    return name, {pid: start for pid, start in after.items() if pid not in before}


def test_a_server_without_proc_serves_and_says_what_is_missing(user: User, workspace: Path) -> None:
    with start_server_as("ours", user, barrier="no-proc") as server, server.connect() as client:
        run = client.run(["/bin/sh", "-c", "ls /proc; echo fine"])
        assert (run.stdout, run.exit_code) == (b"fine\n", 0)
        file = {"path": uri(workspace / "file")}
        assert client.call("fs/writeFile", {**file, "dataBase64": b64("text")}) == {}
        sandbox = workspace_write(workspace)
        if user == "root":
            assert client.run(["cat", str(workspace / "file")], sandbox=sandbox).stdout == b"text"
            assert client.call("fs/readFile", {**file, "sandbox": sandbox})
            denied = client.run(["touch", "/etc/file"], sandbox=sandbox)
            assert (denied.exit_code, denied.sandbox_denied) == (1, True)
        else:
            for method in ("fs/readFile", "fs/remove"):
                _, text = client.failure(method, {**file, "sandbox": sandbox})
                assert "cannot map the user into a user namespace" in text
            with pytest.raises(RpcFailure, match="sandbox is not available on this machine"):
                client.start(["true"], sandbox=sandbox)
        server.stop()
        (line,) = server.stderr().splitlines()
        assert line.startswith(_WARNING)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_survives_a_server_without_proc(user: User, number: signal.Signals) -> None:
    with start_server_as("ours", user, barrier="no-proc") as server:
        client = server.connect()
        _, waiting = _start_daemon(server, client, waits=True)
        _, orphan = _start_daemon(server, client, waits=False)
        family = descendants(server.process.pid)
        assert {*waiting, *orphan} & set(family)
        server.process.send_signal(number)
        server.process.wait(30)
        assert survivors(family, timeout=50) == []
        client.close()


def test_a_hidden_daemon_dies_with_its_command(user: User) -> None:
    with start_server_as("ours", user, barrier="hidden-proc") as server, server.connect() as client:
        name, family = _start_daemon(server, client, waits=True)
        assert len(family) == 2
        client.call("process/terminate", {"processId": name})
        client.collect(name)
        assert survivors(family) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_hidden_daemon_dies_with_its_server(user: User, number: signal.Signals) -> None:
    with start_server_as("ours", user, barrier="hidden-proc") as server:
        client = server.connect()
        _start_daemon(server, client, waits=False)
        family = descendants(server.process.pid)
        server.process.send_signal(number)
        server.process.wait(30)
        assert survivors(family, timeout=50) == []
        client.close()
