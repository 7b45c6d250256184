"""The client's files: one by one and streamed; ours and the reference."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
from pathlib import Path
from typing import Literal

import pytest
from tests.support.client import KINDS
from tests.support.client_targets import (
    ClientTarget,
    CuttingProxy,
    bounded,
    machine,
    through_cutting_proxy,
)
from tests.support.trees import make_tree, tree

from exec_server import (
    AlreadyExists,
    Environment,
    NotAFile,
    NotFound,
    RpcError,
    SandboxDenied,
    Unsupported,
    connect,
)
from exec_server.client import files as files_module
from exec_server.client import tree_walk
from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.transfer.open_file import BLOCK_BYTES, MAX_BLOCKS_IN_FLIGHT
from exec_server.errors import ConnectionLost, InvalidRequest

MIB = 1_048_576


# ---- one by one -----------------------------------------------------------------------


def test_what_is_no_file_is_not_read(there: ClientTarget, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    async def scene(env: Environment) -> None:
        with pytest.raises(IsADirectoryError):
            await env.files.read(tmp_path)
        with pytest.raises(IsADirectoryError):
            await env.files.open(tmp_path)
        for work in (env.files.read(tmp_path / "fifo"), env.files.open(tmp_path / "fifo")):
            with pytest.raises(NotAFile, match="fifo: not a regular file") as refused:
                await work
            assert refused.value.errno == errno.EINVAL

    there.play(scene)


def test_a_link_is_not_followed(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("directory")
    (tmp_path / "dangling").symlink_to("nowhere")

    async def scene(env: Environment) -> None:
        for name, size in (("link", 9), ("dangling", 7)):
            found = await env.files.stat(tmp_path / name, follow_links=False)
            assert (found.is_directory, found.is_file, found.is_symlink) == (False, False, True)
            assert (found.size, found.created) == (size, None)
        found = await env.files.stat(tmp_path / "link" / "file", follow_links=False)
        assert (found.is_file, found.is_symlink, found.size) == (True, False, 3)
        with pytest.raises(NotFound, match="link/none: No such file"):
            await env.files.stat(tmp_path / "link" / "none", follow_links=False)
        with pytest.raises(NotADirectoryError):
            await env.files.stat(tmp_path / "directory" / "file" / "x", follow_links=False)

    ours.play(scene)


def test_names_that_are_not_utf_8(ours: ClientTarget, tmp_path: Path) -> None:
    """They are passed exactly, returned with a replacement, and copied exactly."""
    name = os.fsencode(tmp_path) + b"/tree/\xff"
    (tmp_path / "tree").mkdir()

    async def scene(env: Environment) -> None:
        files = env.files
        await files.write(name, b"content")
        assert await files.read(os.fsdecode(name)) == b"content"
        assert [entry.name for entry in await files.list(tmp_path / "tree")] == ["\ufffd"]
        assert await files.glob("*", tmp_path / "tree") == ["\ufffd"]
        assert [entry async for entry in files.walk(tmp_path / "tree")] == []
        await files.download(tmp_path / "tree", tmp_path / "down")
        await files.upload(tmp_path / "tree", tmp_path / "up")
        with open(tmp_path / "tree.tar", "wb") as file:
            async for chunk in files.read_tar(tmp_path / "tree"):
                file.write(chunk)
        with open(tmp_path / "tree.tar", "rb") as file:
            await files.write_tar(file, tmp_path / "unpacked")

    ours.play(scene)
    for copy in ("down", "up", "unpacked"):
        assert os.listdir(os.fsencode(tmp_path / copy)) == [b"\xff"]


@pytest.mark.quick
def test_the_life_of_a_file(there: ClientTarget, tmp_path: Path) -> None:
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


def test_a_file_where_a_directory_should_be(there: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    async def scene(env: Environment) -> None:
        with pytest.raises(RpcError, match="File exists"):
            await env.files.mkdir(tmp_path / "file", exist_ok=True)
        with pytest.raises(RpcError, match="Not a directory"):
            await env.files.list(tmp_path / "file")

    there.play(scene)


def test_what_there_is(there: ClientTarget, tmp_path: Path) -> None:
    make_tree(tmp_path)

    async def scene(env: Environment) -> None:
        entries = await env.files.list(tmp_path / "deep")
        first = (entries[0].path, entries[0].is_directory, entries[0].is_file)
        assert first == (f"{tmp_path}/deep/0", False, True)
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
    there: ClientTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path)
    (tmp_path / "deep" / "round").symlink_to("..")

    async def scene(env: Environment) -> None:
        whole = [entry async for entry in env.files.walk(tmp_path)]
        followed = [entry async for entry in env.files.walk(tmp_path, follow_links=True)]
        monkeypatch.setattr(tree_walk, "WALK_DIRECTORIES", 2)
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


def test_relative_paths_and_home(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        home = (await env.run(["sh", "-c", "echo $HOME"])).text.strip()
        cwd = (await env.run(["pwd"])).text.strip()
        assert await env.files.realpath("~") == os.path.realpath(home)
        assert await env.files.realpath(".") == os.path.realpath(cwd)
        assert await env.files.realpath("file:///usr/../tmp") == os.path.realpath("/tmp")

    there.play(scene)


def test_paths_that_lead_round_in_circles_do_not_exist(there: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    (tmp_path / "file").touch()

    async def scene(env: Environment) -> None:
        for path in ("one", "one/x", "file/x"):
            assert not await env.files.exists(tmp_path / path)
        with pytest.raises(RpcError, match="Filename too long"):
            await env.files.exists(tmp_path / ("x" * 300))

    there.play(scene)


def test_uris_are_paths(there: ClientTarget, tmp_path: Path) -> None:
    for name in ("a b", "a%20b"):
        (tmp_path / name).write_text(name)

    async def scene(env: Environment) -> None:
        uri = f"file://{tmp_path}"
        entries = await env.files.list(uri)
        assert [entry.path for entry in entries] == [f"{tmp_path}/a b", f"{tmp_path}/a%20b"]
        for entry in entries:
            assert await env.files.read(entry.path) == entry.name.encode()
        assert await env.files.read(f"{uri}/a%20b") == b"a b"
        async with env.files.open(f"{uri}/a%2520b") as reader:
            assert await reader.read(None) == b"a%20b"

    there.play(scene)


def test_a_file_is_not_copied_onto_itself(there: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "hard").hardlink_to(tmp_path / "a")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "inside").write_text("content")

    async def scene(env: Environment) -> None:
        for one, two in (("a", "a"), ("a", "d/../a"), ("a", "link"), ("a", "hard"), ("d", "d/.")):
            with pytest.raises(InvalidRequest, match="they are the same file"):
                await env.files.copy(tmp_path / one, f"{tmp_path}/{two}", recursive=True)
        await env.files.copy(tmp_path / "a", tmp_path / "b")
        await env.files.copy(tmp_path / "a", tmp_path / "b")

    there.play(scene)
    for name in ("a", "b", "hard", "d/inside"):
        assert (tmp_path / name).read_text() == "content"


# ---- streamed -------------------------------------------------------------------------


def test_a_file_block_by_block(there: ClientTarget, tmp_path: Path) -> None:
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
            assert not await reader.is_changed()
            (tmp_path / "f").unlink()
            assert await reader.is_changed()
            (tmp_path / "f").write_bytes(data + b"more")
        async with env.files.open(tmp_path / "f", offset=len(data)) as reader:
            assert await reader.read() == b"more"
        with pytest.raises(NotFound):
            await env.files.open(tmp_path / "none").__aenter__()

    there.play(scene)
    assert (tmp_path / "f").read_bytes() == data + b"more"


def test_text_is_written_and_read_by_lines(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        path = tmp_path / "f"
        async with env.files.open(path, "w", newline="\r\n") as writer:
            await writer.write("grün\nzwei\n")
            await writer.flush()
        async with env.files.open(path, "a") as writer:
            await writer.write("drei")
        async with env.files.open(path, "ab") as appender:
            await appender.write(b"\n")
            await appender.flush()
            assert appender.written == 1
            assert path.read_bytes() == "grün\r\nzwei\r\ndrei\n".encode()
        async with env.files.open(path, "r") as reader:
            assert await reader.readline() == "grün\n"
            assert [line async for line in reader] == ["zwei\n", "drei\n"]
            assert await reader.read() == ""
        async with env.files.open(path, "rt", newline="") as reader:
            assert await reader.read(7) == "grün\r\nz"
            assert await reader.read() == "wei\r\ndrei\n"

    there.play(scene)


def test_a_new_file_is_made_only_once(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        async with env.files.open(tmp_path / "new", "x") as writer:
            await writer.write("text")
        for mode in ("x", "xb"):
            with pytest.raises(AlreadyExists):
                await env.files.open(tmp_path / "new", mode)
        with contextlib.suppress(RuntimeError):
            async with env.files.open(tmp_path / "other", "xb") as other:
                await other.write(b"half")
                raise RuntimeError
        with contextlib.suppress(RuntimeError):
            async with env.files.open(tmp_path / "new", "w") as writer:
                await writer.write("half")
                raise RuntimeError
        async with env.files.open(tmp_path / "log", "a") as log:
            pass
        assert not log.is_open

    there.play(scene)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "new": "text",
        "log": "",
    }


def test_sizes_around_a_block(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        for size in (
            0,
            1,
            BLOCK_BYTES - 1,
            BLOCK_BYTES,
            BLOCK_BYTES + 1,
            MAX_BLOCKS_IN_FLIGHT * MIB,
        ):
            data = os.urandom(size)
            async with env.files.open(tmp_path / "f", "wb") as writer:
                await writer.write(data)
            async with env.files.open(tmp_path / "f") as reader:
                assert await reader.read() == data

    there.play(scene)


@pytest.mark.parametrize("size", [1, files_module.WHOLE_BYTES + 1])
def test_errors_of_large_files_are_those_of_small_ones(
    there: ClientTarget, tmp_path: Path, size: int
) -> None:
    async def scene(env: Environment) -> None:
        files = env.files
        with pytest.raises(SandboxDenied, match=f"{tmp_path}/f: Read-only file system"):
            await files.sandboxed("read-only").write(tmp_path / "f", bytes(size))
        with pytest.raises(NotFound, match=f"{tmp_path}/no/f: No such file"):
            await files.write(tmp_path / "no" / "f", bytes(size))
        with pytest.raises(RpcError, match=f"{tmp_path}: Is a directory"):
            await files.write(tmp_path, bytes(size))

    there.play(scene)


def test_errors_of_open_files_name_them(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        modes: tuple[Literal["rb", "wb"], ...] = ("rb", "wb")
        for mode in modes:
            with pytest.raises(NotFound, match=f"{tmp_path}/no/f: No such file"):
                await env.files.open(tmp_path / "no" / "f", mode).__aenter__()
        with pytest.raises(RpcError, match="/proc/self/mem: I/O error"):
            async with env.files.open("/proc/self/mem") as reader:
                await reader.read()
        with pytest.raises(RpcError, match="/proc/self/mem: I/O error"):
            async with env.files.open("/proc/self/mem", "wb") as writer:
                await writer.write(b"x")

    there.play(scene)


def test_a_server_that_cannot_stream(ours: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files
        env.session.features = ServerFeatures(confines_commands=False)
        with pytest.raises(Unsupported, match=r"fileWriteStreaming: .*files\.write"):
            files.sandboxed("read-only").open(tmp_path / "f", "wb")
        data = os.urandom(files_module.WHOLE_BYTES + 1)
        await files.write(tmp_path / "f", data)
        assert await files.read(tmp_path / "f") == data

    ours.play(scene)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_goes_on_after_cuts(kind: str, tmp_path: Path) -> None:
    data = os.urandom(12 * MIB)
    (tmp_path / "f").write_bytes(data)

    async def scene(url: str) -> None:
        async with through_cutting_proxy(url, 5, 6 * MIB) as (cutter, env):
            async with env.files.open(tmp_path / "f") as reader:
                assert b"".join([block async for block in reader]) == data
            assert cutter.cuts >= 2

    with machine(kind) as there:
        bounded(scene(there.url))


def test_a_reader_of_a_file_that_changed_does_not_go_on(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(20 * MIB))

    async def scene() -> None:
        async with (
            CuttingProxy(ours.url, seed=0, most_bytes=2**40).running() as cutter,
            connect(cutter.url) as env,
            env.files.open(tmp_path / "f") as reader,
        ):
            await anext(reader)
            (tmp_path / "f").write_bytes(b"another")
            cutter.cut()
            with pytest.raises(ConnectionLost, match="the file was changed meanwhile"):
                await reader.read()

    bounded(scene())


def test_a_writer_does_not_go_on_after_a_cut(ours: ClientTarget, tmp_path: Path) -> None:
    async def write(env: Environment, cutter: CuttingProxy, *, in_place: bool) -> None:
        async with env.files.open(tmp_path / "f", "wb", in_place=in_place) as writer:
            await writer.write(bytes(2 * MIB))
            await writer.flush()
            cutter.cut()
            await writer.write(bytes(9 * MIB))

    async def scene() -> None:
        async with (
            CuttingProxy(ours.url, seed=0, most_bytes=2**40).running() as cutter,
            connect(cutter.url) as env,
        ):
            with pytest.raises(ConnectionLost, match="after 2097152 bytes"):
                await write(env, cutter, in_place=False)
            assert not await env.files.exists(tmp_path / "f")
            with pytest.raises(ConnectionLost, match="after 2097152 bytes"):
                await write(env, cutter, in_place=True)
            assert (await env.files.stat(tmp_path / "f")).size >= 2 * MIB

    bounded(scene())


def test_entries_with_details_and_new_files(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files
        await files.write(tmp_path / "file", b"abc")
        (tmp_path / "dangling").symlink_to("missing")
        (tmp_path / "link").symlink_to("file")
        found = {entry.name: entry for entry in await files.list(tmp_path)}
        assert (found["file"].is_file, found["link"].is_file) == (True, True)
        assert ("dangling" in found) == env.capabilities.fs_list
        if env.capabilities.fs_list:
            assert (found["file"].size, found["link"].link_target) == (3, "file")
            assert found["file"].owner is None
            owned = {entry.name: entry for entry in await files.list(tmp_path, owners=True)}
            assert owned["file"].owner == pwd.getpwuid(os.getuid()).pw_name
            assert found["dangling"].is_symlink
            assert not found["dangling"].is_file
        await files.write(tmp_path / "a/b/new", b"new", parents=True, exclusive=True)
        large = bytes(5 * 1_048_576)
        await files.write(tmp_path / "large", large, exclusive=True)
        for name in ("a/b/new", "large", "dangling"):
            with pytest.raises(FileExistsError):
                await files.write(tmp_path / name, b"other", exclusive=True)
        assert (tmp_path / "a/b/new").read_bytes() == b"new"
        assert (tmp_path / "large").read_bytes() == large
        assert sorted(os.listdir(tmp_path)) == ["a", "dangling", "file", "large", "link"]
        real = await files.realpath(tmp_path)
        assert await files.realpath(tmp_path / "dangling/x", strict=False) == f"{real}/missing/x"
        with pytest.raises(FileNotFoundError):
            await files.realpath(tmp_path / "dangling")
        (tmp_path / "deep").symlink_to("a/b")
        assert await files.realpath(f"{tmp_path}/deep/../b/../../link") == f"{real}/file"
        assert await files.realpath(f"{tmp_path}/a/../..") == os.path.dirname(real)
        assert await files.realpath("/../..") == "/"

    there.play(scene)
