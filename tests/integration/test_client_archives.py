"""Tar archives of directories with real servers; ours and the reference."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from tests.support.client_targets import ClientTarget
from tests.support.trees import make_tree, tree

from exec_server import Environment, InvalidRequest, NotAllCopied, NotFound, SandboxDenied, sync

pytestmark = pytest.mark.quick


def test_a_tree_there_and_back_as_an_archive(there: ClientTarget, tmp_path: Path) -> None:
    make_tree(tmp_path / "a")
    (tmp_path / "a" / "one").write_bytes(b"same")
    os.link(tmp_path / "a" / "one", tmp_path / "a" / "two")

    async def scene(env: Environment) -> None:
        data = b"".join([chunk async for chunk in env.files.read_tar(tmp_path / "a")])
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(tmp_path / "b", filter="data")
        done = await env.files.write_tar(data, tmp_path / "c")
        assert done.left_out == ()
        # Over the files that are there, straight from the machine.
        again = await env.files.write_tar(env.files.read_tar(tmp_path / "a"), tmp_path / "c")
        assert (again.files, again.directories, again.links) == (
            done.files,
            done.directories,
            done.links,
        )
        with pytest.raises(NotFound):
            _ = [chunk async for chunk in env.files.read_tar(tmp_path / "none")]

    there.play(scene)
    assert tree(tmp_path / "c") == tree(tmp_path / "b")


def _link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


def _archive(*members: tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as file:
        for info in members:
            file.addfile(info, io.BytesIO(bytes(info.size)))
    return made.getvalue()


def test_a_hostile_archive_writes_nothing_outside(there: ClientTarget, tmp_path: Path) -> None:
    top = tmp_path / "top"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"mine")

    async def scene(env: Environment) -> None:
        for members in (
            [tarfile.TarInfo("../out/x")],
            [_link("l", "../out"), tarfile.TarInfo("l/x")],
            [_link("l", "."), tarfile.TarInfo("l/x")],
            [_link("l", str(tmp_path / "out"))],
        ):
            with pytest.raises(InvalidRequest, match="of the archive is refused"):
                await env.files.write_tar(_archive(*members), top)
        top.mkdir(exist_ok=True)
        (top / "way").symlink_to(tmp_path / "out")
        (top / "file").symlink_to(tmp_path / "out" / "mine")
        with pytest.raises(InvalidRequest, match="'way' is a symlink"):
            await env.files.write_tar(_archive(tarfile.TarInfo("way/mine")), top)
        await env.files.write_tar(_archive(tarfile.TarInfo("/file")), top)
        assert not (top / "file").is_symlink()

    there.play(scene)
    assert os.listdir(tmp_path / "out") == ["mine"]
    assert (tmp_path / "out" / "mine").read_bytes() == b"mine"


def test_a_sandbox_confines_archives(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"1")

    async def scene(env: Environment) -> None:
        files = env.files.sandboxed("read-only")
        data = b"".join([chunk async for chunk in files.read_tar(tmp_path / "d", exclude=["b"])])
        with pytest.raises(NotAllCopied) as raised:
            await files.write_tar(data, tmp_path / "d")
        assert isinstance(raised.value.transfer.failed[0].error, SandboxDenied)
        async for _ in files.read_tar(tmp_path / "d"):
            break  # the command is ended

    ours.play(scene)


def test_archives_without_async(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "d" / "skip").mkdir(parents=True)
    (tmp_path / "d" / "a").write_bytes(b"1")
    (tmp_path / "d" / "large").write_bytes(bytes(3_000_000))
    with sync.connect(ours.url) as env:
        chunks = list(env.files.read_tar(tmp_path / "d", exclude=["skip"]))
        assert env.files.write_tar(chunks, tmp_path / "e").copied_bytes == 3_000_001
        assert sorted(os.listdir(tmp_path / "e")) == ["a", "large"]
        next(env.files.read_tar(tmp_path / "d"))
