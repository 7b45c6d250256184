"""Reaper: exit codes reach their callbacks, and no child stays a zombie."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.support.forked import in_own_process

from exec_server.host import libc
from exec_server.host.libc import exit_code
from exec_server.process.orphans import Owner
from exec_server.process.table import Reaper


@pytest.fixture(autouse=True)
def signal_mask() -> Iterator[None]:
    """The reaper blocks SIGCHLD for good: restore the mask for the other tests."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _with_reaper(test: Callable[[Reaper], Awaitable[None]]) -> None:
    async def limited() -> None:
        reaper = Reaper()
        reaper.open()
        try:
            async with asyncio.timeout(10):
                await test(reaper)
        finally:
            reaper.close()

    asyncio.run(limited())


def _start(script: str) -> int:
    return os.posix_spawn("/bin/sh", ["sh", "-c", script], {"PATH": "/usr/bin:/bin"})


def _is_zombie_or_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def _exit_of(reaper: Reaper, pid: int, owner: Owner) -> int:
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reaper.watch(pid, owner, told.set_result)
    return await told


@in_own_process
def test_watched_child_is_reported_and_reaped() -> None:
    async def test(reaper: Reaper) -> None:
        reaper.expect(owner := Owner(None))
        pid = _start("exec sleep 1000")
        os.kill(pid, signal.SIGKILL)
        assert await _exit_of(reaper, pid, owner) == 137
        assert not _is_zombie_or_alive(pid)

    _with_reaper(test)


@in_own_process
def test_child_that_ends_before_it_is_watched_is_reported_in_the_next_turn() -> None:
    async def test(reaper: Reaper) -> None:
        reaper.expect(owner := Owner(None))
        pid = _start("exit 5")
        while _is_zombie_or_alive(pid):
            await asyncio.sleep(0.001)
        told: list[int] = []
        reaper.watch(pid, owner, told.append)
        assert told == []  # so that the answer to the start can be sent before
        await asyncio.sleep(0)
        assert told == [5]

    _with_reaper(test)


@in_own_process
def test_early_exit_of_an_orphan_is_not_taken_for_that_of_its_successor() -> None:
    async def test(reaper: Reaper) -> None:
        reaper.expect(owner := Owner(None))
        pid = _start("exec sleep 1000")
        reaper._early_exits[pid] = 99  # an orphan with this number has ended before
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        reaper.watch(pid, owner, told.set_result)
        os.kill(pid, signal.SIGTERM)
        assert await told == 143

    _with_reaper(test)


@in_own_process
def test_exits_are_only_remembered_during_starts() -> None:
    async def test(reaper: Reaper) -> None:
        pid = _start("exit 1")
        while _is_zombie_or_alive(pid):
            await asyncio.sleep(0.001)
        assert reaper._early_exits == {}
        owners = [Owner(None), Owner(None)]
        for owner in owners:
            reaper.expect(owner)
        pid = _start("exit 1")
        while _is_zombie_or_alive(pid):
            await asyncio.sleep(0.001)
        assert reaper._early_exits == {pid: 1}
        reaper.unexpect(owners[0])
        assert reaper._early_exits == {pid: 1}
        reaper.unexpect(owners[1])
        assert reaper._early_exits == {}

    _with_reaper(test)


@in_own_process
def test_orphans_are_reaped(tmp_path: Path) -> None:
    async def test(reaper: Reaper) -> None:
        reaper.expect(owner := Owner(None))
        pid = _start(f"(setsid sh -c 'echo $$ > {tmp_path}/pid; read x < {tmp_path}/fifo' &)")
        assert await _exit_of(reaper, pid, owner) == 0
        with open(tmp_path / "fifo", "w") as fifo:  # opens once the orphan waits in it
            orphan = int((tmp_path / "pid").read_text())
            assert _is_zombie_or_alive(orphan)
            fifo.write("end\n")
        while _is_zombie_or_alive(orphan):
            await asyncio.sleep(0.001)

    os.mkfifo(tmp_path / "fifo")
    libc.become_subreaper()
    try:
        _with_reaper(test)
    finally:
        libc.LIBC.prctl(36, 0, 0, 0, 0)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_exit_codes(script: str, code: int) -> None:
    child = subprocess.Popen(["/bin/sh", "-c", script])
    _, status = os.waitpid(child.pid, 0)
    child.returncode = 0
    assert exit_code(status) == code


@in_own_process
def test_a_signal_is_read_once() -> None:
    async def test(reaper: Reaper) -> None:
        reaper.expect(owner := Owner(None))
        assert await _exit_of(reaper, _start("exit 0"), owner) == 0
        assert select.select([reaper._descriptor], [], [], 0) == ([], [], [])
        reaper._on_signal()  # nothing to read is no error

    _with_reaper(test)
