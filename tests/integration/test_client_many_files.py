"""Many files at a time with real servers; ours and the reference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.client_targets import ClientTarget

from exec_server import Environment, IsADirectory, NotAllCopied, NotFound, SandboxDenied, sync

pytestmark = pytest.mark.quick


def test_many_files_there_and_back(there: ClientTarget, tmp_path: Path) -> None:
    files = {f"{tmp_path}/{number % 7}/{number}": os.urandom(number) for number in range(150)}
    large = f"{tmp_path}/large"
    files[large] = os.urandom(300_000)

    async def scene(env: Environment) -> None:
        done = await env.files.write_many(files, parents=True)
        assert (done.files, done.copied_bytes) == (151, sum(map(len, files.values())))
        (tmp_path / "none").symlink_to("nowhere")
        paths = [*files, f"{tmp_path}/none", str(tmp_path)]
        found = await env.files.read_many(paths, check=False)
        assert {each.path: each.data for each in found[:-2]} == files
        assert [type(each.error) for each in found[-2:]] == [NotFound, IsADirectory]
        with pytest.raises(NotAllCopied) as raised:
            await env.files.write_many({f"{tmp_path}/new": b"1", str(tmp_path): b"2"})
        assert [each.path for each in raised.value.transfer.failed] == [str(tmp_path)]
        assert (tmp_path / "new").read_bytes() == b"1"

    there.play(scene)


def test_a_sandbox_confines_them(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")

    async def scene(env: Environment) -> None:
        files = env.files.sandboxed("read-only")
        paths = [f"{tmp_path}/a", f"{tmp_path}/b"]
        done = await files.write_many(dict.fromkeys(paths, b"3"), parents=True, check=False)
        assert [(each.path, type(each.error)) for each in done.failed] == [
            (path, SandboxDenied) for path in paths
        ]
        assert [each.data for each in await files.read_many(paths)] == [b"1", b"2"]

    ours.play(scene)


def test_many_files_without_async(ours: ClientTarget, tmp_path: Path) -> None:
    with sync.connect(ours.url) as env:
        assert env.files.write_many([(tmp_path / "a", b"1"), (tmp_path / "b", b"2")]).files == 2
        found = env.files.read_many([tmp_path / "b", tmp_path / "a"])
        assert [each.data for each in found] == [b"2", b"1"]
