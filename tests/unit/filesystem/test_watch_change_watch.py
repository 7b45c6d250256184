"""ChangeWatch against the kernel: events, new and moved directories, limits, hidden paths."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from exec_server.errors import InvalidRequest
from exec_server.filesystem import watch as module
from exec_server.filesystem.inotify import Inotify
from exec_server.filesystem.watch import Batch, ChangeWatch, GatheredChanges


@pytest.fixture
def inotify(monkeypatch: pytest.MonkeyPatch) -> Iterator[Inotify]:
    loop = SimpleNamespace(
        call_soon_threadsafe=lambda callback: callback(),
        add_reader=lambda *_: None,
        remove_reader=lambda *_: None,
    )
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    instance = Inotify(lambda function: function())
    yield instance
    instance.close()


class Watched:
    """A watch of a folder, whose events are read when the test asks."""

    def __init__(
        self,
        inotify: Inotify,
        root: Path,
        *,
        recursive: bool = True,
        visible: Callable[[Sequence[str]], Sequence[str]] | None = None,
    ) -> None:
        self.inotify = inotify
        self.watch = ChangeWatch(inotify, is_recursive=recursive)
        self.watch.open(str(root), visible)

    def batch(self) -> Batch:
        self.inotify.read_events()
        batch = self.watch.take()
        return self.watch.settle(batch) if self.watch.needs_thread(batch) else batch

    def changes(self) -> dict[str, str]:
        return {change.path: change.kind for change in self.batch().on_wire()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/sub/deep").mkdir(parents=True)
    (tmp_path / "root/f").write_text("x")
    return tmp_path / "root"


# ---- gathering ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["created", "modified"], "created"),
        (["created", "deleted"], None),
        (["deleted", "created"], "modified"),
        (["modified", "deleted"], "deleted"),
        (["modified", "modified"], "modified"),
    ],
)
def test_changes_of_a_path_are_one_change(kinds: list[str], expected: str | None) -> None:
    changes = GatheredChanges()
    for kind in kinds:
        changes.add("p", kind)  # type: ignore[arg-type]
    assert changes.take() == ({} if expected is None else {"p": expected}, False)


def test_too_many_changes_are_an_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHANGES", 2)
    changes = GatheredChanges()
    for name in "abcd":
        changes.add(name, "created")
    assert changes.take() == ({"d": "created"}, True)
    assert changes.take() == ({}, False)


# ---- events ---------------------------------------------------------------------------


def test_entries_of_a_directory(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root, recursive=False)
    assert not watched.watch.wake.is_set()
    (root / "f").write_text("y")
    (root / "new").mkdir()
    (root / "new/unseen").touch()
    (root / "sub/unseen").touch()
    inotify.read_events()
    assert watched.watch.wake.is_set()
    assert watched.changes() == {"f": "modified", "new": "created"}
    assert not watched.watch.wake.is_set()
    (root / "f").rename(root / "g")
    assert watched.changes() == {"f": "deleted", "g": "created"}


def test_directories_below_are_followed(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root)
    (root / "sub/deep/a").touch()
    (root / "new/er").mkdir(parents=True)
    (root / "new/er/b").touch()
    assert watched.changes() == {
        "sub/deep/a": "created",
        "new": "created",
        "new/er": "created",
        "new/er/b": "created",
    }
    (root / "new/er/b").write_text("x")
    assert watched.changes() == {"new/er/b": "modified"}


def test_a_moved_directory_has_its_new_path(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root)
    (root / "sub").rename(root / "other")
    (root / "other/deep/a").touch()
    assert watched.changes() == {
        "sub": "deleted",
        "other": "created",
        "other/deep": "created",
        "other/deep/a": "created",
    }
    (root / "other/deep/a").unlink()
    assert watched.changes() == {"other/deep/a": "deleted"}


def test_a_directory_that_is_moved_away_is_not_reported(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root)
    (root / "sub").rename(root.parent / "away")
    (root.parent / "away/deep/a").touch()
    assert watched.changes() == {"sub": "deleted"}
    assert watched.watch.directories.names() == [""]


def test_a_directory_that_is_moved_while_it_is_added(
    inotify: Inotify, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(inotify, root)
    (root / "new").mkdir()
    listen = inotify.listen

    def move_and_listen(*arguments: object) -> int:
        (root / "new").rename(root.parent / "away")
        return listen(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(inotify, "listen", move_and_listen)
    assert watched.changes() == {"new": "created"}
    monkeypatch.undo()
    (root.parent / "away/a").touch()
    assert watched.changes() == {"new": "deleted"}
    assert "new/" not in watched.watch.directories.names()


def test_a_new_directory_that_is_gone_is_skipped(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root)
    (root / "new").mkdir()
    inotify.read_events()
    batch = watched.watch.take()
    (root / "new").rmdir()
    assert watched.watch.settle(batch).changes == {"new": "created"}


def test_the_end_of_the_root_ends_the_watch(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root, recursive=False)
    root.rename(root.parent / "moved")
    inotify.read_events()
    assert watched.watch.has_ended
    assert watched.watch.wake.is_set()
    other = Watched(inotify, root.parent / "moved/sub/deep")
    (root.parent / "moved/sub/deep").rmdir()
    inotify.read_events()
    assert (other.watch.has_ended, other.watch.directories.names()) == (True, [])


def test_a_file_is_watched_by_its_name(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root / "f")
    (root / "g").write_text("y")
    assert watched.changes() == {}
    (root / "g").rename(root / "f")
    assert watched.changes() == {"f": "created"}


def test_names_that_are_not_utf8(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root)
    os.mkdir(os.fsencode(root) + b"/\xff")
    assert watched.changes() == {"\ufffd": "created"}


def test_dropped_events_are_an_overflow(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root)
    plain = Watched(inotify, root, recursive=False)
    (root / "late").mkdir()
    inotify._report(-1, 0x4000, b"")
    assert plain.watch.take() == Batch({}, True)
    batch = watched.watch.settle(watched.watch.take())
    assert batch == Batch({}, True)
    assert "late/" in watched.watch.directories.names()


def test_a_closed_watch_hears_nothing(inotify: Inotify, root: Path) -> None:
    watched = Watched(inotify, root)
    watched.watch.close()
    (root / "a").touch()
    assert watched.changes() == {}
    assert inotify._watches == {}


# ---- limits ---------------------------------------------------------------------------


def test_a_large_tree_is_refused(
    inotify: Inotify, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_DIRECTORIES", 2)
    with pytest.raises(InvalidRequest, match="watch a part of it"):
        Watched(inotify, root)
    watched = Watched(inotify, root / "sub")
    (root / "sub/more").mkdir()
    watched.batch()
    assert (watched.watch.has_ended, "watch a part" in str(watched.watch.error)) == (True, True)


def test_many_new_directories_end_the_watch(
    inotify: Inotify, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(inotify, root)
    monkeypatch.setattr(module, "MAX_DIRECTORIES", 0)
    (root / "new").mkdir()
    inotify.read_events()
    assert watched.watch.has_ended


def test_the_limits_of_the_machine_are_named(
    inotify: Inotify, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(inotify, root)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space")

    monkeypatch.setattr(inotify, "listen", refuse)
    with pytest.raises(InvalidRequest, match="max_user_watches"):
        Watched(inotify, root)
    (root / "new").mkdir()
    watched.batch()
    assert "max_user_watches" in str(watched.watch.error)


def test_a_root_that_cannot_be_watched(
    inotify: Inotify, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError):
        Watched(inotify, root / "missing")
    with pytest.raises(InvalidRequest, match="does not report all changes"):
        Watched(inotify, Path("/proc/self"))

    def vanish(path: str, flags: int) -> int:
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr(os, "open", vanish)
    with pytest.raises(FileNotFoundError):
        Watched(inotify, root)


# ---- policies -------------------------------------------------------------------------


def _hiding(word: str) -> Callable[[Sequence[str]], Sequence[str]]:
    return lambda paths: [path for path in paths if word not in path]


def test_hidden_paths_are_not_reported(inotify: Inotify, root: Path) -> None:
    (root / "secret").mkdir()
    watched = Watched(inotify, root, visible=_hiding("secret"))
    assert watched.watch.directories.names() == ["", "sub/", "sub/deep/"]
    for name in ("secret/a", "sub/secret.key", "sub/b"):
        (root / name).touch()
    (root / "new").mkdir()
    (root / "new/secret").touch()
    assert watched.changes() == {"sub/b": "created", "new": "created"}
    (root / "sub").rename(root / "secret/sub")
    (root / "secret/sub/c").touch()
    assert watched.changes() == {"sub": "deleted"}
    with pytest.raises(PermissionError):
        Watched(inotify, root / "secret", visible=_hiding("secret"))


def test_a_root_that_is_elsewhere_ends_the_watch(inotify: Inotify, root: Path) -> None:
    (root / "in").mkdir()
    for replacement in (None, "directory", "link"):
        watched = Watched(inotify, root / "sub/deep", visible=_hiding("secret"))
        (root / "sub").rename(root / "in/secret")
        (root / "in/secret/deep/a").touch()
        if replacement == "directory":
            (root / "sub/deep").mkdir(parents=True)
        elif replacement == "link":
            (root / "sub").symlink_to("in/secret")
        assert watched.changes() == {}
        assert watched.watch.has_ended
        if replacement == "directory":
            (root / "sub/deep").rmdir()
            (root / "sub").rmdir()
        elif replacement == "link":
            (root / "sub").unlink()
        (root / "in/secret").rename(root / "sub")
        (root / "sub/deep/a").unlink()
        watched.watch.close()
