"""fs/walk: order, limits, and the same answer for plain directories and for special ones."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import msgspec
import pytest
from tests.support.trees import do, fails, os_error, uri

from exec_server.errors import InvalidRequest
from exec_server.filesystem import walk
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri, path_to_uri

# fs/walk


def _walk(path: str, *options: int, follow: bool = False, prune: bool = False) -> files.WalkResult:
    depth, directories, entries = options or (10, 100, 1000)
    limits = files.WalkOptions(depth, directories, entries, follow, prune)
    result = do(files.WalkParams(uri(path), limits))
    assert isinstance(result, files.WalkResult)
    return result


def _found(result: files.WalkResult) -> str:
    """The entries below the working directory, directories with a slash."""
    start = len(path_to_uri(os.getcwd())) + 1
    return " ".join(
        entry.path[start:] + "/" * (entry.kind == "directory") for entry in result.entries
    )


@pytest.fixture
def forest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in (".h/.g/k", "a/b/c"):
        os.makedirs(directory)
    for file in (".h/f", "a/f", "a/b/g"):
        Path(file).touch()
    for link, target in {"la": "a", "lla": "la", "lf": "a/f", "a/up": "..", "dang": "no"}.items():
        os.symlink(target, link)
    os.mkfifo("p")


_TREE = ".h/ a/ .h/.g/ .h/f a/b/ a/f .h/.g/k/ a/b/c/ a/b/g"


def test_walk_is_breadth_first_and_skips_links(forest: None) -> None:
    result = _walk(".")
    assert _found(result) == _TREE
    assert (result.errors, result.truncated) == ([], False)
    assert _found(_walk(".", prune=True)) == ".h/ a/ a/b/ a/f a/b/c/ a/b/g"
    assert _found(_walk(".h", prune=True)) == ".h/.g/ .h/f"
    assert _found(_walk(".", 0, 100, 1000)) == ".h/ a/"
    assert _found(_walk(".", 1, 100, 1000)) == ".h/ a/ .h/.g/ .h/f a/b/ a/f"


def test_walk_enters_each_linked_directory_once(forest: None) -> None:
    result = _walk(".", follow=True)
    assert _found(result) == ".h/ a/ la/ lla/ .h/.g/ .h/f a/b/ a/f a/up/ .h/.g/k/ a/b/c/ a/b/g"
    assert not result.truncated
    assert _found(_walk("la", 0, 100, 1000, follow=True)) == "la/b/ la/f la/up/"


@pytest.mark.parametrize("path", ["la", "lf", "p", "a/f"])
def test_walk_of_what_is_no_directory_finds_nothing(forest: None, path: str) -> None:
    assert _walk(path) == files.WalkResult([], [], False)


@pytest.mark.parametrize(
    ("directories", "entries", "expected"),
    [
        (100, 1, ".h/"),
        (100, 6, ".h/ a/"),
        (100, 7, ".h/ a/ .h/.g/"),
        (1, 1000, ".h/ a/"),
        (3, 1000, ".h/ a/ .h/.g/ .h/f a/b/ a/f"),
        (6, 1000, _TREE),
    ],
)
def test_walk_says_when_it_stopped_early(
    forest: None, directories: int, entries: int, expected: str
) -> None:
    result = _walk(".", 10, directories, entries)
    assert (_found(result), result.truncated) == (expected, True)


def test_walk_stops_when_the_answer_gets_too_large(
    forest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = len(path_to_uri(os.path.join(os.getcwd(), ".h"))) + 64
    monkeypatch.setattr(walk, "WALK_REPLY_BUDGET", cost)
    result = _walk(".")
    assert (_found(result), result.truncated) == (".h/", True)


def test_walk_of_a_huge_directory_keeps_the_first_names(forest: None) -> None:
    os.mkdir("many")
    for number in range(1500):
        Path(f"many/{number:04}").touch()
    result = _walk("many", 1, 1, 5)
    assert _found(result) == "many/0000 many/0001 many/0002 many/0003 many/0004"
    assert result.truncated


def test_walk_keeps_the_spelling_of_its_root_and_reports_names_that_are_no_text(
    forest: None,
) -> None:
    Path("a/b/x y").touch()
    os.mkdir(b"a/b/bad\xff")
    base = path_to_uri(os.getcwd())
    params = files.WalkParams(
        PathUri.from_wire(f"{base}/a/%62/"), files.WalkOptions(0, 1, 9, False)
    )
    result = do(params)
    assert isinstance(result, files.WalkResult)
    assert [entry.path for entry in result.entries] == [
        f"{base}/a/%62/c",
        f"{base}/a/%62/g",
        f"{base}/a/%62/x%20y",
    ]
    assert result.errors == [
        files.WalkError(f"{base}/a/%62/bad%EF%BF%BD", "No such file or directory (os error 2)")
    ]


def test_walk_of_the_root_directory(forest: None) -> None:
    result = _walk("/", 0, 1, 1000)
    assert "file:///proc" in [entry.path for entry in result.entries]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_walk_reports_directories_it_cannot_read(forest: None) -> None:
    os.chmod("a", 0)
    assert [error.message for error in _walk(".").errors] == ["Permission denied (os error 13)"]


def test_walk_limits(forest: None) -> None:
    zero = InvalidRequest("filesystem walk limits must be greater than zero")
    maximum = InvalidRequest(
        "filesystem walk limits exceed maximums: depth=64, directories=10000, entries=50000"
    )
    for options, error in {
        (65, 0, 1): zero,
        (1, 1, 0): zero,
        (65, 1, 1): maximum,
        (1, 10_001, 1): maximum,
        (1, 1, 50_001): maximum,
    }.items():
        fails(files.WalkParams(uri("."), files.WalkOptions(*options, False)), error)
    fails(files.WalkParams(uri("dang"), files.WalkOptions(1, 1, 1, False)), os_error(errno.ENOENT))


# ---- whole directories and single entries ----------------------------------------------

_PLAIN = ("a", "B.txt", ".hidden", "file-1", "file-10", "[1]", "a:b", "c|d", "~", "=")
_SPECIAL = ("x y", '"', "\\", "new\nline", "%41", "ä", "\U0001f600", "#", "?", "<b>")


def _plant(random: Random, folder: Path, depth: int) -> None:
    """A random tree; most directories have plain names only, as most real ones."""
    names = [*_PLAIN, *(_SPECIAL if random.random() < 0.3 else ())]
    for name in random.sample(names, random.randint(0, 8)):
        kind = random.random()
        if kind < 0.3 and depth:
            (folder / name).mkdir()
            _plant(random, folder / name, depth - 1)
        elif kind < 0.9:
            (folder / name).touch()
        elif kind < 0.95:
            (folder / name).symlink_to(random.choice(["..", ".", "a", "missing"]))
        else:
            os.mkfifo(folder / name)


def _random_params(random: Random, root: Path) -> files.WalkParams:
    options = files.WalkOptions(
        random.choice([0, 1, 2, 64]),
        random.choice([1, 2, 5, 10_000]),
        random.choice([1, 3, 10, 30, 50_000]),
        random.random() < 0.3,
        random.random() < 0.3,
    )
    return files.WalkParams(PathUri.from_wire(str(root)), options)


@pytest.mark.parametrize("seed", range(60))
def test_directories_at_once_and_entry_by_entry_give_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = Random(seed)
    _plant(random, tmp_path, 3)
    cases = []
    for _ in range(10):
        params = _random_params(random, tmp_path)
        budget = random.choice([100, 1000, 3000, walk.WALK_REPLY_BUDGET])
        monkeypatch.setattr(walk, "WALK_REPLY_BUDGET", budget)
        cases.append((params, budget, walk.walk_text(params)))
    monkeypatch.setattr(walk._Walker, "_add_all", lambda *_: False)
    for params, budget, text in cases:
        monkeypatch.setattr(walk, "WALK_REPLY_BUDGET", budget)
        assert walk.walk_text(params) == text
        assert msgspec.json.encode(walk.walk(params)) == text


def test_plain_directories_are_added_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _PLAIN:
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    monkeypatch.setattr(walk._Walker, "_visit", lambda *_: pytest.fail("one by one"))
    options = files.WalkOptions(3, 100, 100, False)
    result = walk.walk(files.WalkParams(PathUri.from_wire(str(tmp_path)), options))
    expected = [
        files.WalkEntry(path_to_uri(str(tmp_path / n)), "directory") for n in sorted(_PLAIN)
    ]
    expected += [
        files.WalkEntry(f"{entry.path}/{entry.path.rpartition('/')[2]}", "file")
        for entry in expected
    ]
    assert result == files.WalkResult(expected, [], False)
