"""The client's files: one by one, streamed, and whole trees; ours and the reference."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clients import LOOPS, Cutter, Machine, Run, bounded, machine, under_cuts
from exec_server import Entry, Environment, NotFound, Progress, RpcError, Unsupported, connect
from exec_server.client import files as files_module
from exec_server.client import transfer as transfer_module
from exec_server.client import upload as upload_module
from exec_server.client.open_file import AHEAD_BLOCKS, BLOCK_BYTES
from exec_server.errors import ConnectionLost, InvalidRequest
from relaying import KINDS

MIB = 1_048_576


def tree(top: Path) -> dict[str, tuple[str, object, object]]:
    """Everything below a directory: kind, permissions, and content or target."""
    found = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        kind = stat.filemode(status.st_mode)[0]
        mode = None if kind == "l" else stat.S_IMODE(status.st_mode)
        found[str(path.relative_to(top))] = (kind, mode, content)
    return found


def make_tree(top: Path) -> None:
    """One of everything that a tree may have."""
    (top / "empty").mkdir(parents=True)
    (top / "deep" / "er" / "est").mkdir(parents=True)
    (top / "deep" / "er" / "est" / "file").write_bytes(b"deep")
    (top / "none").write_bytes(b"")
    (top / "script").write_text("#!/bin/sh\necho hi\n")
    (top / "script").chmod(0o755)
    (top / "secret").write_text("s")
    (top / "secret").chmod(0o600)
    (top / "ünï cödé \n'\"$").write_text("strange")
    (top / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"bytes")
    (top / "large").write_bytes(os.urandom(transfer_module.SMALL_BYTES + 12_345))
    (top / "link").symlink_to("script")
    (top / "nowhere").symlink_to("no/such/file")
    (top / "dirlink").symlink_to("deep")
    for number in range(50):
        (top / "deep" / f"{number}").write_text(str(number))
    (top / "closed").mkdir()
    (top / "closed" / "inside").write_text("x")
    (top / "closed").chmod(0o555)


# ---- one by one -----------------------------------------------------------------------


def test_the_life_of_a_file(there: Machine, tmp_path: Path) -> None:
    path = tmp_path / "a b" / "file?"

    async def scene(env: Environment) -> None:
        files = env.files
        assert not await files.exists(path)
        with pytest.raises(NotFound, match=r"file\?: No such file or directory"):
            await files.read(path)
        with pytest.raises(NotFound):
            await files.write(path, b"no directory")
        await files.mkdir(path.parent)
        with pytest.raises(RpcError, match="File exists"):
            await files.mkdir(path.parent)
        await files.mkdir(path.parent, exist_ok=True)
        await files.mkdir(path.parent / "x" / "y", parents=True)
        with pytest.raises(RpcError, match="File exists"):
            await files.mkdir(path.parent / "x" / "y", parents=True)
        await files.mkdir(path.parent / "x" / "y", parents=True, exist_ok=True)
        await files.write(path, b"content")
        assert await files.read(path) == b"content"
        found = await files.stat(path)
        assert (found.is_file, found.is_directory, found.size) == (True, False, 7)
        assert found.modified == pytest.approx(path.stat().st_mtime, abs=0.002)
        await files.copy(path, f"{path}2")
        with pytest.raises(RpcError, match="recursive"):
            await files.copy(path.parent, tmp_path / "c")
        await files.copy(path.parent, tmp_path / "c", recursive=True)
        await files.remove(path)
        with pytest.raises(NotFound):
            await files.remove(path)
        await files.remove(path, missing_ok=True)
        with pytest.raises(RpcError, match="not empty"):
            await files.remove(path.parent)
        await files.remove(path.parent, recursive=True)

    there.play(scene)
    assert tree(tmp_path).keys() == {"c", "c/file?", "c/file?2", "c/x", "c/x/y"}


def test_a_file_where_a_directory_should_be(there: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    async def scene(env: Environment) -> None:
        with pytest.raises(RpcError, match="File exists"):
            await env.files.mkdir(tmp_path / "file", exist_ok=True)
        with pytest.raises(RpcError, match="Not a directory"):
            await env.files.list(tmp_path / "file")

    there.play(scene)


def test_what_there_is(there: Machine, tmp_path: Path) -> None:
    make_tree(tmp_path)

    async def scene(env: Environment) -> None:
        entries = await env.files.list(tmp_path / "deep")
        assert entries[0] == Entry(f"{tmp_path}/deep/0", is_directory=False, is_file=True)
        assert [entry.name for entry in entries] == sorted(os.listdir(tmp_path / "deep"))
        walked = [entry async for entry in env.files.walk(tmp_path / "deep")]
        expected = {f"{tmp_path}/deep/{path}" for path in tree(tmp_path / "deep")}
        assert {entry.path for entry in walked} == expected
        assert [entry.path for entry in walked if entry.is_directory] == [
            f"{tmp_path}/deep/er",
            f"{tmp_path}/deep/er/est",
        ]
        link = await env.files.stat(tmp_path / "dirlink")
        assert (link.is_symlink, link.is_directory) == (True, True)
        assert await env.files.realpath(tmp_path / "dirlink" / "0") == f"{tmp_path}/deep/0"
        assert not await env.files.exists(tmp_path / "nowhere")

    there.play(scene)


def test_a_tree_that_is_too_large_for_one_answer(
    there: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path)
    (tmp_path / "deep" / "round").symlink_to("..")

    async def scene(env: Environment) -> None:
        whole = [entry async for entry in env.files.walk(tmp_path)]
        followed = [entry async for entry in env.files.walk(tmp_path, follow_links=True)]
        monkeypatch.setattr(files_module, "WALK_DIRECTORIES", 2)
        again = [entry async for entry in env.files.walk(tmp_path)]
        assert {entry.path for entry in again} == {entry.path for entry in whole}
        assert len(again) == len(whole)
        places = {entry.path: place for place, entry in enumerate(again)}
        for entry in again:
            assert places.get(os.path.dirname(entry.path), -1) < places[entry.path]
        rounds = [entry async for entry in env.files.walk(tmp_path, follow_links=True)]
        assert len(rounds) >= len(followed) > len(whole)
        deep = tmp_path / "/".join("d" * 140)
        deep.mkdir(parents=True)
        monkeypatch.undo()
        below = [entry.path async for entry in env.files.walk(tmp_path / "d")]
        assert len(below) == len(set(below)) == 139
        assert below[-1] == str(deep)

    there.play(scene)


def test_relative_paths_and_home(there: Machine) -> None:
    async def scene(env: Environment) -> None:
        home = (await env.run(["sh", "-c", "echo $HOME"])).text.strip()
        cwd = (await env.run(["pwd"])).text.strip()
        assert await env.files.realpath("~") == os.path.realpath(home)
        assert await env.files.realpath(".") == os.path.realpath(cwd)
        assert await env.files.realpath("file:///usr/../tmp") == os.path.realpath("/tmp")

    there.play(scene)


# ---- streamed -------------------------------------------------------------------------


def test_a_file_block_by_block(there: Machine, tmp_path: Path) -> None:
    data = os.urandom(3 * BLOCK_BYTES + 5)

    async def scene(env: Environment) -> None:
        async with env.files.open(tmp_path / "f", "wb") as writer:
            for start in range(0, len(data), 100_000):
                await writer.write(data[start : start + 100_000])
            await writer.flush()
            assert writer.written == len(data)
            await writer.write(b"more")
        async with env.files.open(tmp_path / "f") as reader:
            assert reader.size == len(data) + 4
            assert await reader.read(10) == data[:10]
            assert await reader.read(0) == b""
            blocks = [block async for block in reader]
            assert b"".join(blocks) == data[10:] + b"more"
            assert await reader.read() == b""
        async with env.files.open(tmp_path / "f", offset=len(data)) as reader:
            assert await reader.read() == b"more"
        with pytest.raises(NotFound):
            await env.files.open(tmp_path / "none").__aenter__()
        with pytest.raises(ValueError, match="'rb' or 'wb'"):
            env.files.open(tmp_path / "f", "ab")

    there.play(scene)
    assert (tmp_path / "f").read_bytes() == data + b"more"


def test_sizes_around_a_block(there: Machine, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        for size in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, AHEAD_BLOCKS * MIB):
            data = os.urandom(size)
            async with env.files.open(tmp_path / "f", "wb") as writer:
                await writer.write(data)
            async with env.files.open(tmp_path / "f") as reader:
                assert await reader.read() == data

    there.play(scene)


def test_a_server_that_cannot_stream(ours: Machine, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files
        files._capabilities = type(files._capabilities)()
        with pytest.raises(Unsupported, match=r"fileWriteStreaming: .*files\.write"):
            files.open(tmp_path / "f", "wb")
        data = os.urandom(files_module.WHOLE_BYTES + 1)
        await files.write(tmp_path / "f", data)
        assert await files.read(tmp_path / "f") == data

    ours.play(scene)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_goes_on_after_cuts(kind: str, tmp_path: Path) -> None:
    data = os.urandom(12 * MIB)
    (tmp_path / "f").write_bytes(data)

    async def scene(url: str) -> None:
        async with under_cuts(url, 5, 6 * MIB) as (cutter, env):
            async with env.files.open(tmp_path / "f") as reader:
                assert b"".join([block async for block in reader]) == data
            assert cutter.cuts >= 2

    with machine(kind) as there:
        bounded(scene(there.url))


def test_a_reader_of_a_file_that_changed_does_not_go_on(ours: Machine, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(20 * MIB))

    async def scene() -> None:
        async with (
            Cutter(ours.url, seed=0, most_bytes=2**40).running() as cutter,
            connect(cutter.url) as env,
            env.files.open(tmp_path / "f") as reader,
        ):
            await anext(reader)
            (tmp_path / "f").write_bytes(b"another")
            cutter.cut()
            with pytest.raises(ConnectionLost, match="not the same any more"):
                await reader.read()

    bounded(scene())


def test_a_writer_does_not_go_on_after_a_cut(ours: Machine, tmp_path: Path) -> None:
    async def write(env: Environment, cutter: Cutter) -> None:
        async with env.files.open(tmp_path / "f", "wb") as writer:
            await writer.write(bytes(2 * MIB))
            await writer.flush()
            cutter.cut()
            await writer.write(bytes(9 * MIB))

    async def scene() -> None:
        async with (
            Cutter(ours.url, seed=0, most_bytes=2**40).running() as cutter,
            connect(cutter.url) as env,
        ):
            with pytest.raises(ConnectionLost, match="2097152 bytes are there"):
                await write(env, cutter)
            assert (await env.files.stat(tmp_path / "f")).size >= 2 * MIB

    bounded(scene())


# ---- between the machines -------------------------------------------------------------


def test_a_tree_there_and_back(there: Machine, tmp_path: Path) -> None:
    make_tree(tmp_path / "a")
    seen: list[Progress] = []

    async def scene(env: Environment) -> None:
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b", progress=seen.append)
        assert sent.left_out == ()
        got = await env.files.download(tmp_path / "b", tmp_path / "c")
        assert (got.files, got.directories, got.links) == (sent.files, sent.directories, sent.links)
        assert got.left_out == ()
        assert sent.copied_bytes == got.copied_bytes > transfer_module.SMALL_BYTES
        # Again, over what is there.
        assert (await env.files.download(tmp_path / "b", tmp_path / "c")).left_out == ()

    there.play(scene)
    expected = tree(tmp_path / "a")
    assert tree(tmp_path / "b") == expected
    assert tree(tmp_path / "c") == expected
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert (
        seen[-1].done_files
        == seen[-1].total_files
        == len([kind for kind, _, _ in expected.values() if kind == "-"])
    )


@pytest.mark.parametrize("size", [3, transfer_module.SMALL_BYTES + 1])
def test_a_single_file(there: Machine, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "a").chmod(0o750)
    (tmp_path / "link").symlink_to("a")

    async def scene(env: Environment) -> None:
        await env.files.upload(tmp_path / "link", tmp_path / "b")
        await env.files.download(tmp_path / "b", tmp_path / "c")
        with pytest.raises(NotFound):
            await env.files.download(tmp_path / "none", tmp_path / "d")
        with pytest.raises(FileNotFoundError):
            await env.files.upload(tmp_path / "none", tmp_path / "d")
        (tmp_path / "directory").mkdir()
        with pytest.raises(RpcError, match="Is a directory"):
            await env.files.upload(tmp_path / "a", tmp_path / "directory")
        with pytest.raises(IsADirectoryError):
            await env.files.download(tmp_path / "a", tmp_path / "directory")
        (tmp_path / "directory").rmdir()

    there.play(scene)
    file = ("-", 0o750, hashlib.sha256(data).hexdigest())
    link = ("l", None, "a")
    assert tree(tmp_path) == {"a": file, "b": file, "c": file, "link": link}


def test_what_is_neither_file_nor_directory_is_left_out(there: Machine, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "fifo")

    async def scene(env: Environment) -> None:
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b")
        got = await env.files.download(tmp_path / "a", tmp_path / "c")
        text = ("fifo: neither file, directory nor link",)
        assert (sent.left_out, got.left_out) == (text, text)

    there.play(scene)
    assert tree(tmp_path / "b") == tree(tmp_path / "c") == {}


def test_machines_without_the_usual_commands(
    ours: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content goes through the protocol; only modes and links need commands."""
    make_tree(tmp_path / "a")

    async def scene(env: Environment) -> None:
        run = env.run

        async def bare(argv: list[str], **options: object) -> object:
            return await run(argv, clean_env=True, env={"PATH": "/none"}, **options)  # type: ignore[arg-type]

        async def barer(argv: list[str], **options: object) -> object:
            options.pop("env", None)
            return await bare(argv, **options)

        monkeypatch.setattr(env, "run", barer)
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b")
        assert [text.split(":")[0] for text in sent.left_out][:1] == ["links"]
        got = await env.files.download(tmp_path / "a", tmp_path / "c")
        assert got.left_out == ("modes and links: the machine has no GNU find",)

    ours.play(scene)
    expected = {
        path: content for path, (kind, _, content) in tree(tmp_path / "a").items() if kind != "l"
    }
    assert {path: content for path, (_, _, content) in tree(tmp_path / "b").items()} == expected
    readable = {path: content for path, content in expected.items() if "\udcff" not in path}
    assert {path: content for path, (_, _, content) in tree(tmp_path / "c").items()} == readable


