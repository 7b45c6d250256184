"""Patterns of gitignore; `integration/test_client_exclusions.py` compares them with git."""

from __future__ import annotations

import time

import pytest

from exec_server.client.transfer import exclusion
from exec_server.client.transfer.exclusion import Patterns, TreeFilter, ancestors
from exec_server.errors import InvalidRequest


def excluded(pattern: str, *paths: str) -> list[str]:
    """The paths that a list of one pattern excludes; directories end in a slash."""
    return [path for path in paths if is_excluded(TreeFilter([pattern], gitignore=False), path)]


def is_excluded(tree: TreeFilter, path: str) -> bool:
    names = path.rstrip("/").split("/")
    tree.enter("")
    for depth in range(1, len(names) + 1):
        above = "/".join(names[:depth])
        is_directory = depth < len(names) or path.endswith("/")
        if tree.excludes(above, is_directory=is_directory):
            return True
        tree.enter(above)
    return False


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("build", ["build", "a/build", "a/build/x"], ["builds", "a/rebuild"]),
        ("/build", ["build/"], ["a/build"]),
        ("build/", ["build/", "a/build/"], ["build", "a/build"]),
        ("*.py[co]", ["a.pyc", "b/a.pyo"], ["a.py", "a.pycc"]),
        ("a/b", ["a/b"], ["x/a/b", "a/bb"]),
        ("**/a/b", ["a/b", "x/a/b", "x/y/a/b"], ["xa/b"]),
        ("a/**", ["a/b", "a/b/c"], ["a/", "b/a/c"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/xb"]),
        ("a/*/b", ["a/x/b"], ["a/b", "a/x/y/b"]),
        ("*a*b*", ["ab", "xaxbx"], ["ba"]),
        ("a**b", ["ab", "axb"], ["a/b"]),
        ("x/a**b", ["x/ab", "x/acb"], ["x/a/b"]),
        ("ab**/c", ["abc", "abx/c", "ab/y/c"], ["c", "ab/cd"]),
        ("ab**/**/c", ["abc", "abx/c", "ab/y/c"], ["c"]),
        ("x/ab**", ["x/ab", "x/abc"], ["x/ac"]),
        (r"a/**\/b", ["a/x/b"], ["a/b"]),
        (r"\#a", ["#a"], ["a"]),
        (r"\!a", ["!a"], ["a"]),
        ("#a", [], ["#a", "a"]),
        ("a ", ["a"], ["a "]),
        (r"a\ ", ["a "], ["a"]),
        (r"a\ b  ", ["a b"], ["a"]),
        ("a\\", [], ["a", "a\\"]),
        ("a\0b", ["a"], ["ab"]),
        ("/", [], ["a"]),
        ("[a-c]", ["b"], ["d", "-"]),
        ("[!a-c]", ["d"], ["b", "dd"]),
        ("[^]a]", ["b"], ["a", "]"]),
        (r"[\]\-a]", ["]", "-", "a"], ["\\"]),
        (r"[a-\c]", ["b"], ["-"]),
        ("[[:digit:]_]", ["5", "_"], ["a", ":"]),
        ("[[:a]", [":", "[", "a"], ["b"]),
        ("[[:nothing:]]", [], ["a", ":"]),
        ("[[:digit:", [], ["5"]),
        ("[a", [], ["a", "[a"]),
        ("[a-", [], ["a"]),
        ("[a\\", [], ["a"]),
        ("[z-a]", ["z"], ["b", "a"]),
        ("[a-c-e]", ["b", "-", "e"], ["d"]),
        ("??", ["ab", "é"], ["a"]),
        ("a\nb", ["a\nb"], ["a"]),
    ],
)
def test_a_pattern(pattern: str, matching: list[str], others: list[str]) -> None:
    assert excluded(pattern, *matching, *others) == matching


def test_the_last_match_decides_and_nothing_below_an_excluded_directory() -> None:
    tree = TreeFilter(["*.log", "!keep.log", "old/", "!old/keep.log", "l", "!l/"], gitignore=False)
    shown = {
        path: is_excluded(tree, path) for path in ("a.log", "keep.log", "old/keep.log", "l", "l/")
    }
    assert shown == {"a.log": True, "keep.log": False, "old/keep.log": True, "l": True, "l/": False}
    assert not tree.reads_ignore_file("d")


