"""New contents of files appear when they are complete; ours and the reference."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.client import KINDS, scaled
from tests.support.client_targets import ClientTarget, Proxy, bounded, machine
from tests.support.memory_session import outcome
from tests.support.process_limits import limited_server
from tests.support.server_internals import eventually

from exec_server import ConnectionLost, Environment, RpcError, SessionLost, connect, sync
from exec_server.client.files import WHOLE_BYTES
from exec_server.client.transfer.plan import SMALL_BYTES

LARGE = WHOLE_BYTES + 1


def parts(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.endswith(".part")]


@pytest.mark.quick
def test_a_content_appears_when_it_is_complete(there: ClientTarget, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    old.chmod(0o640)

    async def scene(env: Environment) -> None:
        for path in (old, new):
            async with env.files.open(path, "wb") as file:
                await file.write(b"x" * 1_000_000)
                await file.flush()
                assert file.written == 1_000_000
                assert old.read_bytes() == b"old" or path is new
                assert not new.exists()
                assert len(parts(tmp_path)) == 1
            assert path.read_bytes() == b"x" * 1_000_000
        await env.files.write(old, b"y" * LARGE)

    there.play(scene)
    assert old.read_bytes() == b"y" * LARGE
    assert old.stat().st_mode & 0o777 == 0o640
    assert new.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


@pytest.mark.quick
def test_closing_the_environment_removes_temporary_files(
    there: ClientTarget, tmp_path: Path
) -> None:
    """Of a forgotten file, of one in the block of another task, and of one of the sync API."""

    async def scene() -> None:
        env = await there.make()
        forgotten = await env.files.open(tmp_path / "forgotten", "wb")
        await forgotten.write(b"x" * 1_000_000)
        is_written, is_closed = asyncio.Event(), asyncio.Event()

        async def write() -> None:
            async with env.files.open(tmp_path / "late", "wb") as file:
                await file.flush()
                is_written.set()
                await is_closed.wait()

        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(outcome(write()))
            await is_written.wait()
            assert len(parts(tmp_path)) == 2
            await env.aclose()
            assert os.listdir(tmp_path) == []
            is_closed.set()
        assert isinstance(writing.result(), SessionLost)
        with pytest.raises(SessionLost):
            await forgotten.write(b"x" * 1_000_000)
        with pytest.raises(SessionLost):
            await forgotten.aclose()

    bounded(scene())
    with sync.connect(there.url) as env:
        file = env.files.open(tmp_path / "forgotten", "wb")
        file.write(b"x")
        assert len(parts(tmp_path)) == 1
    with pytest.raises(SessionLost):
        file.close()
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_just_opened_or_closed_leaves_nothing(
    ours: ClientTarget, tmp_path: Path
) -> None:
    async def scene(env: Environment) -> None:
        opening = env.files.open(tmp_path / "opening", "wb")
        closing = await env.files.open(tmp_path / "closing", "wb")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(outcome(opening.__aenter__()))
            tasks.create_task(closing.aclose())
            await asyncio.sleep(0)  # both have begun
            await env._clean_up()
        assert not opening.is_open
        assert not env.session.clean_ups

    ours.play(scene)
    assert os.listdir(tmp_path) == ["closing"]


def test_a_write_that_the_end_of_the_environment_interrupts_is_lost_not_cancelled(
    ours: ClientTarget, tmp_path: Path
) -> None:
    async def scene(env: Environment) -> None:
        file = await env.files.open(tmp_path / "file", "wb")
        async with asyncio.TaskGroup() as tasks:
            await file.write(bytes(1_000_000))
            flushing = tasks.create_task(outcome(file.flush()))
            await asyncio.sleep(0)  # it waits for the answer
            await env._clean_up()
        assert isinstance(flushing.result(), SessionLost)

    ours.play(scene)


def test_a_failed_block_leaves_the_file_as_it_was(there: ClientTarget, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    async def fail(env: Environment) -> None:
        async with env.files.open(path, "wb") as file:
            await file.write(bytes(1_000_000))
            raise ZeroDivisionError

    async def write(env: Environment, started: asyncio.Event) -> None:
        async with env.files.open(path, "wb") as file:
            await file.write(bytes(1_000_000))
            await file.flush()
            started.set()
            await asyncio.Event().wait()

    async def scene(env: Environment) -> None:
        with pytest.raises(ZeroDivisionError):
            await fail(env)
        assert os.listdir(tmp_path) == ["file"]
        started = asyncio.Event()
        writing = asyncio.get_running_loop().create_task(write(env, started))
        await started.wait()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert os.listdir(tmp_path) == ["file"]

    there.play(scene)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_leaves_the_file_as_it_was(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    async def write(env: Environment, proxy: Proxy) -> None:
        async with env.files.open(path, "wb") as file:
            await file.write(bytes(1_000_000))
            await file.flush()
            proxy.cut()
            for _ in range(20):
                await file.write(bytes(1_000_000))

    async def scene(url: str) -> None:
        async with Proxy(url).running() as proxy, connect(proxy.url) as env:
            with pytest.raises(ConnectionLost, match="while the file was written, after"):
                await write(env, proxy)
            assert os.listdir(tmp_path) == ["file"]

    with machine(kind) as there:
        bounded(scene(there.url))
    assert path.read_bytes() == b"old"


def test_ctrl_c_leaves_nothing_behind(there: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    program = (
        "import sys\n"
        "from exec_server import sync\n"
        "with sync.connect(sys.argv[1]) as env, env.files.open(sys.argv[2], 'wb') as file:\n"
        "    while True:\n"
        "        file.write(bytes(1000))\n"
    )
    words = [sys.executable, "-c", program, there.url, str(tmp_path / "file")]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as running:
        try:
            eventually("it writes", lambda: bool(parts(tmp_path)))
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=scaled(20))
        finally:
            running.kill()
    assert b"KeyboardInterrupt" in errors
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_links_stay_links(there: ClientTarget, tmp_path: Path) -> None:
    """Hard links keep their inode, symlinks are followed, a dangling one creates its target."""
    (tmp_path / "directory").mkdir()
    target = tmp_path / "directory" / "target"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to("directory/target")
    (tmp_path / "one").write_bytes(b"old")
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    (tmp_path / "dangling").symlink_to("directory/made")
    (tmp_path / "source").write_bytes(b"u" * (SMALL_BYTES + 1))

    async def scene(env: Environment) -> None:
        data = b"n" * LARGE
        for name in ("link", "one", "dangling"):
            await env.files.write(tmp_path / name, data)
        assert target.read_bytes() == data
        assert (tmp_path / "two").read_bytes() == data
        assert (tmp_path / "directory" / "made").read_bytes() == data
        for name in ("link", "two", "dangling"):
            await env.files.upload(tmp_path / "source", tmp_path / name)

    there.play(scene)
    data = (tmp_path / "source").read_bytes()
    assert (tmp_path / "one").samefile(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == data
    assert target.read_bytes() == data
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "dangling").is_symlink()
    assert parts(tmp_path) == parts(tmp_path / "directory") == []


def test_in_place_is_as_it_says(there: ClientTarget, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    inode = path.stat().st_ino

    async def scene(env: Environment) -> None:
        async with env.files.open(path, "wb", in_place=True) as file:
            assert path.read_bytes() == b""
            await file.write(b"new")
        await env.files.write(path, b"x" * LARGE, in_place=True)

    there.play(scene)
    assert (path.stat().st_ino, path.read_bytes()) == (inode, b"x" * LARGE)


def test_paths_that_cannot_be_replaced_are_errors(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        (tmp_path / "directory").mkdir()
        for path in (tmp_path / "directory", tmp_path / "no" / "file"):
            with pytest.raises(RpcError, match=str(path)):
                await env.files.write(path, b"x" * LARGE)
        await env.files.write(tmp_path / "made" / "file", b"x" * LARGE, parents=True)
        # A name so long that there is no space for a suffix.
        await env.files.write(tmp_path / ("é" * 127), b"x" * LARGE)

    there.play(scene)
    assert (tmp_path / "made" / "file").stat().st_size == LARGE
    assert (tmp_path / ("é" * 127)).stat().st_size == LARGE
    assert parts(tmp_path) == []


def test_without_commands_the_server_copies(
    there: ClientTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_bytes(b"old")

    async def scene(env: Environment) -> None:
        async def run(*args: object, **options: object) -> None:
            raise RpcError("there are none")

        monkeypatch.setattr(env, "run", run)
        for name in ("old", "new"):
            await env.files.write(tmp_path / name, b"x" * LARGE)

    there.play(scene)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {
        "old": LARGE,
        "new": LARGE,
    }


ORDINARY = 12345


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
def test_owners_are_kept(there: ClientTarget, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o4750)
    os.chown(path, ORDINARY, ORDINARY)
    path.chmod(0o640)

    async def scene(env: Environment) -> None:
        await env.files.write(path, b"x" * LARGE)

    there.play(scene)
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (ORDINARY, ORDINARY, 0o640)


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_to_write_is_needed(kind: str, tmp_path: Path) -> None:
    """A file in a closed directory is written in place; a read-only file is refused at once."""
    for name, mode in (("closed", 0o666), ("read only", 0o444)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"old")
        (tmp_path / name / "file").chmod(mode)
    inode = (tmp_path / "closed" / "file").stat().st_ino
    (tmp_path / "closed").chmod(0o555)

    async def open_only(env: Environment) -> None:
        async with env.files.open(tmp_path / "read only" / "file", "wb"):
            pytest.fail("it is open")

    async def scene(url: str) -> None:
        async with connect(url) as env:
            await env.files.write(tmp_path / "closed" / "file", b"x" * LARGE)
            with pytest.raises(PermissionError, match="read only/file: Permission denied"):
                await open_only(env)
            with pytest.raises(PermissionError, match="closed/new: Permission denied"):
                await env.files.write(tmp_path / "closed" / "new", b"x" * LARGE)

    with limited_server(kind, tmp_path) as url:
        bounded(scene(url))
    found = (tmp_path / "closed" / "file").stat()
    assert (found.st_ino, found.st_size) == (inode, LARGE)
    assert (tmp_path / "read only" / "file").read_bytes() == b"old"
    for name in ("closed", "read only"):
        assert os.listdir(tmp_path / name) == ["file"]