def test_a_large_file_goes_on_where_it_ended(there: Machine, tmp_path: Path) -> None:
    """An attempt that was ended leaves a part, and nothing under the final name."""
    data = os.urandom(24 * MIB)
    (tmp_path / "a").write_bytes(data)

    async def scene(env: Environment) -> None:
        for copy, target in ((env.files.upload, "b"), (env.files.download, "c")):
            reached = asyncio.Event()

            def stop(progress: Progress, reached: asyncio.Event = reached) -> None:
                if progress.done_bytes > 10 * MIB:
                    reached.set()

            first = asyncio.get_running_loop().create_task(
                copy(tmp_path / "a", tmp_path / target, progress=stop)
            )
            await reached.wait()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert not (tmp_path / target).exists()
            second = await copy(tmp_path / "a", tmp_path / target)
            assert second.resumed_bytes >= 5 * MIB
            assert second.resumed_bytes + second.copied_bytes == len(data)

    there.play(scene)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() == data


def test_a_part_of_something_else_is_not_gone_on_with(there: Machine, tmp_path: Path) -> None:
    data = os.urandom(5 * MIB)
    (tmp_path / "a").write_bytes(data)
    [item] = upload_module._scan(str(tmp_path / "a"))
    Path(transfer_module.part_path(str(tmp_path / "b"), item)).write_bytes(bytes(MIB))

    async def scene(env: Environment) -> None:
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b")
        assert sent.resumed_bytes == 0

    there.play(scene)
    assert (tmp_path / "b").read_bytes() == data


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_survive_cuts(kind: str, tmp_path: Path) -> None:
    data = os.urandom(16 * MIB)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "large").write_bytes(data)
    (tmp_path / "a" / "small").write_bytes(b"small")

    async def scene(url: str) -> None:
        async with under_cuts(url, 3, 12 * MIB) as (cutter, env):
            await env.files.upload(tmp_path / "a", tmp_path / "b")
            up = cutter.cuts
            assert up >= 2
            await env.files.download(tmp_path / "b", tmp_path / "c")
            assert cutter.cuts >= up + 2

    with machine(kind) as there:
        bounded(scene(there.url))
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c")


