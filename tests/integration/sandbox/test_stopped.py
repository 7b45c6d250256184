"""Helper processes of the sandbox that a signal stops; the client waits ten seconds at most."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.barriers import User
from tests.support.client import Client, Server, b64, uri
from tests.support.sandbox import USERS, Stage, finish, start_process, start_stage
from tests.support.server_internals import children, eventually, load_sandboxes, stat_fields


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest) -> User:
    """The user of the server."""
    name: User = request.param
    return name


@pytest.fixture
def stage(user: User) -> Iterator[Stage]:
    """A server for one test."""
    with start_stage(user) as running:
        yield running


@pytest.fixture
def client(stage: Stage) -> Iterator[Client]:
    with stage.server.connect() as connected:
        yield connected


def _named(server: Server, name: str) -> list[int]:
    """The children of the server with this name in ps."""
    found = []
    for pid in children(server.process.pid):
        try:
            comm = Path(f"/proc/{pid}/comm").read_text()
        except OSError:
            continue
        if comm == f"{name}\n":
            found.append(pid)
    return found


def _stopped_launcher(server: Server) -> int:
    """The launcher, after SIGSTOP."""
    with server.connect() as client:
        load_sandboxes(client)
    # It has its name once it has loaded its modules.
    (pid,) = eventually("the launcher runs", lambda: _named(server, "exec-launcher"))
    _stop(pid)
    return pid


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    eventually("it is stopped", lambda: stat_fields(pid)[0] == "T")


def _resume(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass  # it was killed


def _ended(pid: int) -> None:
    eventually(f"{pid} is reaped", lambda: not os.path.exists(f"/proc/{pid}"))


def _write(client: Client, stage: Stage, name: str, policy: str = "WW") -> None:
    params = {"path": uri(stage.ws / name), "dataBase64": b64(name)}
    client.call("fs/writeFile", params | {"sandbox": stage.policy(policy)})
    assert (stage.ws / name).read_text() == name


def test_a_stopped_launcher_is_killed_and_replaced(stage: Stage, client: Client) -> None:
    assert stage.shell(client, "WW", "echo one").stdout == "one\n"
    old = _stopped_launcher(stage.server)
    # Another policy each time: a launcher is needed for each of them.
    assert stage.shell(client, "RODEEP", "echo two").stdout == "two\n"
    _resume(old)
    _ended(old)
    for number, name in enumerate(("DENYSUB", "ROSUB", "REOPEN", "MINW")):
        assert stage.shell(client, name, f"echo {number}").stdout == f"{number}\n"
        _write(client, stage, f"file {number}", name)
    assert len(_named(stage.server, "exec-launcher")) == 1


def test_requests_behind_a_stopped_launcher_wait_together(stage: Stage, client: Client) -> None:
    policies = ("RO", "WW", "DENYSUB", "DENYDEEP", "DENYFILE", "ROSUB", "RODEEP", "REOPEN")
    old = _stopped_launcher(stage.server)
    argv = ["/bin/sh", "-c", "echo it runs"]
    starts = [start_process(client, stage.policy(name), argv) for name in policies]
    assert [finish(client, start).stdout for start in starts] == ["it runs\n"] * len(starts)
    _ended(old)


def test_a_stopped_worker_goes_on(stage: Stage, client: Client) -> None:
    _write(client, stage, "one")
    (worker,) = _named(stage.server, "exec-worker")
    _stop(worker)
    _write(client, stage, "two")
    assert _named(stage.server, "exec-worker") == [worker]
    _stop(worker)
    # More than the socket holds, so that the server waits for space and not for the response.
    params = {"path": uri(stage.ws / "large"), "dataBase64": b64("x" * 4_000_000)}
    client.call("fs/writeFile", params | {"sandbox": stage.policy("WW")})
    assert (stage.ws / "large").stat().st_size == 4_000_000


def test_a_stopped_prebuilt_sandbox_goes_on(stage: Stage, client: Client) -> None:
    assert stage.shell(client, "WW", "echo one").stdout == "one\n"

    def stop_prebuilt() -> bool:
        inits = _named(stage.server, "exec-init")
        if len(inits) != 1:
            return False
        try:
            _stop(inits[0])
        except (FileNotFoundError, ProcessLookupError):
            return False  # that of the first command, which has just ended
        return True

    eventually("it is prebuilt", stop_prebuilt)
    assert stage.shell(client, "WW", "echo two").stdout == "two\n"


def test_a_stopped_launcher_ends_with_its_server(user: User) -> None:
    with start_stage(user) as own:
        launcher = _stopped_launcher(own.server)
    _ended(launcher)
    with start_stage(user) as own:
        launcher = _stopped_launcher(own.server)
        own.server.process.kill()
        _ended(launcher)
