"""Writing the files of a patch, and undoing it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exec_server.errors import PatchDoesNotApply
from exec_server.filesystem.changes import PATCH_DIRECTORIES, PatchWriter
from exec_server.patching.patch import PatchedFile

pytestmark = pytest.mark.quick


def test_nothing_is_undone_that_is_kept(tmp_path: Path) -> None:
    with PatchWriter() as writer:
        writer.write(PatchedFile(f"{tmp_path}/a/b", None, b"x", 0o751))
        writer.keep()
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o751


def test_a_renamed_file_keeps_its_mode(tmp_path: Path) -> None:
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("x")
    old.chmod(0o4600)
    link.symlink_to("old")
    (tmp_path / "b").write_text("y")
    with PatchWriter() as writer:
        writer.write(PatchedFile(f"{tmp_path}/first", None, b"x", renamed_from=f"{old}"))
        writer.write(PatchedFile(f"{link}", b"x", None))
        writer.write(PatchedFile(f"{tmp_path}/a", None, b"x", renamed_from=f"{link}"))
        writer.write(PatchedFile(f"{tmp_path}/b", b"y", b"x", renamed_from=f"{link}"))
        writer.keep()
    for name in ("first", "a", "b"):
        assert (tmp_path / name).stat().st_mode & 0o7777 == 0o600


def test_new_entries_are_removed_where_they_were_made(tmp_path: Path) -> None:
    """A command renames the directory and puts a link in its place before the undo."""
    (tmp_path / "protected").mkdir()
    (tmp_path / "protected/x").write_text("kept")
    (tmp_path / "d").mkdir()
    with PatchWriter() as writer:
        writer.write(PatchedFile(f"{tmp_path}/d/new/x", None, b"1"))
        os.rename(tmp_path / "d", tmp_path / "moved")
        os.symlink(".", tmp_path / "d")
        os.rename(tmp_path / "protected", tmp_path / "new")
    assert (tmp_path / "new/x").read_text() == "kept"
    assert os.listdir(tmp_path / "moved") == []


def test_an_entry_that_was_replaced_is_left_alone(tmp_path: Path) -> None:
    with PatchWriter() as writer:
        writer.write(PatchedFile(f"{tmp_path}/x", None, b"1"))
        (tmp_path / "other").write_text("2")
        os.replace(tmp_path / "other", tmp_path / "x")
    assert (tmp_path / "x").read_text() == "2"


def test_a_removed_link_comes_back_as_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("t")
    (tmp_path / "link").symlink_to("target")
    with PatchWriter() as writer:
        writer.write(PatchedFile(f"{tmp_path}/link", b"t", None))
        assert not (tmp_path / "link").exists()
    assert os.readlink(tmp_path / "link") == "target"


def test_a_dangling_link_is_not_a_place_for_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("missing")
    with pytest.raises(PatchDoesNotApply, match="leads nowhere"), PatchWriter() as writer:
        writer.write(PatchedFile(f"{tmp_path}/link", None, b"x"))
    assert os.listdir(tmp_path) == ["link"]


def test_overwritten_files_get_their_content_and_mode_back(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    (tmp_path / "y").write_text("y")
    with PatchWriter() as writer:
        writer.write(PatchedFile(f"{tmp_path}/x", b"old", b"new", 0o755))
        writer.write(PatchedFile(f"{tmp_path}/y", b"y", None))
        assert (tmp_path / "x").read_text() == "new"
    assert (tmp_path / "x").read_text() == "old"
    assert (tmp_path / "y").read_text() == "y"


def test_the_new_directories_of_all_files_are_bounded(tmp_path: Path) -> None:
    """Each one keeps a descriptor open until the end."""
    deep = "d/" * (PATCH_DIRECTORIES // 2 - 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    with PatchWriter() as writer:
        writer.write(PatchedFile(f"{tmp_path}/a/{deep}f", None, b"x"))
        writer.write(PatchedFile(f"{tmp_path}/b/{deep}f", None, b"x"))
        writer.write(PatchedFile(f"{tmp_path}/b/{deep}g", None, b"x"))
        with pytest.raises(PatchDoesNotApply, match="at most 256 directories"):
            writer.write(PatchedFile(f"{tmp_path}/c/d/e/f", None, b"x"))
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
