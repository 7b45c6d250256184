"""Every descendant of a command dies with it, however it tried to get away."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from tests.support.client import Client, Server, descendants, start_server, survivors
from tests.support.server_internals import (
    commands,
    eventually,
    own_processes,
    start_unprivileged,
    stat_fields,
    watchdog_pid,
)

Python = Callable[[str], list[str]]
Family = dict[int, str]

_numbers = itertools.count(1)  # told apart by how long they sleep


@pytest.fixture
def server(fresh_server: Server) -> Server:
    """A server for each test: its descendants are counted."""
    return fresh_server


def _script(number: int) -> str:
    """A child in the group, one that ignores hang-ups, one with its own session, two daemons.

    The parents of the daemons are gone; the last one's streams are closed too.
    """
    return f"""
        sleep {number}001 &
        nohup sleep {number}002 > /dev/null 2>&1 &
        setsid sleep {number}003 &
        (setsid sh -c 'sleep {number}004 & wait' &)
        (setsid sh -c 'exec sleep {number}005' < /dev/null > /dev/null 2>&1 &)
    """


# A daemon that has changed its timer slack, its group, its directory and its environment.
_DISGUISED = """
import ctypes, os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    ctypes.CDLL(None).prctl(29, 123456, 0, 0, 0)
    os.setpgid(0, 0)
    os.chdir("/")
    os.execve("/bin/sleep", ["unsuspicious", "1006"], {})
os.wait()
print("ready", flush=True)
"""

# A daemon that has changed even the limit that is its tag.
_WITHOUT_TAG = """
import os, resource
if os.fork() == 0:
    os.setsid()
    resource.setrlimit(10, (7, resource.getrlimit(10)[1]))
    os.execve("/bin/sh", ["sh", "-c", "sleep 1007 < /dev/null > /dev/null 2>&1 &"], {})
os.wait()
"""

# At most 200 processes at a time, of which each forks for ever, half of them in new sessions.
_FORK_BOMB = """
import os, random
tokens, give_back = os.pipe()
os.write(give_back, b"x" * 200)
print("ready", flush=True)
while True:
    os.read(tokens, 1)
    if os.fork() == 0:
        random.seed()
        if random.random() < 0.5:
            os.setsid()
        if random.random() < 0.5:
            os.write(give_back, b"x")
            os._exit(0)
"""


def _below(server: Server) -> dict[int, list[str]]:
    """The words of each process that the server's commands have started."""
    own = own_processes(server)
    found = {}
    for pid in descendants(server.process.pid):
        if pid not in own:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                found[pid] = words.rstrip("\0").split("\0")
    return found


def _family(server: Server, sleepers: Collection[str], before: Collection[int] = ()) -> Family:
    """What was started besides what was there before, once all those sleep."""

    def complete() -> bool:
        asleep = [words[-1] for words in _below(server).values() if len(words) == 2]
        return all(name in asleep for name in sleepers)

    eventually("the family is complete", complete)
    everybody = descendants(server.process.pid)
    return {pid: everybody[pid] for pid in _below(server) if pid not in before}


def _start_family(
    client: Client, server: Server, *, tty: bool = False, leader_exits: bool = False
) -> tuple[str, Family]:
    """Starts a command with all kinds of descendants; returns its id and all of them."""
    before = descendants(server.process.pid)
    number = next(_numbers)
    end = "exit 4" if leader_exits else f"exec sleep {number}000"
    name = client.start(["/bin/sh", "-c", f"{_script(number)}\n{end}"], tty=tty)
    if leader_exits:
        assert client.notice("process/exited", name)["exitCode"] == 4
    members = range(1 if leader_exits else 0, 6)
    return name, _family(server, [f"{number}00{member}" for member in members], before)


def _members(session: str) -> list[int]:
    """The processes of a group or session."""
    found = []
    for pid in descendants(1):
        with contextlib.suppress(OSError):
            if session in stat_fields(pid)[2:4]:
                found.append(pid)
    return found


def _assert_no_zombies(server: Server) -> None:
    eventually("orphans are reaped", lambda: not commands(server))


# ---- the ways to end ------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("tty", [False, True])
def test_terminate_kills_the_whole_family(client: Client, server: Server, tty: bool) -> None:
    name, family = _start_family(client, server, tty=tty)
    assert client.call("process/terminate", {"processId": name}) == {"running": True}
    assert survivors(family) == []
    run = client.collect(name)
    assert run.exit_code == 137
    assert run.events[-2:] == [(len(run.events) - 1, "exited"), (len(run.events), "closed")]
    _assert_no_zombies(server)


def test_terminate_after_the_leader_exited_kills_its_survivors(
    client: Client, server: Server
) -> None:
    name, family = _start_family(client, server, leader_exits=True)
    assert client.call("process/terminate", {"processId": name}) == {"running": False}
    assert survivors(family) == []
    client.collect(name)
    _assert_no_zombies(server)


def test_terminate_spares_the_families_of_others(server: Server) -> None:
    with server.connect() as one, server.connect() as two:
        name, family = _start_family(one, server)
        beside, family_beside = _start_family(one, server)
        foreign, family_foreign = _start_family(two, server)
        one.call("process/terminate", {"processId": name})
        assert survivors(family) == []
        assert survivors(family_beside, timeout=0.1) == list(family_beside)
        one.call("process/terminate", {"processId": beside})
        assert survivors(family_beside) == []
        assert survivors(family_foreign, timeout=0.1) == list(family_foreign)
        two.call("process/terminate", {"processId": foreign})
        assert survivors(family_foreign) == []


