"""Daemons that change the limit by which the server recognises its descendants die nevertheless."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.client import Client, Server, start_server
from tests.support.server_internals import (
    AS_NOBODY,
    eventually,
    is_running,
    start_prepared,
    start_unprivileged,
)

from exec_server.process.strays import own_directory

# Ways to change the limit in bash: the soft limit within its range, and above it; both limits;
# and both above the range, which only root can do.
_CHANGES = ["ulimit -S -x 5", "ulimit -S -x unlimited", "ulimit -x 5", "ulimit -x unlimited"]
_LOWER = "ulimit -x 5; ulimit -m 5"

_USERS = [pytest.param("root", marks=pytest.mark.root), "ordinary"]
_numbers = itertools.count(os.getpid() * 1000)  # daemons are told apart by how long they sleep

_LIMIT = "import resource; resource.setrlimit({}, (1000, 1000))"
# Chooses the limit for the tags again, as a user that cannot raise limits.
_CHOOSE_AGAIN = """
from exec_server.process import tags
source = open(tags.__file__).read()
{}
exec(compile(source, tags.__file__, "exec"), tags.__dict__)
"""


@contextmanager
def _started(user: str, *flags: str) -> Iterator[Server]:
    if user == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    with start_server("ours", *flags) if user == "root" else start_unprivileged(*flags) as server:
        yield server


def _daemon(change: str, *, then: str = "sleep 60") -> tuple[list[str], str]:
    """A command with a daemon that makes the change, and the word by which it is found."""
    word = str(next(_numbers))
    script = f"{change} 2> /dev/null; exec sleep {word}"
    start = f"(setsid bash -c '{script}' < /dev/null > /dev/null 2>&1 &)"
    return ["/bin/bash", "-c", f"{start}; {then}"], word


def _start_daemon(client: Client, change: str, *, then: str = "sleep 60") -> tuple[str, str]:
    """Start such a command; returns its id, and the word of its running daemon."""
    argv, word = _daemon(change, then=then)
    name = client.start(argv)
    eventually("the daemon runs", lambda: is_running(word))
    return name, word


def _assert_ends(*words: str) -> None:
    eventually("all daemons are dead", lambda: not any(is_running(word) for word in words))


# ---- the ways to end ------------------------------------------------------------------


@pytest.mark.parametrize("user", _USERS)
def test_terminate_kills_a_daemon_without_its_tag(user: str) -> None:
    with _started(user) as server, server.connect() as client:
        assert client.run(["/bin/true"]).exit_code == 0  # an earlier command is no owner
        for change in _CHANGES:
            name, word = _start_daemon(client, change)
            assert client.call("process/terminate", {"processId": name}) == {"running": True}
            _assert_ends(word)
            client.collect(name)


@pytest.mark.parametrize("user", _USERS)
def test_terminate_kills_the_daemon_of_an_exited_leader(user: str) -> None:
    with _started(user) as server, server.connect() as client:
        name, word = _start_daemon(client, "ulimit -x 5", then="exit 3")
        assert client.collect(name).exit_code == 3
        assert client.call("process/terminate", {"processId": name}) == {"running": False}
        _assert_ends(word)


@pytest.mark.parametrize("user", _USERS)
def test_end_of_the_session_kills_daemons_without_their_tags(user: str) -> None:
    with _started(user, "--session-retention", "0") as server, server.connect() as other:
        _, spared = _start_daemon(other, "true")
        with server.connect() as client:
            words = [_start_daemon(client, change)[1] for change in _CHANGES[:2]]
        _assert_ends(*words)
        assert is_running(spared)


@pytest.mark.parametrize("user", _USERS)
def test_sigkill_of_the_server_kills_daemons_without_their_tags(user: str) -> None:
    with _started(user) as server, server.connect() as client:
        words = [_start_daemon(client, change, then="exit")[1] for change in _CHANGES]
        words.append(_start_daemon(client, _LOWER)[1])
        os.kill(server.process.pid, signal.SIGKILL)
        assert server.process.wait(10) == -signal.SIGKILL
        _assert_ends(*words)


@pytest.mark.root
def test_cgroup_alone_kills_everything_and_is_removed() -> None:
    without_strays = (
        "from exec_server.process import strays; strays.Strays.kill = lambda self: None"
    )
    with start_prepared(without_strays) as server, server.connect() as client:
        cgroup = _cgroup_of(server)
        if cgroup is None:
            pytest.skip("no cgroup can be created")
        words = [_start_daemon(client, change, then="exit")[1] for change in ("true", _LOWER)]
        os.kill(server.process.pid, signal.SIGKILL)
        assert server.process.wait(10) == -signal.SIGKILL
        _assert_ends(*words)
        eventually("the cgroup is removed", lambda: not cgroup.exists())


@pytest.mark.root
def test_cgroup_is_removed_after_an_orderly_end() -> None:
    with start_server("ours") as server:
        cgroup = _cgroup_of(server)
        if cgroup is None:
            pytest.skip("no cgroup can be created")
        with server.connect() as client:
            shown = client.run(["/bin/cat", "/proc/self/cgroup"]).stdout.decode()
            assert _paths(shown) == _paths(Path(f"/proc/{server.process.pid}/cgroup").read_text())
            assert os.path.basename(_paths(shown)["0"]) == cgroup.name
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        eventually("the cgroup is removed", lambda: not cgroup.exists())


def _cgroup_of(server: Server) -> Path | None:
    """The directory of the server's own cgroup."""
    pid = server.process.pid
    text = Path(f"/proc/{pid}/cgroup").read_text()
    directory = own_directory(text, Path(f"/proc/{pid}/mountinfo").read_text())
    own = f"exec-server.{pid}."
    return Path(directory) if directory and os.path.basename(directory).startswith(own) else None


