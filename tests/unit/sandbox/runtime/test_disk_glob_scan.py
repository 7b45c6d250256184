"""The search for files that match deny globs: on real trees, with its limits."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox.policy.access import matches
from exec_server.sandbox.policy.model import Glob
from exec_server.sandbox.runtime import disk
from exec_server.sandbox.runtime.disk import scan

_NAMES = (
    "a.key b.KEY .h.key sub/a.key sub/.h.key sub/d/a.key .hid/a.key x1 x2 x10 [z] {q} a,b.key "
    "é.key sub/x1 sub/d/x1 q.key/inner a*b star sub/y/a.txt x[ x] {a xa xb x-ab xé s/key"
)
FILES = _NAMES.split()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "dir.key").mkdir()
    (tmp_path / "link.key").symlink_to("sub/a.key")
    (tmp_path / "linked").symlink_to("sub")
    (tmp_path / ".gitignore").write_text("*.key")
    os.mkfifo(tmp_path / "fifo.key")
    return tmp_path


@pytest.mark.parametrize("depth", [None, 1, 2])
@pytest.mark.parametrize("pattern", ["*.key", "**/*.key", "s*/x1", "*/*", "x?"])
def test_the_search_finds_what_matches(tree: Path, pattern: str, depth: int | None) -> None:
    glob = Glob(str(tree), pattern, depth)
    there = [path for path in tree.rglob("*") if not path.is_symlink()]
    matched = {str(path) for path in there if matches(glob, str(path))}
    expected = {path for path in matched if not matched & {*map(str, Path(path).parents)}}
    assert scan([glob]) == sorted(expected)


def test_a_matching_directory_is_searched_below_a_writable_path(tree: Path) -> None:
    (tree / "q.key/sub/a.key").mkdir(parents=True)
    globs = [Glob(str(tree), "q.key", None), Glob(str(tree), "a.key", None)]
    outside = [str(tree / name) for name in (".hid/a.key", "a.key", "q.key")]
    others = [str(tree / name) for name in ("sub/a.key", "sub/d/a.key")]
    assert scan(globs) == [*outside, *others]
    assert scan(globs, [str(tree / "q.key")]) == [*outside, *others]
    inside = str(tree / "q.key/sub/a.key")
    assert scan(globs, [str(tree / "q.key/sub")]) == [*outside, inside, *others]


def test_several_globs_are_searched_together_without_repeating_a_file(tree: Path) -> None:
    root = str(tree)
    found = scan(
        [
            Glob(root, "sta?", None),
            Glob(root, "s*r", 1),
            Glob(f"{root}/sub", "x?", None),
            Glob(f"{root}/nowhere", "*", None),
            Glob(f"{root}/star", "*", None),
        ]
    )
    assert found == [f"{root}/star", f"{root}/sub/d/x1", f"{root}/sub/x1"]


@pytest.fixture
def closed() -> Iterator[Path]:
    """A directory that its owner may not list; the test runs as an ordinary user."""
    # Not below tmp_path: each session of pytest closes the folder above it to other users again.
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "star").touch()
        directory = Path(root, "closed")
        directory.mkdir(mode=0)
        if os.geteuid() != 0:
            yield directory
            return
        nobody = 65534
        os.chmod(root, 0o755)
        os.chown(directory, nobody, nobody)
        os.seteuid(nobody)
        try:
            yield directory
        finally:
            os.seteuid(0)


def test_a_directory_that_its_owner_could_open_from_inside_is_not_passed_over(closed: Path) -> None:
    with pytest.raises(InternalError, match="closed cannot be searched"):
        scan([Glob(str(closed.parent), "*.key", None)])


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
def test_a_directory_of_somebody_else_that_is_closed_is_passed_over(closed: Path) -> None:
    os.seteuid(0)
    os.chown(closed, 0, 0)
    os.seteuid(65534)
    glob = Glob(str(closed.parent), "sta?", None)
    assert scan([glob]) == [str(closed.parent / "star")]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
def test_a_directory_of_somebody_else_that_can_be_passed_through_is_refused(closed: Path) -> None:
    """A process that knows the name of a file in it can open the file."""
    os.seteuid(0)
    os.chown(closed, 0, 0)
    closed.chmod(0o711)
    os.seteuid(65534)
    with pytest.raises(InternalError, match="closed cannot be searched: Permission denied"):
        scan([Glob(str(closed.parent), "*.key", None)])


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EIO])
def test_rights_that_cannot_be_examined_are_refused(
    closed: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    os.seteuid(0)
    os.chown(closed, 0, 0)
    os.seteuid(65534)
    real_stat = os.stat

    def refuse(path: str, **options: bool) -> os.stat_result:
        if not str(path).endswith("closed/."):
            return real_stat(path, **options)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        with pytest.raises(InternalError, match=rf"closed cannot be searched: .*error {number}"):
            scan([Glob(str(closed.parent), "*.key", None)])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize("failing", ["scandir", "is_dir"])
def test_a_search_that_fails_is_refused_with_the_path_and_the_reason(
    tree: Path, monkeypatch: pytest.MonkeyPatch, number: int, failing: str
) -> None:
    """Some file systems do not tell the kind of an entry, so that finding it out may fail."""
    scandir = os.scandir

    class Entry:
        name = "entry"

        def is_symlink(self) -> bool:
            return False

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            raise OSError(number, os.strerror(number))

    def changed(path: str) -> object:
        if not path.endswith("/sub/"):
            return scandir(path)
        if failing == "scandir":
            raise OSError(number, os.strerror(number))
        return contextlib.nullcontext([Entry()])

    monkeypatch.setattr(os, "scandir", changed)
    with pytest.raises(InternalError) as refused:
        scan([Glob(str(tree), "*.key", None)])
    assert f"{tree}/sub cannot be searched: " in refused.value.message
    assert refused.value.message.endswith(f"(os error {number})")


def test_a_directory_beyond_the_longest_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "d" * 250
    for _ in range(20):
        os.mkdir(name)
        os.chdir(name)
    try:
        with pytest.raises(InternalError, match=r"… cannot be searched: Filename too long"):
            scan([Glob(str(tmp_path), "*.key", None)])
    finally:
        for _ in range(20):  # deeper than shutil.rmtree can name
            os.chdir("..")
            os.rmdir(name)


def test_too_many_matches_are_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Glob(str(tree), "*.key", None)
    monkeypatch.setattr(disk, "MAX_MATCHES", len(scan([glob])))
    scan([glob])
    (tree / "more.key").touch()
    with pytest.raises(InternalError, match="match more than"):
        scan([glob])


def test_too_large_a_search_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_ENTRIES", 5)
    with pytest.raises(InternalError, match="would search more than"):
        scan([Glob(str(tree), "*.none", None)])