@pytest.mark.parametrize("leader_exits", [False, True])
def test_end_of_the_session_kills_everything(leader_exits: bool) -> None:
    with start_server("ours", "--session-retention", "0") as server:
        client = server.connect()
        _, family = _start_family(client, server, leader_exits=leader_exits)
        client.close()
        assert survivors(family) == []
        _assert_no_zombies(server)


def test_sigterm_kills_everything(server: Server) -> None:
    with server.connect() as client:
        _, family = _start_family(client, server)
        _, other = _start_family(client, server, tty=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert survivors(family | other) == []


def test_sigterm_kills_an_orphan_without_its_tag(server: Server, python: Python) -> None:
    with server.connect() as client:
        client.collect(client.start(python(_WITHOUT_TAG)))
        family = _family(server, ["1007"])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert survivors(family) == []


@pytest.mark.parametrize("whole_group", [False, True])
def test_sigkill_leaves_nobody(server: Server, whole_group: bool) -> None:
    with server.connect() as client:
        _, family = _start_family(client, server)
        _, other = _start_family(client, server, tty=True)
        everybody = descendants(server.process.pid)
        (os.killpg if whole_group else os.kill)(server.process.pid, signal.SIGKILL)
        assert server.process.wait(10) == -signal.SIGKILL
        assert survivors(family | other) == []
        assert survivors(everybody) == [], "of the server's own processes"


def test_killed_watchdog_harms_nobody(server: Server) -> None:
    with server.connect() as client:
        os.kill(watchdog_pid(server), signal.SIGKILL)
        name, family = _start_family(client, server)
        client.call("process/terminate", {"processId": name})
        assert survivors(family) == []
        client.collect(name)


# ---- hard cases -----------------------------------------------------------------------


@pytest.mark.parametrize("leader_exits", [False, True])
def test_disguised_daemon_is_found(
    client: Client, server: Server, python: Python, leader_exits: bool
) -> None:
    code = _DISGUISED + ("" if leader_exits else "import time; time.sleep(1000)")
    name = client.start(python(code))
    client.notice("process/exited" if leader_exits else "process/output", name)
    family = _family(server, ["1006"])
    client.call("process/terminate", {"processId": name})
    assert survivors(family) == []
    client.collect(name)


def test_fork_bomb_is_killed(client: Client, server: Server, python: Python) -> None:
    name = client.start(python(_FORK_BOMB))
    client.notice("process/output", name)
    pid = server.process.pid
    eventually("the bomb has gone off", lambda: len(descendants(pid)) > 150)
    assert client.call("process/terminate", {"processId": name}) == {"running": True}
    eventually("the bomb is dead", lambda: not commands(server))
    assert client.collect(name).exit_code == 137


def test_fork_bomb_dies_with_a_killed_server(server: Server, python: Python) -> None:
    with server.connect() as client:
        name = client.start(python(_FORK_BOMB))
        client.notice("process/output", name)
        pid = server.process.pid
        eventually("the bomb has gone off", lambda: len(descendants(pid)) > 150)
        bomb = stat_fields(commands(server)[0])[3]
        os.kill(pid, signal.SIGKILL)
        assert server.process.wait(20) == -signal.SIGKILL
        eventually("the bomb is dead", lambda: not _members(bomb))


def test_large_family_is_killed(client: Client, server: Server) -> None:
    script = "for i in $(seq 5001 5300); do setsid sleep $i & done; echo ready; wait"
    name = client.start(["/bin/sh", "-c", script])
    family = _family(server, [str(number) for number in range(5001, 5301)])
    client.call("process/terminate", {"processId": name})
    assert survivors(family) == []
    client.collect(name)
    _assert_no_zombies(server)


def test_orphans_are_reaped_while_their_command_runs(client: Client, server: Server) -> None:
    script = "for i in $(seq 50); do (setsid true &); done; echo ready; sleep 1000"
    name = client.start(["/bin/sh", "-c", script])
    client.notice("process/output", name)
    eventually("only the leader is left", lambda: len(commands(server)) == 1)
    client.call("process/terminate", {"processId": name})
    client.collect(name)


def test_daemon_outlives_its_forgotten_command_but_not_the_session() -> None:
    flags = ("--session-retention", "0", "--process-retention", "0.05")
    with start_server("ours", *flags) as server:
        client = server.connect()
        name = client.start(["/bin/sh", "-c", "(setsid sleep 1000 > /dev/null 2>&1 &)"])
        client.collect(name)

        def forgotten() -> bool:
            return "error" in client.answer(client.request("process/read", {"processId": name}))

        eventually("the command is forgotten", forgotten)
        family = _family(server, ["1000"])
        assert survivors(family, timeout=0.1) == list(family)
        client.close()
        assert survivors(family) == []


# ---- without privileges ---------------------------------------------------------------


@pytest.mark.parametrize("leader_exits", [False, True])
def test_unprivileged_server_finds_all_descendants(leader_exits: bool) -> None:
    with start_unprivileged() as server, server.connect() as client:
        name, family = _start_family(client, server, leader_exits=leader_exits)
        client.call("process/terminate", {"processId": name})
        assert survivors(family) == []
        client.collect(name)


def test_unprivileged_server_leaves_nobody_when_killed() -> None:
    with start_unprivileged() as server, server.connect() as client:
        _, family = _start_family(client, server)
        os.kill(server.process.pid, signal.SIGKILL)
        assert server.process.wait(10) == -signal.SIGKILL
        assert survivors(family) == []
