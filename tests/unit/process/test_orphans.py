"""Orphans: to which command each belongs, and when it is killed. With real processes."""

from __future__ import annotations

import functools
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NoReturn

import pytest
from tests.support.forked import in_own_process

from exec_server.host import libc
from exec_server.process import descendants, tags
from exec_server.process.orphans import Orphans, Owner

# A leader that leaves a daemon: its own session, no parent, no streams. It says the daemon's pid.
_DAEMON = "setsid sh -c 'echo $$ >&3; exec sleep 1000' 3>&1 < /dev/null > /dev/null 2>&1 &"


def _is_alive(pid: int) -> bool:
    return not descendants.is_zombie(pid)


def _in_own_world(test: Callable[[], None]) -> Callable[[], None]:
    """Runs a test in its own process, and kills what it leaves."""

    def run() -> None:
        try:
            test()
        finally:
            descendants.kill_all_descendants(spared=0)

    return in_own_process(functools.wraps(test)(run))


class World:
    """A process like a server: marked, a subreaper, with its orphans."""

    def __init__(self) -> None:
        libc.become_subreaper()
        tags.mark_this_process()
        self.orphans = Orphans()

    def start(self, script: str, session: object = None) -> tuple[Owner, int, int]:
        """Start a command; returns its owner, its leader, and the pid that it prints."""
        owner = Owner(session)
        self.orphans.expect(owner)
        with tags.Tagged() as owner.tag:
            leader = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE)
        self.orphans.started(owner, leader.pid)
        leader.returncode = 0  # reaped here
        assert leader.stdout is not None
        return owner, leader.pid, int(leader.stdout.readline())

    def leave(self, session: object = None) -> tuple[Owner, int]:
        """Run a command that leaves a daemon, to its end; returns its owner and the daemon."""
        owner, leader, daemon = self.start(_DAEMON, session)
        self.reap(leader)
        return owner, daemon

    def reap(self, pid: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert pid in dict(self.orphans.reap())

    def lose_tag(self, pid: int) -> None:
        assert tags._PLAN is not None
        resource.prlimit(pid, tags._PLAN.carrier.number, (5, 5))

    def kill(self, *owners: Owner) -> None:
        self.orphans.kill(lambda owner: owner in owners)


@_in_own_world
def test_orphan_with_a_tag_dies_with_its_command() -> None:
    world = World()
    one, first = world.leave()
    other, second = world.leave()
    world.kill(one)
    assert not _is_alive(first)
    assert _is_alive(second)
    world.kill(other)
    assert not _is_alive(second)


@_in_own_world
def test_orphans_of_a_session_die_with_it() -> None:
    world = World()
    session, other = object(), object()
    _, first = world.leave(session)
    _, second = world.leave(session)
    _, spared = world.leave(other)
    world.orphans.kill(lambda owner: owner.session is session)
    assert [_is_alive(pid) for pid in (first, second, spared)] == [False, False, True]


@_in_own_world
def test_tag_counts_that_was_seen_first() -> None:
    world = World()
    owner, daemon = world.leave()
    other, _ = world.leave()
    world.lose_tag(daemon)
    world.kill(other)
    assert _is_alive(daemon)
    world.kill(owner)
    assert not _is_alive(daemon)


@_in_own_world
def test_orphan_without_a_tag_dies_with_its_last_possible_owner() -> None:
    world = World()
    session = object()
    ended, _ = world.leave(session)  # its daemon lives, and may have started others
    owner, leader, daemon = world.start(f"{_DAEMON} exec sleep 1000")
    world.lose_tag(daemon)
    os.kill(leader, signal.SIGKILL)
    world.reap(leader)
    world.kill(owner)
    assert _is_alive(daemon)
    time.sleep(0.02)  # a tick of the clock by which processes are ordered
    later, _ = world.leave()
    world.kill(later)
    assert _is_alive(daemon)
    world.kill(ended)
    assert not _is_alive(daemon)


@_in_own_world
def test_earlier_command_without_processes_is_no_owner() -> None:
    world = World()
    _, leader, _ = world.start("echo 0")
    world.reap(leader)
    owner, leader, daemon = world.start(f"{_DAEMON} exec sleep 1000")
    world.lose_tag(daemon)
    os.kill(leader, signal.SIGKILL)
    world.reap(leader)
    world.kill(owner)
    assert not _is_alive(daemon)


@_in_own_world
def test_later_command_is_no_owner() -> None:
    world = World()
    owner, leader, daemon = world.start(f"{_DAEMON} exec sleep 1000")
    world.lose_tag(daemon)
    time.sleep(0.02)  # a tick of the clock by which processes are ordered
    world.start("echo 0; exec sleep 1000")
    os.kill(leader, signal.SIGKILL)
    world.reap(leader)
    world.kill(owner)
    assert not _is_alive(daemon)


@_in_own_world
def test_orphans_of_an_orphan_belong_to_its_owner() -> None:
    world = World()
    owner, leader, child = world.start(
        "setsid sh -c 'sleep 1000 & echo $! >&3; exec 3>&-; wait' 3>&1 > /dev/null 2>&1 & wait"
    )
    parent = descendants.parent_of(child)
    os.kill(leader, signal.SIGKILL)
    world.reap(leader)
    world.lose_tag(child)
    os.kill(parent, signal.SIGKILL)
    world.reap(parent)
    other, _ = world.leave()
    world.kill(other)
    assert _is_alive(child)
    world.kill(owner)
    assert not _is_alive(child)


@_in_own_world
def test_leader_of_an_ended_command_is_killed() -> None:
    world = World()
    owner, leader, _ = world.start("echo 0; exec sleep 1000")
    _, spared, _ = world.start("echo 0; exec sleep 1000")
    world.kill(owner)
    assert not _is_alive(leader)
    assert _is_alive(spared)


@_in_own_world
def test_orphan_with_the_tag_of_an_ended_command_is_killed_with_the_next_one() -> None:
    world = World()
    owner, daemon = world.leave()
    world.orphans._owners.clear()  # it appeared after the command was killed
    world.kill(owner)
    assert not _is_alive(daemon)


@_in_own_world
def test_leader_that_was_reaped_before_its_start_was_known_is_an_owner() -> None:
    world = World()
    owner = Owner(None)
    world.orphans.expect(owner)
    with tags.Tagged() as owner.tag:
        leader = subprocess.Popen(["/bin/sh", "-c", _DAEMON], stdout=subprocess.PIPE)
    assert leader.stdout is not None
    daemon = int(leader.stdout.readline())
    world.reap(leader.pid)
    world.orphans.ended(owner)
    other, _ = world.leave()
    world.kill(other)
    assert _is_alive(daemon)
    world.kill(owner)
    assert not _is_alive(daemon)


@_in_own_world
def test_helpers_are_spared() -> None:
    libc.become_subreaper()
    tags.mark_this_process()
    helper = subprocess.Popen(["/bin/sleep", "1000"])
    orphans = Orphans()
    orphans.kill(lambda _: True)
    assert _is_alive(helper.pid)
    helper.kill()
    os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
    assert orphans.reap() == [(helper.pid, signal.SIGKILL)]
    assert orphans._helpers == set()
    helper.returncode = 0
    orphans.close()


@_in_own_world
def test_nothing_is_kept_of_the_dead() -> None:
    world = World()
    for _ in range(3):
        owner, daemon = world.leave()
        world.kill(owner)
        world.reap(daemon)
    failed = Owner(None)
    world.orphans.expect(failed)
    world.orphans.ended(failed)
    assert not world.orphans._starting
    assert not world.orphans._leaders
    assert not world.orphans._owners


def test_without_proc_no_orphans_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> NoReturn:
        raise FileNotFoundError(2, "no /proc")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        orphans = Orphans()
    owner = Owner(None)
    orphans.expect(owner)
    orphans.ended(owner)
    assert not orphans._owners
    orphans.close()
