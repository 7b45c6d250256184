"""Families of processes and their killing, against the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from exec_server.host import libc
from exec_server.process import descendants

# A daemon: its own session, no parent, no streams.
_DAEMON = ["/bin/sh", "-c", "(setsid sleep 1000 < /dev/null > /dev/null 2>&1 &)"]
# The parent ends after each fork, so that the pid changes all the time.
_HOPPER = """
use POSIX;
$SIG{CHLD} = "IGNORE";
my $end = time + 60;
while (time < $end) { if (fork()) { exit } POSIX::setsid(); }
"""


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def subreaper() -> Iterator[None]:
    """Orphans of the test become children of this process, as they do of the server."""
    libc.become_subreaper()
    yield
    descendants.kill_all_descendants(spared=0)
    _reap_all()
    libc.LIBC.prctl(36, 0, 0, 0, 0)


def _reap_all() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _sleepers() -> list[int]:
    """Children of ours that sleep: daemons, once their shells are gone."""
    return _sleepers_below(os.getpid())


def _sleepers_below(pid: int) -> list[int]:
    """The children of a shell that sleep."""
    found = []
    for child in descendants.children_of(pid):
        with open(f"/proc/{child}/cmdline", "rb") as file:
            if file.read() == b"sleep\x001000\0":
                found.append(child)
    return found


def _is_alive(pid: int) -> bool:
    return not descendants.is_zombie(pid)


# ---- families -------------------------------------------------------------------------


def test_children_of_nobody() -> None:
    assert descendants.children_of(2**22 + 1) == []


def test_process_that_has_ended_is_like_a_zombie() -> None:
    assert descendants.is_zombie(2**22 + 1)
    assert descendants.parent_of(2**22 + 1) == 0
    assert descendants.start_of(2**22 + 1) == 0
    assert descendants.parent_of(os.getpid()) == os.getppid()


def test_the_start_of_a_process_is_in_ticks_since_the_boot() -> None:
    def now() -> int:
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    before = now()
    with subprocess.Popen(["/bin/sleep", "1000"]) as child:
        start = descendants.start_of(child.pid)
        child.kill()
    assert before <= start <= now()


@pytest.mark.usefixtures("subreaper")
def test_walk_has_parents_first() -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "sh -c 'sleep 1000 & wait' & wait"])
    _until(lambda: len(dict(descendants.walk([child.pid]))) == 3)
    found = dict(descendants.walk([child.pid]))
    assert next(iter(found)) == child.pid
    assert list(found.values()) == [os.getpid(), *list(found)[:2]]
    descendants.kill_tree(child.pid)
    child.wait()


def test_walk_finds_a_process_once_that_changes_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    children = {1: [2, 3], 3: [4], 2: [4]}
    monkeypatch.setattr(descendants, "children_of", lambda pid: children.get(pid, []))
    assert list(descendants.walk([1])) == [(1, os.getpid()), (2, 1), (3, 1), (4, 3)]


def test_only_later_attempts_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    before = [len(pauses) for _ in descendants.attempts()]
    assert before == [max(0, number - 9) for number in range(descendants.MAX_ATTEMPTS)]


@pytest.mark.usefixtures("subreaper")
def test_kill_tree_reaches_other_sessions_and_the_group() -> None:
    script = "setsid sleep 1000 & sleep 1000 & wait"
    child = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
    _until(lambda: len(dict(descendants.walk([child.pid]))) == 3)
    family = dict(descendants.walk([child.pid]))
    descendants.kill_tree(child.pid)
    assert child.wait() == -signal.SIGKILL
    _until(lambda: not any(_is_alive(pid) for pid in family))
    descendants.kill_tree(child.pid)  # the group is empty


@pytest.mark.usefixtures("subreaper")
def test_kill_tree_leaves_the_rest_of_a_large_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "SMALL_FAMILY", 2)
    script = "setsid sleep 1000 & sleep 1000 & wait"
    child = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
    _until(lambda: len(_sleepers_below(child.pid)) == 2)
    one, other = _sleepers_below(child.pid)
    descendants.kill_tree(child.pid)
    assert child.wait() == -signal.SIGKILL
    _until(lambda: _is_alive(one) + _is_alive(other) == 1)
    descendants.kill_all_descendants(spared=0)
    assert not _is_alive(one)
    assert not _is_alive(other)


@pytest.mark.usefixtures("subreaper")
def test_processes_of_large_families_are_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "SMALL_FAMILY", 2)
    stopped: list[int] = []
    stop = descendants._stop

    def record(*arguments: Any) -> dict[int, int]:
        found = stop(*arguments)
        stopped.extend(found)
        return found

    monkeypatch.setattr(descendants, "_stop", record)
    children = [subprocess.Popen(["/bin/sleep", "1000"]) for _ in range(3)]
    pids = [child.pid for child in children]
    assert descendants.kill_children(lambda: pids)
    assert stopped[:3] == pids
    assert [child.wait() for child in children] == [-signal.SIGKILL] * 3


@pytest.mark.usefixtures("subreaper")
def test_process_with_another_parent_is_spared() -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "sleep 1000 & wait"])
    _until(lambda: descendants.children_of(child.pid))
    (grandchild,) = descendants.children_of(child.pid)
    descendants.kill_family({grandchild: 1, 2**22 + 1: 1})  # below init: a reused pid
    assert _is_alive(grandchild)
    descendants.kill_family({grandchild: child.pid})
    _until(lambda: not _is_alive(grandchild))
    child.kill()
    child.wait()


def test_orphan_that_stays_in_the_family_is_killed() -> None:
    """As below the init of a sandbox: it is the parent of those whose own parent has ended."""
    program = (
        "import os, signal, subprocess, sys\n"
        "from exec_server.host import libc\n"
        "libc.become_subreaper()\n"
        "shell = subprocess.Popen(['sh', '-c', 'sleep 1000 & echo $!; wait'], stdout=1)\n"
        "shell.wait()\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as init:
        assert init.stdout is not None
        orphan = int(init.stdout.readline())
        try:
            shell = dict(descendants.walk([init.pid]))[orphan]
            os.kill(shell, signal.SIGKILL)
            _until(lambda: descendants.parent_of(orphan) == init.pid)
            descendants.kill_family({shell: init.pid, orphan: shell})
            _until(lambda: not _is_alive(orphan))
        finally:
            os.kill(orphan, signal.SIGKILL)
            init.kill()


# ---- killing until nothing is left ----------------------------------------------------


@pytest.mark.usefixtures("subreaper")
def test_children_are_killed_with_their_descendants() -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "setsid sleep 1000 & wait"])
    bystander = subprocess.Popen(["/bin/sleep", "1000"])
    _until(lambda: descendants.children_of(child.pid))
    (grandchild,) = descendants.children_of(child.pid)
    assert descendants.kill_children(lambda: [child.pid])
    _until(lambda: not _is_alive(grandchild))
    assert child.wait() == -signal.SIGKILL
    assert bystander.poll() is None
    descendants.kill_all_descendants(spared=bystander.pid)
    assert bystander.poll() is None
    descendants.kill_all_descendants(spared=0)
    assert bystander.wait() == -signal.SIGKILL


@pytest.mark.usefixtures("subreaper")
def test_later_attempts_stop_the_processes_before_they_kill_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descendants, "PLAIN_ATTEMPTS", 0)
    sent: list[signal.Signals] = []
    send = signal.pidfd_send_signal

    def record(descriptor: int, number: signal.Signals) -> None:
        sent.append(number)
        send(descriptor, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", record)
    child = subprocess.Popen(["/bin/sh", "-c", "setsid sleep 1000 & wait"])
    _until(lambda: descendants.children_of(child.pid))
    assert descendants.kill_children(lambda: [child.pid])
    assert sent[:4] == [signal.SIGSTOP] * 2 + [signal.SIGKILL] * 2
    assert child.wait() == -signal.SIGKILL


@pytest.mark.usefixtures("subreaper")
def test_process_that_changes_its_pid_all_the_time_is_caught() -> None:
    subprocess.Popen(["/usr/bin/perl", "-e", _HOPPER]).wait()

    def hoppers() -> list[int]:
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        return descendants.children_of(os.getpid())

    _until(hoppers)
    assert descendants.kill_children(hoppers)


@pytest.mark.usefixtures("subreaper")
def test_killing_gives_up_on_a_process_that_does_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "MAX_ATTEMPTS", 5)
    monkeypatch.setattr(descendants, "_UNDELAYED_ATTEMPTS", 1)
    monkeypatch.setattr(descendants, "_signal_member", lambda *_: None)
    subprocess.run(_DAEMON, check=True)
    _until(_sleepers)
    assert not descendants.kill_children(_sleepers)
    assert [_is_alive(pid) for pid in _sleepers()] == [True]
    monkeypatch.undo()


@pytest.mark.usefixtures("subreaper")
def test_search_that_misses_a_process_is_repeated() -> None:
    child = subprocess.Popen(["/bin/sleep", "1000"])
    searches = iter([[], [child.pid]])
    assert descendants.kill_children(lambda: next(searches, []))
    assert child.wait() == -signal.SIGKILL


def test_search_for_processes_to_stop_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "MAX_SEARCHES", 3)
    monkeypatch.setattr(descendants, "_signal_member", lambda *_: None)
    pids = iter(range(2**22 + 1, 2**22 + 100))
    stopped = descendants._stop(lambda: [(next(pids), 1)], lambda *_: True)
    assert len(stopped) == 3


def test_a_process_that_proc_hides_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that is not dumpable for an ordinary user, if /proc has the option hidepid."""
    monkeypatch.setattr(descendants, "_stat_fields", lambda pid: None)
    child = subprocess.Popen(["sleep", "1000"])
    assert not descendants.is_zombie(child.pid)
    assert descendants.parent_of(child.pid) == os.getpid()
    assert descendants.parent_of(1) == 0
    assert descendants.start_of(child.pid) == sys.maxsize
    descendants.kill_tree(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert descendants.is_zombie(child.pid)
    child.wait()
    assert descendants.is_zombie(child.pid)
    assert descendants.parent_of(child.pid) == 0