def test_ignore_files_of_directories() -> None:
    tree = TreeFilter(["/first"], gitignore=True)
    assert tree.reads_ignore_file("")
    tree.enter("", b"\xef\xbb\xbf*.o\r\n!/first\n/sub/x\n# comment\n\n")
    assert not tree.reads_ignore_file("")
    tree.enter("", b"*")  # it is known
    tree.enter("sub", b"!*.o\nonly\n")
    tree.enter("other")
    tree.enter("sub/deep")
    paths = ["first", "a.o", "sub/x", "sub/a.o", "sub/only", "sub/deep/only", "only", "other/x"]
    found = [path for path in paths if tree.excludes(path, is_directory=False)]
    assert found == ["first", "a.o", "sub/x", "sub/only", "sub/deep/only"]


def test_names_that_are_not_utf_8() -> None:
    name = b"a\xff".decode(errors="surrogateescape")
    assert excluded("a?", name, "ab", "aé") == [name, "ab"]
    assert excluded(name, name, "a") == [name]


def test_hostile_patterns_take_linear_time() -> None:
    began = time.process_time()
    assert not excluded("*a" * 2000, "a" * 255)
    assert not excluded("/".join(["**", "*a*ab"] * 30), "/".join(["a" * 100] * 60))
    assert not excluded("**/" * 63 + "b", "/".join(["a"] * 500))
    assert time.process_time() - began < 2


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern in ("a" * (exclusion.PATTERN_BYTES + 1), "a/" * exclusion.PATTERN_NAMES + "a"):
        with pytest.raises(InvalidRequest, match="exclude pattern"):
            TreeFilter([pattern], gitignore=False)
    with pytest.raises(InvalidRequest, match="more than 4096 exclude patterns"):
        Patterns([b"a"] * (exclusion.MAX_PATTERNS + 1))
    tree = TreeFilter([], gitignore=True)
    with pytest.raises(InvalidRequest, match="more than 262144 bytes"):
        tree.enter("", b"\n" * (exclusion.IGNORE_FILE_BYTES + 1))
    monkeypatch.setattr(exclusion, "ALL_PATTERNS", 3)
    tree.enter("", b"a\nb")
    tree.enter("x", b"a\nb")  # equal files are one
    with pytest.raises(InvalidRequest, match="more than 3 patterns"):
        tree.enter("y", b"c\nd")
    monkeypatch.setattr(exclusion, "ALL_BYTES", 6)
    tree = TreeFilter([], gitignore=True)
    tree.enter("", b"#aaa")
    with pytest.raises(InvalidRequest, match="or 6 bytes"):
        tree.enter("x", b"#bbb")


def _enter_nested(*ignore_files: bytes) -> None:
    """Enter directories above one another."""
    tree = TreeFilter([], gitignore=True)
    for level, content in enumerate(ignore_files):
        tree.enter("/".join("a" * level), content)


def test_patterns_that_apply_to_an_entry_have_a_limit() -> None:
    patterns = b"\n".join(b"**/*/" * 12 + b"%d" % number for number in range(4000))
    for files in ([patterns, *[b""] * 30], [b"*.o\n" * 2000] * 10):
        with pytest.raises(InvalidRequest, match="more than 16384 patterns apply to each entry"):
            _enter_nested(*files)


def test_what_directories_remember_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "ALL_POSITIONS", 20)
    tree = TreeFilter([], gitignore=True)
    tree.enter("", b"**/a/b\nc/*/d")
    for name in range(100):  # all of them are as far in the patterns
        tree.enter(f"x{name}")
    with pytest.raises(InvalidRequest, match="more than 20 matches of patterns with directories"):
        _enter_nested(*(b"**/a/%d" % number for number in range(20)))


def test_sets_and_stars_in_a_row() -> None:
    assert excluded("[acd]", "a", "b", "c", "d", "e") == ["a", "c", "d"]
    assert excluded("[!b-y]", "a", "b", "y", "z") == ["a", "z"]
    assert excluded("x/**/**/**/b", "x/b", "x/y/b", "x/y/z/b", "b") == ["x/b", "x/y/b", "x/y/z/b"]


def test_ancestors() -> None:
    assert ancestors(["a/b/c", "a/b/d", "e", ""]) == {"a", "a/b"}
