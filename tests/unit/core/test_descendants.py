"""Tags, families and how they are killed; against the kernel, since it is all about that."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from exec_server.core import descendants, system
from exec_server.core.descendants import SERVER_TAGS, TagPool, tag_late, tagged

_RLIMIT_LOCKS = 10
_TAG = SERVER_TAGS[77]
# A daemon: its own session, no parent, no streams.
_DAEMON = ["/bin/sh", "-c", "(setsid sleep 1000 < /dev/null > /dev/null 2>&1 &)"]


@pytest.fixture
def subreaper() -> Iterator[None]:
    """Orphans of the test become children of this process, as they do of the server."""
    system.become_subreaper()
    yield
    for pid in descendants.children_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    _reap_all()
    system.LIBC.prctl(36, 0, 0, 0, 0)


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
    found = []
    for pid in descendants.children_of(os.getpid()):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read() == b"sleep\x001000\0":
                found.append(pid)
    return found


def _is_alive(pid: int) -> bool:
    return not descendants._is_zombie(pid)


# ---- tags -----------------------------------------------------------------------------


def test_sessions_have_tags_of_their_own() -> None:
    pool = TagPool()
    one, two = pool.for_session(), pool.for_session()
    tags = [one.take(), one.take(), two.take(), two.take()]
    assert len(set(tags)) == 4
    assert all(tag in SERVER_TAGS for tag in tags)
    assert [tag in one.all for tag in tags] == [True, True, False, False]
    assert [tag in two.all for tag in tags] == [False, False, True, True]


def test_tags_start_again_when_they_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "_PROCESS_BITS", 1)
    monkeypatch.setattr(descendants, "_SESSION_BITS", 1)
    pool = TagPool()
    one, two, three = pool.for_session(), pool.for_session(), pool.for_session()
    assert one.all == three.all != two.all
    first, second = one.take(), one.take()
    assert (one.take(), one.take()) == (first, second)


@pytest.mark.usefixtures("subreaper")
def test_tag_is_inherited_and_ours_is_left_alone() -> None:
    before = resource.getrlimit(_RLIMIT_LOCKS)
    with tagged(_TAG) as carried:
        child = subprocess.Popen(["/bin/sh", "-c", "sleep 1000 & wait"])
    assert carried
    assert resource.getrlimit(_RLIMIT_LOCKS) == before
    _until(lambda: descendants.children_of(child.pid))
    (grandchild,) = descendants.children_of(child.pid)
    assert descendants._tag_of(child.pid) == descendants._tag_of(grandchild) == _TAG
    assert descendants._tag_of(os.getpid()) not in SERVER_TAGS
    descendants.kill_tree(child.pid)
    child.wait()


def test_start_that_hangs_delays_the_tags_of_others_only_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descendants, "_TAGGING_SECONDS", 0.01)
    with tagged(_TAG), tagged(_TAG + 1) as carried:
        assert not carried
        child = subprocess.Popen(["/bin/sleep", "1000"])
        tag_late(child.pid, _TAG + 1)
        assert descendants._tag_of(child.pid) == _TAG + 1
    child.kill()
    child.wait()


def test_low_hard_limit_means_no_tags() -> None:
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(_RLIMIT_LOCKS, (5, 5))
        with tagged(_TAG) as carried:
            pass
        os._exit(0 if not carried and resource.getrlimit(_RLIMIT_LOCKS) == (5, 5) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_tag_late_does_not_mind_a_child_that_is_gone() -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    tag_late(child.pid, _TAG)


# ---- families -------------------------------------------------------------------------


def test_children_of_nobody() -> None:
    assert descendants.children_of(2**22 + 1) == []


@pytest.mark.usefixtures("subreaper")
def test_subtree_has_parents_first_and_can_be_limited() -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "sh -c 'sleep 1000 & wait' & wait"])
    _until(lambda: len(descendants.subtree([child.pid])) == 3)
    found = descendants.subtree([child.pid])
    assert next(iter(found)) == child.pid
    assert list(found.values()) == [os.getpid(), *list(found)[:2]]
    assert list(descendants.subtree([child.pid], limit=2)) == list(found)[:2]
    descendants.kill_tree(child.pid)
    child.wait()


@pytest.mark.usefixtures("subreaper")
def test_kill_tree_reaches_other_sessions_and_the_group() -> None:
    script = "setsid sleep 1000 & sleep 1000 & wait"
    child = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
    _until(lambda: len(descendants.subtree([child.pid])) == 3)
    family = descendants.subtree([child.pid])
    descendants.kill_tree(child.pid)
    assert child.wait() == -signal.SIGKILL
    _until(lambda: not any(_is_alive(pid) for pid in family))
    descendants.kill_tree(child.pid)  # nobody left


@pytest.mark.usefixtures("subreaper")
def test_kill_all_spares_a_process_with_another_parent() -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "sleep 1000 & wait"])
    _until(lambda: descendants.children_of(child.pid))
    (grandchild,) = descendants.children_of(child.pid)
    descendants.kill_all({grandchild: 1, 2**22 + 1: 1})  # found below init: the number was reused
    assert _is_alive(grandchild)
    descendants.kill_all({grandchild: child.pid})
    _until(lambda: not _is_alive(grandchild))
    child.kill()
    child.wait()


# ---- orphans --------------------------------------------------------------------------


def test_kill_all_reaches_an_orphan_that_stays_in_the_family() -> None:
    """As below the init of a sandbox: it is the parent of those whose own parent has ended."""
    program = (
        "import os, signal, subprocess, sys\n"
        "from exec_server.core import system\n"
        "system.become_subreaper()\n"
        "shell = subprocess.Popen(['sh', '-c', 'sleep 1000 & echo $!; wait'], stdout=1)\n"
        "shell.wait()\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as init:
        assert init.stdout is not None
        orphan = int(init.stdout.readline())
        try:
            shell = descendants.subtree([init.pid])[orphan]
            os.kill(shell, signal.SIGKILL)
            _until(lambda: descendants._parent_of(orphan) == init.pid)
            descendants.kill_all({shell: init.pid, orphan: shell})
            _until(lambda: not _is_alive(orphan))
        finally:
            os.kill(orphan, signal.SIGKILL)
            init.kill()


@pytest.mark.usefixtures("subreaper")
def test_carriers_are_found_by_tag_and_killed() -> None:
    for tag in (_TAG, _TAG + 1):
        with tagged(tag):
            subprocess.run(_DAEMON, check=True)
    _until(lambda: len(_sleepers()) == 2)
    (mine,) = descendants.carriers(range(_TAG, _TAG + 1), ())
    (other,) = descendants.carriers(range(_TAG + 1, _TAG + 2), ())
    assert {mine, other} == set(_sleepers())
    assert descendants.carriers(range(_TAG, _TAG + 1), {mine}) == {}
    descendants.kill_carriers(range(_TAG, _TAG + 1), ())
    assert not _is_alive(mine)
    assert _is_alive(other)
    descendants.kill_carriers(SERVER_TAGS, ())
    assert not _is_alive(other)


@pytest.mark.usefixtures("subreaper")
def test_killing_gives_up_on_what_does_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "MAX_PASSES", 3)
    monkeypatch.setattr(descendants, "_PATIENT_AFTER", 1)
    monkeypatch.setattr(descendants, "kill_all", lambda found: None)
    with tagged(_TAG):
        subprocess.run(_DAEMON, check=True)
    _until(_sleepers)
    descendants.kill_carriers(SERVER_TAGS, ())
    assert [_is_alive(pid) for pid in _sleepers()] == [True]


@pytest.mark.usefixtures("subreaper")
def test_strays_are_killed_wherever_they_are() -> None:
    with tagged(_TAG):
        child = subprocess.Popen(["/bin/sh", "-c", "setsid sleep 1000 & wait"])
    bystander = subprocess.Popen(["/bin/sleep", "1000"])
    _until(lambda: descendants.children_of(child.pid))
    (stray,) = descendants.children_of(child.pid)
    descendants.kill_strays()
    assert not _is_alive(stray)
    assert child.wait() == -signal.SIGKILL
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
