"""Append, rename, modes, links, times, edits and patches."""

from __future__ import annotations

import base64
import errno
import os
import stat
from pathlib import Path

import pytest
from tests.support.trees import do, fails, os_error, uri

from exec_server.errors import (
    EditNotFound,
    InvalidParams,
    InvalidRequest,
    NotFound,
    PatchDoesNotApply,
    RpcError,
)
from exec_server.filesystem import changes
from exec_server.patching import hunks
from exec_server.protocol import files as wire

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def append(path: str, data: bytes) -> wire.AppendParams:
    return wire.AppendParams(uri(path), base64.b64encode(data).decode())


def rename(old: str, new: str, *, replace: bool = True) -> wire.RenameParams:
    return wire.RenameParams(uri(old), uri(new), replace)


def edit(path: str, *edits: tuple[str, str]) -> wire.EditParams:
    return wire.EditParams(uri(path), [wire.TextEdit(old, new) for old, new in edits])


def patch(*lines: str) -> wire.ApplyPatchParams:
    return wire.ApplyPatchParams(uri("."), "\n".join(["*** Begin Patch", *lines, "*** End Patch"]))


# ---- append ---------------------------------------------------------------------------


def test_append_creates_a_file_and_adds_to_it(folder: Path) -> None:
    assert do(append("f", b"one")) == wire.AppendResult(3)
    assert do(append("f", b"two")) == wire.AppendResult(6)
    assert (folder / "f").read_bytes() == b"onetwo"


def test_append_follows_links(folder: Path) -> None:
    (folder / "link").symlink_to("target")
    do(append("link", b"x"))
    assert (folder / "target").read_bytes() == b"x"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_append_needs_a_regular_file(make: object, folder: Path) -> None:
    make("other")  # type: ignore[operator]
    with pytest.raises(RpcError, match=r"is not a file|Is a directory"):
        do(append("other", b"x"))


# ---- rename ---------------------------------------------------------------------------