def _paths(cgroups: str) -> dict[str, str]:
    """The path in each hierarchy, by its number, from the text of /proc/PID/cgroup."""
    return {number: path for number, _, path in (line.split(":", 2) for line in cgroups.split())}


# ---- owners that cannot be told apart -------------------------------------------------


def test_daemon_without_its_tag_dies_with_its_last_possible_owner() -> None:
    with start_unprivileged() as server, server.connect() as client, server.connect() as other:
        beside = other.start(["/bin/sleep", "60"])
        name, word = _start_daemon(client, "ulimit -x 5")
        later = client.start(["/bin/sleep", "60"])  # started after the daemon
        client.call("process/terminate", {"processId": name})
        client.collect(name)
        client.call("process/terminate", {"processId": later})
        client.collect(later)
        assert is_running(word), "it may belong to the client that did nothing"
        other.call("process/terminate", {"processId": beside})
        _assert_ends(word)


# ---- low limits -----------------------------------------------------------------------


@pytest.mark.parametrize("low", [[10], [10, 5]], ids=["locks", "both"])
@pytest.mark.parametrize("user", _USERS)
def test_limits_of_the_server_may_be_low(user: str, low: list[int]) -> None:
    preparation = "\n".join(_LIMIT.format(number) for number in low)
    if user == "ordinary":
        preparation += _CHOOSE_AGAIN.format(AS_NOBODY if os.geteuid() == 0 else "")
    elif os.geteuid() != 0:
        pytest.skip("needs root")
    with start_prepared(preparation) as server, server.connect() as client:
        assert client.run(["/bin/true"]).exit_code == 0
        for change in ("true", _LOWER):
            name, word = _start_daemon(client, change, then="exit")
            client.collect(name)
            client.call("process/terminate", {"processId": name})
            _assert_ends(word)
        words = [_start_daemon(client, change)[1] for change in ("true", _LOWER)]
        os.kill(server.process.pid, signal.SIGKILL)
        assert server.process.wait(10) == -signal.SIGKILL
        _assert_ends(*words)