def test_nothing_is_written_through_a_link(ours: Machine, tmp_path: Path) -> None:
    (tmp_path / "a" / "d").mkdir(parents=True)
    (tmp_path / "a" / "d" / "f").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "d").symlink_to(tmp_path / "elsewhere")

    async def scene(env: Environment) -> None:
        with pytest.raises(InvalidRequest, match="nothing is written through one"):
            await env.files.download(tmp_path / "a", tmp_path / "b")

    ours.play(scene)
    assert tree(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize("run", LOOPS)
def test_a_failure_ends_a_transfer(ours: Machine, tmp_path: Path, run: Run) -> None:
    (tmp_path / "a").mkdir()
    for number in range(20):
        (tmp_path / "a" / str(number)).write_text("x")
    (tmp_path / "b" / "7").mkdir(parents=True)

    async def scene(env: Environment) -> None:
        with pytest.raises(RpcError, match="b/7: Is a directory"):
            await env.files.upload(tmp_path / "a", tmp_path / "b")

    ours.play(scene, run)


MEMORY = """
import asyncio, resource, sys, uvloop
from exec_server import connect

async def main(url, source, target):
    async with connect(url) as env:
        await env.files.upload(source, target)
        await env.files.remove(target)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await env.files.upload(source + ".large", target + ".large")
        await env.files.download(target + ".large", source + ".back")
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

uvloop.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_flat(kind: str, tmp_path: Path) -> None:
    """256 MiB up and down cost the client hardly more than 8 MiB do."""
    (tmp_path / "a").write_bytes(os.urandom(8 * MIB))
    with (tmp_path / "a.large").open("wb") as file:
        block = os.urandom(MIB)
        for number in range(256):
            file.write(number.to_bytes(4, "big") + block[4:])
    with machine(kind) as there:
        words = [sys.executable, "-c", MEMORY, there.url, str(tmp_path / "a"), str(tmp_path / "b")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 32 * MIB
    digests = {
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in ("a.large", "b.large", "a.back")
    }
    assert len(digests) == 1
    for name in ("a.large", "b.large", "a.back"):
        (tmp_path / name).unlink()  # they are large