def test_rename_replaces_unless_told_otherwise(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    fails(rename("a", "b", replace=False), os_error(errno.EEXIST))
    assert (folder / "a").exists()
    do(rename("a", "b"))
    assert (folder / "b").read_text() == "a"
    do(rename("b", "c", replace=False))
    assert sorted(os.listdir()) == ["c"]


def test_rename_moves_a_link_itself(folder: Path) -> None:
    (folder / "link").symlink_to("missing")
    do(rename("link", "moved"))
    assert os.readlink("moved") == "missing"


def test_rename_of_a_missing_file() -> None:
    with pytest.raises(NotFound):
        do(rename("a", "b"))


def test_without_renameat2_an_existing_name_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_server.filesystem.syscalls._HAS_RENAMEAT2", False)
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    fails(rename("a", "b", replace=False), os_error(errno.EEXIST))
    do(rename("a", "c", replace=False))
    assert sorted(os.listdir()) == ["b", "c"]


# ---- attributes and links -------------------------------------------------------------


def test_chmod(folder: Path) -> None:
    (folder / "f").touch()
    do(wire.ChmodParams(uri("f"), 0o750))
    assert stat.S_IMODE((folder / "f").stat().st_mode) == 0o750
    with pytest.raises(InvalidParams, match="mode 0o100644 has bits beyond 0o7777"):
        do(wire.ChmodParams(uri("f"), 0o100644))


def test_symlink_does_not_replace(folder: Path) -> None:
    do(wire.SymlinkParams(uri("link"), "../target"))
    assert os.readlink("link") == "../target"
    fails(wire.SymlinkParams(uri("link"), "other"), os_error(errno.EEXIST))
    with pytest.raises(InvalidParams):
        do(wire.SymlinkParams(uri("empty"), ""))


def test_times_are_set_and_files_created(folder: Path) -> None:
    do(wire.SetTimesParams(uri("f"), 1_000, 2_000, create=True))
    info = (folder / "f").stat()
    assert (info.st_mtime, info.st_atime, info.st_size) == (1.0, 2.0, 0)
    do(wire.SetTimesParams(uri("f"), 1_000, 2_000, modified_ns=999_999))
    assert (folder / "f").stat().st_mtime_ns == 1_000_999_999
    with pytest.raises(InvalidParams, match="modifiedNs must be below 1000000"):
        do(wire.SetTimesParams(uri("f"), 1_000, modified_ns=1_000_000))
    do(wire.SetTimesParams(uri("f")))
    assert (folder / "f").stat().st_mtime > 1.0
    with pytest.raises(NotFound):
        do(wire.SetTimesParams(uri("missing")))


def test_times_of_a_directory(folder: Path) -> None:
    do(wire.SetTimesParams(uri("."), 5_000, create=True))
    assert folder.stat().st_mtime == 5.0


# ---- edits ----------------------------------------------------------------------------


def test_edits_keep_the_inode_and_the_mode(folder: Path) -> None:
    file = folder / "f"
    file.write_bytes(b"\xff one two")
    file.chmod(0o755)
    inode = file.stat().st_ino
    assert do(edit("f", ("one", "1"), ("two", "a longer text"))) == wire.EditResult(2)
    assert file.read_bytes() == b"\xff 1 a longer text"
    assert (file.stat().st_ino, stat.S_IMODE(file.stat().st_mode)) == (inode, 0o755)


def test_no_edit_is_made_if_one_fails(folder: Path) -> None:
    (folder / "f").write_text("one two")
    with pytest.raises(EditNotFound, match="edit 2 of 2"):
        do(edit("f", ("one", "1"), ("three", "3")))
    assert (folder / "f").read_text() == "one two"


def test_edits_need_a_file_of_bounded_size(folder: Path) -> None:
    with pytest.raises(RpcError, match="Is a directory"):
        do(edit(".", ("a", "b")))
    with pytest.raises(InvalidParams, match="must not be empty"):
        do(edit("f"))
    with open("large", "wb") as file:
        file.truncate(changes.TEXT_BYTES + 1)
    with pytest.raises(InvalidParams, match="too large to edit"):
        do(edit("large", ("a", "b")))


# ---- patches --------------------------------------------------------------------------


def test_a_patch_changes_several_files(folder: Path) -> None:
    (folder / "old").write_text("a\nb\n")
    (folder / "old").chmod(0o755)
    (folder / "gone").write_text("x")
    result = do(
        patch(
            "*** Add File: new/deep/file",
            "+text",
            "*** Update File: old",
            "@@",
            " a",
            "-b",
            "+c",
            "*** Delete File: gone",
        )
    )
    assert result == wire.ApplyPatchResult(
        [
            wire.ChangedFile("new/deep/file", "added"),
            wire.ChangedFile("old", "modified"),
            wire.ChangedFile("gone", "deleted"),
        ]
    )
    assert (folder / "new/deep/file").read_text() == "text\n"
    assert (folder / "old").read_text() == "a\nc\n"
    assert stat.S_IMODE((folder / "old").stat().st_mode) == 0o755
    assert not (folder / "gone").exists()


def test_a_patch_that_does_not_fit_changes_nothing(folder: Path) -> None:
    (folder / "f").write_text("a\n")
    with pytest.raises(PatchDoesNotApply, match="hunk 1 does not fit f"):
        do(patch("*** Add File: new", "+x", "*** Update File: f", "@@", "-b", "+c"))
    assert os.listdir() == ["f"]


def test_a_failed_write_undoes_the_earlier_ones(folder: Path) -> None:
    (folder / "a").write_text("a\n")
    (folder / "a").chmod(0o751)
    (folder / "gone").write_text("g")
    (folder / "blocked").write_text("in the way of a directory")
    with pytest.raises(RpcError, match="Not a directory"):
        do(
            patch(
                "*** Update File: a",
                "@@",
                "-a",
                "+b",
                "*** Delete File: gone",
                "*** Add File: made/deep/file",
                "+x",
                "*** Add File: blocked/x",
                "+x",
            )
        )
    assert sorted(os.listdir()) == ["a", "blocked", "gone"]
    assert (folder / "a").read_text() == "a\n"
    assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o751
    assert (folder / "gone").read_text() == "g"


def test_a_patch_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "PATCH_FILES", 1)
    with pytest.raises(InvalidParams, match="at most 1 files"):
        do(patch("*** Add File: a", "+x", "*** Add File: b", "+x"))
    monkeypatch.setattr(changes, "PATCH_BYTES", 3)
    (folder / "f").write_text("four")
    with pytest.raises(InvalidParams, match="larger than 3 bytes"):
        do(patch("*** Delete File: f"))
    with monkeypatch.context() as patched:
        patched.setattr(hunks, "SECONDS", -1.0)
        with pytest.raises(InvalidRequest, match="processor time"):
            do(edit("f", ("four", "five")))
        patched.setattr(changes, "PATCH_BYTES", 4)
        with pytest.raises(InvalidRequest, match="processor time"):
            do(patch("*** Update File: f", "-four", "+five"))
    monkeypatch.setattr(changes, "TEXT_BYTES", 50)
    with pytest.raises(InvalidParams, match="the patch is larger than 50 characters"):
        do(patch("*** Add File: a", "+" + "x" * 50))


def test_a_patch_follows_links(folder: Path) -> None:
    (folder / "f").write_text("a\n")
    (folder / "root").mkdir()
    (folder / "root/up").symlink_to("..")
    text = "--- a/up/f\n+++ b/up/f\n@@ -1 +1 @@\n-a\n+b\n"
    assert do(wire.ApplyPatchParams(uri("root"), text)) == wire.ApplyPatchResult(
        [wire.ChangedFile("up/f", "modified")]
    )
    assert (folder / "f").read_text() == "b\n"


def test_a_patch_does_not_leave_its_root(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="outside of the root"):
        do(patch("*** Add File: ../x", "+x"))
