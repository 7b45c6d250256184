"""Strays: what is left of a dead server is recognised, and nothing else is."""

from __future__ import annotations

import functools
import io
import os
import resource
import subprocess
import time
from collections.abc import Callable

import pytest
from tests.support.forked import in_own_process

from exec_server.host import libc
from exec_server.process import descendants, strays, tags
from exec_server.process.strays import Strays

_PRINT_AND_SLEEP = "echo $$; exec sleep 1000"


def _start(script: str = _PRINT_AND_SLEEP) -> int:
    """Start a shell with its own session; returns the pid that it prints."""
    libc.become_subreaper()
    child = subprocess.Popen(
        ["/bin/sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    child.returncode = 0
    return int(child.stdout.readline())


def _in_own_world(test: Callable[[], None]) -> Callable[[], None]:
    """Runs a test in its own process, and kills what it leaves."""

    def run() -> None:
        try:
            test()
        finally:
            descendants.kill_all_descendants(spared=0)

    return in_own_process(functools.wraps(test)(run))


def _is_alive(pid: int) -> bool:
    return not descendants.is_zombie(pid)


def _lose_tag(pid: int) -> None:
    assert tags._PLAN is not None
    resource.prlimit(pid, tags._PLAN.carrier.number, (5, 5))


def _after_death_of(server: Callable[[], list[int]]) -> tuple[Strays, list[int]]:
    """Run a server to its end, below this process; returns its strays and what it reports.

    The process of the test has the part of init and of the watchdog.
    """
    libc.become_subreaper()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        tags.mark_this_process()
        os.write(writer, " ".join(map(str, server())).encode())
        os._exit(0)
    found = Strays(pid)
    os.waitpid(pid, 0)
    os.close(writer)
    pids = [int(word) for word in os.read(reader, 4096).split()]
    os.close(reader)
    return found, pids


@pytest.fixture(autouse=True)
def parent_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)


@_in_own_world
def test_processes_with_and_without_tags_are_killed() -> None:
    def server() -> list[int]:
        pids = []
        for _ in range(2):
            with tags.Tagged():
                pids.append(_start())
        _lose_tag(pids[1])
        with tags.Tagged():
            child = _start("sleep 1000 & echo $!; wait")
        for pid in (child, descendants.parent_of(child)):
            _lose_tag(pid)
            pids.append(pid)
        return pids

    found, left = _after_death_of(server)
    bystander = _start()
    assert all(_is_alive(pid) for pid in left)
    found.kill()
    assert not any(_is_alive(pid) for pid in left)
    assert _is_alive(bystander)


@_in_own_world
def test_marked_processes_elsewhere_are_spared() -> None:
    """Another server that lives, what is below it, older processes, those in other cgroups."""
    older = _start()
    _lose_tag(older)
    time.sleep(0.02)  # a tick of the clock by which processes are ordered
    found, _ = _after_death_of(list)
    found._start = descendants.start_of(_start())
    other_server = _start("sleep 1000 & echo $$; ulimit -x 7 2> /dev/null; exec sleep 1000")
    _lose_tag(other_server)
    (watchdog,) = descendants.children_of(other_server)
    assert not tags.is_marked(watchdog)
    command = subprocess.Popen(["/bin/sleep", "1000"]).pid
    _lose_tag(command)
    assert [found._is_stray(pid) for pid in (older, other_server, watchdog)] == [False] * 3
    assert found._is_stray(command)
    found._is_left.clear()  # of one search
    found._cgroups |= {"99": "/none"}
    assert not found._is_stray(command)


@_in_own_world
def test_marks_of_processes_below_another_parent_say_nothing() -> None:
    found, _ = _after_death_of(list)
    child = _start("sleep 1000 & echo $!; wait")
    _lose_tag(child)
    assert not found._is_stray(child)  # its parent is not marked
    assert not found._is_stray(os.getpid())
    assert not found._is_stray(2**22 + 1)


@_in_own_world
def test_wait_for_the_new_parent_is_bounded() -> None:
    strays._REPARENT_SECONDS = 0.01
    found, _ = _after_death_of(list)
    found._server = os.getpid()
    found.kill()


def test_cgroups_of_a_process_that_has_ended_are_unknown() -> None:
    assert strays._cgroups_of(2**22 + 1) == {}


# ---- where /proc does not list all processes -------------------------------------------

_USUAL = b"22 1 0:20 / / rw - ext4 /dev/vda rw\n23 22 0:21 / /proc rw,nosuid - proc proc rw\n"
_HIDING = b"23 22 0:21 / /proc rw,nosuid - proc proc rw,hidepid=invisible\n"
_ELSEWHERE = b"24 22 0:22 / /jail/proc rw - proc proc rw,hidepid=invisible\n"


def test_a_proc_that_hides_processes_is_recognised() -> None:
    assert not strays.hides_processes(_USUAL)
    assert strays.hides_processes(_HIDING)
    assert strays.hides_processes(_USUAL + _HIDING)
    assert not strays.hides_processes(_USUAL + _ELSEWHERE)


@pytest.mark.parametrize(
    ("user", "mounts", "expected"),
    [(0, _HIDING, True), (1000, _HIDING, False), (1000, _USUAL, True), (0, None, False)],
)
def test_who_sees_all_processes_in_proc(
    user: int, mounts: bytes | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_mounts(path: str, mode: str) -> io.BytesIO:
        if mounts is None:
            raise FileNotFoundError(2, os.strerror(2), path)
        return io.BytesIO(mounts)

    monkeypatch.setattr(strays, "open", open_mounts, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert strays._shows_all_processes() is expected


def test_a_search_forgets_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: [])
    monkeypatch.setattr(strays, "_shows_all_processes", lambda: True)
    found = Strays(os.getpid())
    found._is_left[5], found._starts[5] = True, 7
    assert list(found._find()) == []
    assert (found._is_left, found._starts) == ({}, {})


@pytest.mark.parametrize("has_proc", [True, False])
def test_all_pids_are_tried(has_proc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_proc:
        monkeypatch.setattr(strays, "_MAX_PID", os.getpid())
        monkeypatch.setattr(strays, "open", _raise_not_found, raising=False)
    found = set(strays._try_all_pids())
    assert {1, os.getpid()} <= found
    assert has_proc or max(found) == os.getpid()


def _raise_not_found(path: str, **_: object) -> None:
    raise FileNotFoundError(2, os.strerror(2), path)


@_in_own_world
def test_strays_are_killed_without_the_list_of_proc() -> None:
    def server() -> list[int]:
        with tags.Tagged():
            return [_start()]

    found, left = _after_death_of(server)
    strays._shows_all_processes = lambda: False
    found.kill()
    assert not any(_is_alive(pid) for pid in left)
