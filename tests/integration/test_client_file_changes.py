"""Append, rename, edits, patches and the rest, on both servers: the results are the same."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.support.client_targets import ClientTarget

from exec_server import (
    AlreadyExists,
    ChangedFile,
    EditAmbiguous,
    EditNotFound,
    Environment,
    IsADirectory,
    NotFound,
    PatchDoesNotApply,
    SandboxDenied,
    Unsupported,
)

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "f").write_text("one\ntwo\n")
    return tmp_path


def test_text_is_written_and_read(there: ClientTarget, folder: Path) -> None:
    async def scene(env: Environment) -> None:
        await env.files.write_text(folder / "a/b/text", "zwölf\r\n", parents=True)
        assert await env.files.read_text(os.fsencode(folder / "a/b/text")) == "zwölf\r\n"
        with pytest.raises(NotFound):
            await env.files.write_text(folder / "none/x", "x")
        with pytest.raises(TypeError, match=r"write_text\(\)"):
            await env.files.write(folder / "x", "text")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"a path must be str, bytes or os.PathLike, not int"):
            await env.files.read(7)  # type: ignore[arg-type]
        with pytest.raises(IsADirectory):
            await env.files.read(folder)

    there.play(scene)


def test_files_are_changed(there: ClientTarget, folder: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files
        await files.append(folder / "log", b"a")
        await files.append(folder / "log", b"b")
        assert (folder / "log").read_bytes() == b"ab"
        await files.rename(folder / "log", folder / "moved")
        await files.chmod(folder / "moved", 0o741)
        await files.touch(folder / "moved", modified=1.5, accessed=2.5)
        info = (folder / "moved").stat()
        assert (stat.S_IMODE(info.st_mode), info.st_mtime, info.st_atime) == (0o741, 1.5, 2.5)
        await files.touch(folder / "new")
        assert (folder / "new").read_bytes() == b""
        await files.symlink("moved", folder / "link")
        assert os.readlink(folder / "link") == "moved"
        usage = await files.disk_usage(folder)
        assert 0 < usage.available <= usage.free <= usage.total

    there.play(scene)


def test_errors_have_their_classes(there: ClientTarget, folder: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files
        with pytest.raises(NotFound) as missing:
            await files.rename(folder / "none", folder / "x")
        assert missing.value.errno == 2
        with pytest.raises(NotFound):
            await files.chmod(folder / "none", 0o600)
        with pytest.raises(AlreadyExists):
            await files.symlink("x", folder / "f")
        with pytest.raises(IsADirectory):
            await files.append(folder, b"x")

    there.play(scene)


def test_a_rename_may_be_exclusive(there: ClientTarget, folder: Path) -> None:
    async def scene(env: Environment) -> None:
        (folder / "other").touch()
        expected = AlreadyExists if env.capabilities.fs_rename else Unsupported
        with pytest.raises(expected):
            await env.files.rename(folder / "f", folder / "other", replace=False)

    there.play(scene)


def test_globs(there: ClientTarget, folder: Path) -> None:
    (folder / "d").mkdir()
    (folder / "d/x.py").touch()

    async def scene(env: Environment) -> None:
        if not env.capabilities.fs_glob:
            with pytest.raises(Unsupported, match="fsGlob"):
                await env.files.glob("*")
            return
        found = await env.files.glob("**/*.py", folder)
        assert (found, found.truncated) == (["d/x.py"], False)
        assert (await env.files.glob("*", folder, limit=1)).truncated

    there.play(scene)


def test_edits(there: ClientTarget, folder: Path) -> None:
    async def scene(env: Environment) -> None:
        file = folder / "f"
        assert await env.files.edit(file, "one", "1") == 1
        assert await env.files.edit(file, [("1", "eins"), ("two", "zwei")]) == 2
        assert file.read_text() == "eins\nzwei\n"
        with pytest.raises(EditAmbiguous, match="f: the old text occurs 2 times") as raised:
            await env.files.edit(file, "e", "x")
        assert (raised.value.count, raised.value.lines) == (2, (1, 2))
        assert await env.files.edit(file, "e", "x", all=True) == 2
        with pytest.raises(EditNotFound, match="does not occur"):
            await env.files.edit(file, [("xins", "y"), ("missing", "z")])
        assert file.read_text() == "xins\nzwxi\n"
        with pytest.raises(TypeError, match="needs the new text"):
            await env.files.edit(file, "x")
        file.write_bytes(b"if a:  \r\n    b\r\n")
        assert await env.files.edit(file, "if a:\n    b\n", "if a:\n    c\n    d\n") == 1
        assert file.read_bytes() == b"if a:  \r\n    c\r\n    d\r\n"

    there.play(scene)


def test_patches(there: ClientTarget, folder: Path) -> None:
    codex = (
        "*** Begin Patch\n*** Update File: f\n*** Move to: g\n@@\n one\n-two\n+2\n"
        "*** Add File: new/file\n+text\n*** End Patch"
    )
    diff = "--- a/g\n+++ b/g\n@@ -1,2 +1,2 @@\n-one\n+1\n 2\n"

    (folder / "f").chmod(0o600)

    async def scene(env: Environment) -> None:
        assert await env.files.apply_patch(codex, folder) == [
            ChangedFile("f", "deleted"),
            ChangedFile("g", "added"),
            ChangedFile("new/file", "added"),
        ]
        assert await env.files.apply_patch(diff, folder) == [ChangedFile("g", "modified")]
        assert (folder / "g").read_text() == "1\n2\n"
        assert (folder / "g").stat().st_mode & 0o777 == 0o600
        with pytest.raises(PatchDoesNotApply, match="hunk 1 does not fit g"):
            await env.files.apply_patch(diff, folder)
        bare = "--- a/g\n+++ b/g\n@@\n-1\n+one\n 2\n"
        assert await env.files.apply_patch(bare, folder) == [ChangedFile("g", "modified")]
        wrong = "--- a/g\n+++ b/g\n@@ -7,9 +7,2 @@\n-one\n+1\n"
        assert await env.files.apply_patch(wrong, folder) == [ChangedFile("g", "modified")]
        assert (folder / "g").read_text() == "1\n2\n"
        with pytest.raises(PatchDoesNotApply, match="outside of the root"):
            await env.files.apply_patch(diff.replace("/g", "/../g"), folder)
        added = "--- /dev/null\n+++ b/.//g\n@@ -0,0 +1 @@\n+new\n"
        with pytest.raises(PatchDoesNotApply, match="g already exists"):
            await env.files.apply_patch(added, folder)
        absolute = f"*** Begin Patch\n*** Update File: {folder}/g\n@@\n-1\n+one\n*** End Patch"
        assert await env.files.apply_patch(absolute, folder) == [ChangedFile("g", "modified")]
        assert (folder / "g").read_text() == "one\n2\n"

    there.play(scene)


def test_a_sandbox_limits_changes(there: ClientTarget, folder: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files.sandboxed("read-only")
        for work in (
            files.append(folder / "f", b"x"),
            files.rename(folder / "f", folder / "g"),
            files.chmod(folder / "f", 0o600),
            files.symlink("x", folder / "link"),
            files.touch(folder / "f"),
            files.edit(folder / "f", "one", "1"),
            files.apply_patch("*** Begin Patch\n*** Delete File: f\n*** End Patch", folder),
        ):
            with pytest.raises(SandboxDenied):
                await work
        assert (folder / "f").read_text() == "one\ntwo\n"

    there.play(scene)
