"""A server whose commands have used up all processes: it still works, and kills them all."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.client import Client, Server, uri
from tests.support.process_limits import start_limited
from tests.support.server_internals import commands, eventually, is_running

pytestmark = pytest.mark.measured

# Each process forks as often as it can, its children in sessions of their own, and reports a failed
# fork. The bomb ends by itself, in case that a failed test kills the server with its watchdog; it
# pauses after a failed fork, for the sake of the machine.
_BOMB = f"""# {os.getpid()}
use POSIX;
my ($told, $end) = (0, time + 60);
while (time < $end) {{
    my $pid = fork();
    if (!defined $pid) {{
        syswrite(STDOUT, "full\\n") unless $told;
        $told = 1;
        select(undef, undef, undef, 0.01);
    }}
    elsif ($pid == 0) {{ POSIX::setsid(); }}
}}
"""


@pytest.fixture(params=["user", "cgroup"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with start_limited(request.param, "--session-retention", "0") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.connect() as client:
        yield client


def _start_bomb(client: Client) -> str:
    """Start a fork bomb, and wait until it has used up all processes."""
    name = client.start(["/usr/bin/perl", "-e", _BOMB])
    client.notice("process/output", name)
    return name


def test_terminate_ends_a_fork_bomb(server: Server, client: Client) -> None:
    name = _start_bomb(client)
    assert client.call("process/terminate", {"processId": name}) == {"running": True}
    eventually("the bomb is dead", lambda: not commands(server))
    assert client.collect(name).exit_code == 137
    assert client.run(["/bin/echo", "back"]).stdout == b"back\n"


def test_end_of_the_session_ends_a_fork_bomb(server: Server) -> None:
    with server.connect() as client:
        _start_bomb(client)
    eventually("the bomb is dead", lambda: not commands(server))


def test_sigterm_ends_server_and_fork_bomb(server: Server, client: Client) -> None:
    _start_bomb(client)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert server.stderr() == ""
    assert not is_running(_BOMB)


def test_sigkill_of_the_server_ends_a_fork_bomb(server: Server, client: Client) -> None:
    _start_bomb(client)
    server.process.kill()
    server.process.wait(30)
    eventually("the bomb is dead", lambda: not is_running(_BOMB))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of every user, which tmp_path is not: its parents belong to one."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_files_and_requests_work(server: Server, client: Client, folder: Path) -> None:
    name = _start_bomb(client)
    path = uri(folder / "file")
    data = "QUFB" * 400_000  # decoded in a thread
    client.call("fs/writeFile", {"path": path, "dataBase64": data})
    assert client.call("fs/readFile", {"path": path})["dataBase64"] == data
    client.call("fs/copy", {"sourcePath": path, "destinationPath": path + "2", "recursive": False})
    client.call("fs/remove", {"path": path})
    client.call("process/terminate", {"processId": name})
    eventually("the bomb is dead", lambda: not commands(server))


def test_lookup_of_a_name_does_not_abort_the_server(server: Server, client: Client) -> None:
    name = _start_bomb(client)
    params = {"method": "GET", "url": "http://localhost:1/", "requestId": "1", "headers": []}
    code, text = client.failure("http/request", params)
    assert code == -32603
    assert "error sending request" in text
    client.call("process/terminate", {"processId": name})
    eventually("the bomb is dead", lambda: not commands(server))
