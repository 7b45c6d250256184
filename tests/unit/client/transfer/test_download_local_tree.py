"""The local side of a download: nothing is written through a symlink, whenever it was made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exec_server.client.transfer import download
from exec_server.client.transfer.download import LocalTree, Part
from exec_server.client.transfer.local_directory import IS_SYMLINK
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.plan import part_path


def item(path: str, kind: str = "f", mode: int | None = None, target: str = "") -> Item:
    return Item(path, kind, mode, 4, "1", target)


@contextmanager
def opened(top: Path | str, *, is_directory: bool = True) -> Iterator[LocalTree]:
    tree = LocalTree(str(top), is_directory=is_directory)
    tree.open()
    try:
        yield tree
    finally:
        tree.close()


def make(tree: LocalTree, *paths: str) -> dict[str, str | None]:
    """Make directories; returns the errors."""
    failed: dict[str, str | None] = {}
    items = iter([item(path, "d") for path in paths])
    tree.make_directories(items, lambda path, error: failed.update({path: error.strerror}))
    return failed


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory that a server wants to write to; it stays as it is."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "file").write_text("mine")
    yield place
    assert os.listdir(place) == ["file"]
    assert (place / "file").read_text() == "mine"
    assert place.stat().st_mode & 0o777 == 0o755


# ---- links in the way -----------------------------------------------------------------


def test_a_link_at_the_top_is_not_followed(tmp_path: Path, elsewhere: Path) -> None:
    top = tmp_path / "top"
    top.symlink_to(elsewhere)
    with opened(top) as tree:
        assert make(tree, "", "d") == {"": IS_SYMLINK}
        for change in (
            lambda: tree.write_file(item("x"), b"evil"),
            lambda: tree.open_part(item("x")),
            lambda: tree.place_part(item("x")),
            lambda: tree.remove_part(item("file")),
        ):
            with pytest.raises(OSError, match=IS_SYMLINK) as error:
                change()
            assert error.value.filename.startswith(str(top))
        failed: list[str] = []
        links = iter([item("x", "l", target="/etc")])
        tree.make_symlinks(links, lambda path, error: failed.append(path))
        assert failed == ["x"]
        assert tree.set_modes(iter([item("", "d", 0o700)])) != []


@pytest.mark.parametrize("end", ["/", "/.", "/./"])
def test_a_link_that_the_caller_follows_is_followed(tmp_path: Path, end: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "top").symlink_to("real")
    with opened(f"{tmp_path}/top{end}") as tree:
        assert make(tree, "", "d") == {}
        tree.write_file(item("d/x"), b"data")
    assert (tmp_path / "real" / "d" / "x").read_bytes() == b"data"


def test_a_file_replaces_a_link_at_the_top(tmp_path: Path, elsewhere: Path) -> None:
    top = tmp_path / "top"
    top.symlink_to(elsewhere / "file")
    with opened(top, is_directory=False) as tree:
        tree.write_file(item("", mode=0o640), b"data")
    assert not top.is_symlink()
    assert top.read_bytes() == b"data"


def test_links_inside_of_the_tree_are_not_followed(tmp_path: Path, elsewhere: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (top / "d").symlink_to(elsewhere)
    (top / "file").symlink_to(elsewhere / "file")
    with opened(top) as tree:
        assert make(tree, "", "d", "d/below") == {"d": IS_SYMLINK}
        with pytest.raises(OSError, match=IS_SYMLINK):
            tree.write_file(item("d/file"), b"evil")
        tree.write_file(item("file"), b"data")
    assert (top / "file").read_bytes() == b"data"
    assert not (top / "file").is_symlink()


def test_a_directory_that_becomes_a_link_is_not_followed(tmp_path: Path, elsewhere: Path) -> None:
    top = tmp_path / "top"
    with opened(top) as tree:
        assert make(tree, "", "d") == {}
        part = tree.open_part(item("d/file"))
        os.write(part, b"evil")
        os.close(part)
        (top / "d").rename(top / "moved")
        (top / "d").symlink_to(elsewhere)
        for change in (tree.place_part, tree.remove_part):
            with pytest.raises(OSError, match=IS_SYMLINK):
                change(item("d/file"))
        assert tree.set_modes(iter([item("d", "d", 0o777)])) != []


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
def test_a_temporary_name_in_use_is_refused(tmp_path: Path, elsewhere: Path, kind: str) -> None:
    """An earlier download may have made a link under the name of the temporary file."""
    top = tmp_path / "top"
    top.mkdir()
    part = top / part_path("x", item("x"))
    if kind == "link":
        part.symlink_to(elsewhere / "file")
    elif kind == "hard link":
        part.hardlink_to(elsewhere / "file")
    else:
        os.mkfifo(part)
    with opened(top) as tree, pytest.raises(OSError, match=r"too many|Too many|not a file of"):
        tree.write_file(item("x"), b"evil")
    assert part.exists()
    part.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
def test_a_temporary_file_of_another_user_is_refused(tmp_path: Path) -> None:
    part = tmp_path / part_path("x", item("x"))
    part.write_bytes(b"")
    os.chown(part, 12345, -1)
    with opened(tmp_path) as tree, pytest.raises(FileExistsError, match="not a file of this user"):
        tree.write_file(item("x"), b"data")


# ---- directories ----------------------------------------------------------------------


def test_directories_below_a_failed_one_are_not_made(tmp_path: Path) -> None:
    top = tmp_path / "new" / "top"
    (tmp_path / "new").mkdir()
    top.mkdir()
    (top / "file").write_text("")
    with opened(top) as tree:
        assert make(tree, "", "a", "a/b", "file", "file/c") == {"file": "File exists"}
    assert (top / "a" / "b").is_dir()


def test_directories_above_a_tree_are_made(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b" / "top") as tree:
        assert make(tree, "") == {}
    assert (tmp_path / "a" / "b" / "top").is_dir()
    with opened(f"{tmp_path}/new/") as tree:
        assert make(tree, "") == {}
    assert (tmp_path / "new").is_dir()
    with pytest.raises(FileNotFoundError) as error:
        LocalTree(str(tmp_path / "no" / "file"), is_directory=False).open()
    assert error.value.filename == str(tmp_path / "no" / "file")


def test_relative_paths_start_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for top, path in (("name", "name"), (".", "."), ("./x/..", ".")):
        (tmp_path / "x").mkdir(exist_ok=True)
        with opened(top) as tree:
            assert make(tree, "", "d") == {}
        assert (tmp_path / path / "d").is_dir()


def test_modes_are_set(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with opened(tmp_path) as tree:
        items = [item("c", "d", 0o700), item("a/b", "d", 0o700), item("a", "d", 0o500), item("")]
        assert tree.set_modes(iter(items)) == [f"modes: {tmp_path}/c: No such file or directory"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o500
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_nothing_is_done_after_the_end(tmp_path: Path) -> None:
    """A thread may go on after its caller was cancelled."""
    tree = LocalTree(str(tmp_path), is_directory=True)
    tree.open()
    tree.close()
    tree.close()
    with pytest.raises(OSError, match="canceled"):
        tree.write_file(item("x"), b"late")
    late = LocalTree(str(tmp_path / "late"), is_directory=True)
    late.close()
    late.open()
    assert os.listdir(tmp_path) == []


# ---- files ----------------------------------------------------------------------------


def test_a_small_file_replaces_another(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / part_path("x", item("x"))).write_bytes(b"longer than before")
    with opened(tmp_path) as tree:
        tree.write_file(item("x", mode=0o640), b"data")
    assert (tmp_path / "x").read_bytes() == b"data"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["x"]


def test_nothing_is_left_of_a_file_that_cannot_be_placed(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with opened(tmp_path) as tree:
        with pytest.raises(IsADirectoryError) as error:
            tree.write_file(item("x"), b"data")
        assert error.value.filename == str(tmp_path / "x")
        os.close(tree.open_part(item("x")))
        with pytest.raises(IsADirectoryError):
            tree.place_part(item("x"))
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("is_link", [False, True])
def test_special_files_are_not_replaced(tmp_path: Path, is_link: bool) -> None:
    """Root would replace /dev/null by a file."""
    top = tmp_path / "device"
    os.mkfifo(tmp_path / "fifo")
    top.symlink_to("fifo") if is_link else top.hardlink_to(tmp_path / "fifo")
    with opened(top, is_directory=False) as tree, pytest.raises(OSError, match="neither file"):
        tree.write_file(item(""), b"data")
    assert top.is_fifo()


def test_entries_with_one_name_are_noticed(tmp_path: Path) -> None:
    """On a file system that ignores case, where `x` and `X` are one file."""
    tree = LocalTree(str(tmp_path), is_directory=True, is_ambiguous=lambda path: path in "xX")
    tree.open()
    tree.write_file(item("x"), b"one")
    with pytest.raises(FileExistsError, match="the same name on this file system"):
        tree.write_file(item("x"), b"two")
    tree.write_file(item("X"), b"other")
    tree.close()
    assert (tmp_path / "x").read_bytes() == b"one"


def test_links_replace_files_and_no_directories(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    failed: dict[str, object] = {}
    items = [item(name, "l", target="to") for name in ("file", "directory", "new")]
    with opened(tmp_path) as tree:
        tree.make_symlinks(iter(items), lambda path, error: failed.update({path: error.filename}))
    assert failed == {"directory": str(tmp_path / "directory")}
    assert [os.readlink(tmp_path / name) for name in ("file", "new")] == ["to", "to"]


# ---- temporary files ------------------------------------------------------------------


def test_a_temporary_file_is_not_used_after_it_was_closed(tmp_path: Path) -> None:
    with opened(tmp_path) as tree:
        path = tmp_path / part_path("x", item("x", mode=0o644))
        part = Part(tree, item("x", mode=0o644))
        part.open()
        assert path.stat().st_mode & 0o777 == 0o600
        part.close()
        assert not path.exists()  # it was empty
        part.write(b"late", 0)
        again = Part(tree, item("x"))
        again.close()
        again.open()
        assert not path.exists()


def test_a_temporary_file_is_kept_to_continue(tmp_path: Path) -> None:
    with opened(tmp_path) as tree:
        part = Part(tree, item("x"))
        part.open()
        part.write(b"cd", 2)
        part.write(b"ab", 0)
        part.close()
        tree.place_part(item("x"))
        assert (tmp_path / "x").read_bytes() == b"abcd"
        tree.remove_part(item("x"))


# ---- small files together -------------------------------------------------------------


def test_small_files_are_written_together(tmp_path: Path, elsewhere: Path) -> None:
    top = tmp_path / "top"
    with opened(top) as tree:
        assert make(tree, "", "d", "d/e") == {}
        (top / "link").symlink_to(elsewhere)
        (top / "d" / "full").mkdir()
        (top / "d" / "full" / "x").touch()
        names = ["a", "d/b", "d/full", "d/e/c", "link/file", "missing/x", "f"]
        files = [(item(name, mode=0o640), name.encode()) for name in names]
        written = tree.write_files(files)
    assert [each.path for each in written] == ["a", "d/b", "d/e/c", "f"]
    for each in written:
        assert (top / each.path).read_text() == each.path
        assert (top / each.path).stat().st_mode & 0o777 == 0o640
    assert not list(top.rglob("*.part"))


def test_a_closed_tree_writes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "top") as tree:
        assert make(tree, "") == {}
    assert tree.write_files([(item("a"), b"a")]) == []


def test_what_a_killed_download_has_left_is_replaced(tmp_path: Path) -> None:
    with opened(tmp_path) as tree:
        left = tmp_path / part_path("a", item("a"))
        left.write_bytes(b"a part of a longer file")
        assert tree.write_files([(item("a"), b"new")]) == [item("a")]
    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_only_directories_that_were_there_before_have_entries_to_protect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "NEW_DIRECTORIES", 2)
    top = tmp_path / "top"
    (top / "old").mkdir(parents=True)
    with opened(top) as tree:
        assert make(tree, "", "old", "one", "two", "three") == {}
        for name in ("old", "one", "two", "three"):
            os.mkfifo(top / name / "pipe")  # a race, where the directory was made by the download
        names = ["old/pipe", "one/pipe", "two/pipe", "three/pipe"]
        written = tree.write_files([(item(name), b"data") for name in names])
    assert [each.path for each in written] == ["one/pipe", "two/pipe"]
    assert (top / "old" / "pipe").is_fifo()
    assert (top / "three" / "pipe").is_fifo()


def test_entries_with_one_name_are_noticed_in_new_directories(tmp_path: Path) -> None:
    tree = LocalTree(str(tmp_path / "t"), is_directory=True, is_ambiguous=lambda path: True)
    tree.open()
    assert make(tree, "") == {}
    files = [(item("x"), b"one"), (item("x"), b"two")]
    assert len(tree.write_files(files)) == 1
    tree.close()
    assert (tmp_path / "t" / "x").read_bytes() == b"one"
