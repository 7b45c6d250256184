"""The glob dialect as the reference showed it, and the search for matching files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox import globs
from exec_server.sandbox.plan import Glob

_NAMES = (
    "a.key b.KEY .h.key sub/a.key sub/.h.key sub/d/a.key .hid/a.key x1 x2 x10 [z] {q} a,b.key "
    "é.key sub/x1 sub/d/x1 q.key/inner a*b star sub/y/a.txt x[ x] {a xa xb x-ab xé s/key"
)
FILES = _NAMES.split()


def matched(pattern: str, max_depth: int | None = None) -> set[str]:
    glob = Glob("/g", pattern, max_depth)
    globs.check(glob)
    return {name for name in FILES if globs.matches(glob, f"/g/{name}")}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.txt", "sub/y/a.txt"),
        ("sub/*", "sub/a.key sub/.h.key sub/x1"),
        ("**/sub/*.key", "sub/a.key sub/.h.key"),
        ("s*b/*.key", "sub/a.key sub/.h.key"),
        ("s*b/**/a.key", "sub/a.key sub/d/a.key"),
        ("sub/**", "sub/a.key sub/.h.key sub/d/a.key sub/x1 sub/d/x1 sub/y/a.txt"),
        ("sub/**/x1", "sub/x1 sub/d/x1"),
        ("**/**/x1", "x1 sub/x1 sub/d/x1"),
        ("**/d/**", "sub/d/a.key sub/d/x1"),
        ("*/a.key", "sub/a.key .hid/a.key"),
        ("*/*/*", "sub/d/a.key sub/d/x1 sub/y/a.txt"),
        ("s**/x1", "sub/x1"),
        ("su?/d/*", "sub/d/a.key sub/d/x1"),
        ("?ub/x1", "sub/x1"),
        ("**/{d,y}/*", "sub/d/a.key sub/d/x1 sub/y/a.txt"),
        ("s?b/{x1,d/a.key}", "sub/x1 sub/d/a.key"),
        ("s?b/{**/x1,y/*}", "sub/x1 sub/d/x1 sub/y/a.txt"),
        ("s[/]*", "s/key"),
        ("sub[!a]x1", "sub/x1"),
        ("q.*/inner", "q.key/inner"),
    ],
)
def test_a_pattern_with_a_slash_is_anchored_to_its_root(pattern: str, expected: str) -> None:
    assert matched(pattern) == set(expected.split())


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("x[12]", "x1 x2 sub/x1 sub/d/x1"),
        ("x[!1]", "x2 x[ x] xa xb xé"),
        ("x[^1-9]", "x[ x] xa xb xé"),
        ("x[]1]", "x1 x] sub/x1 sub/d/x1"),
        ("x[!]1]", "x2 x[ xa xb xé"),
        ("x[1-]", "x1 sub/x1 sub/d/x1"),
        ("x[a,1]", "x1 xa sub/x1 sub/d/x1"),
        ("x[*", "x["),
        ("x[", "x["),
        ("x]*", "x]"),
        ("[[]z]", "[z]"),
        ("\\[z]*", "[z]"),
        ("a\\*b*", "a*b"),
        ("[{]*", "{q} {a"),
        ("*.KEY", "b.KEY"),
        (".h*", ".h.key sub/.h.key"),
        ("*,b.key", "a,b.key"),
        ("x*{a,-}b", "x-ab"),
        ("x*{,b}", "x1 x2 x10 x[ x] xa xb x-ab xé sub/x1 sub/d/x1"),
        ("sta{r,{x,y}}", "star"),
        ("**a.txt", "sub/y/a.txt"),
        ("***.txt", "sub/y/a.txt"),
        ("**", " ".join(FILES)),
        ("*", " ".join(FILES)),
        ("xé*", "xé"),
        ("dir.key*", ""),
        ("[[:digit:]]*", ""),
    ],
)
def test_a_pattern_without_a_slash_matches_names_at_any_depth(pattern: str, expected: str) -> None:
    assert matched(pattern) == set(expected.split())


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("*{a", "unclosed alternate group"),
        ("*}", "unopened alternate group"),
        ("*\\", "dangling"),
        ("x[b-a]", "invalid range; 'b' > 'a'"),
    ],
)
def test_a_malformed_pattern_is_refused_with_its_reason(pattern: str, reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        globs.check(Glob("/g", pattern, None))


@pytest.mark.parametrize(
    ("depth", "expected"), [(1, "x1"), (2, "x1 sub/x1"), (3, "x1 sub/x1 sub/d/x1")]
)
def test_the_depth_counts_from_the_search_root(depth: int, expected: str) -> None:
    assert matched("**/x1", depth) == set(expected.split())
    assert matched("x1", depth) == set(expected.split())


def test_paths_outside_the_root_do_not_match() -> None:
    assert not globs.matches(Glob("/g", "*", None), "/gg/x")
    assert not globs.matches(Glob("/g", "*", None), "/g")


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
    there = [*FILES, ".gitignore", "fifo.key"]
    expected = [str(tree / name) for name in there if globs.matches(glob, str(tree / name))]
    assert globs.scan([glob]) == sorted(expected)


def test_several_globs_are_searched_together_without_repeating_a_file(tree: Path) -> None:
    root = str(tree)
    found = globs.scan(
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
def closed(tree: Path) -> Iterator[Path]:
    """A directory that even its owner may not list, for somebody who is not root."""
    directory = tree / "closed"
    directory.mkdir(mode=0)
    if os.geteuid() != 0:
        yield directory
        return
    nobody = 65534
    opened = [place for place in tree.parents if place.stat().st_mode & 0o001 == 0]
    modes = {place: place.stat().st_mode for place in [tree, *opened]}
    for place, mode in modes.items():
        place.chmod(mode | 0o055)
    os.chown(directory, nobody, nobody)
    os.seteuid(nobody)
    try:
        yield directory
    finally:
        os.seteuid(0)
        for place, mode in modes.items():
            place.chmod(mode)


def test_a_directory_that_its_owner_could_open_from_inside_is_not_passed_over(closed: Path) -> None:
    with pytest.raises(InternalError, match="closed cannot be searched"):
        globs.scan([Glob(str(closed.parent), "*.key", None)])


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
def test_a_directory_of_somebody_else_that_is_closed_is_passed_over(closed: Path) -> None:
    os.seteuid(0)
    os.chown(closed, 0, 0)
    os.seteuid(65534)
    glob = Glob(str(closed.parent), "sta?", None)
    assert globs.scan([glob]) == [str(closed.parent / "star")]


def test_too_many_matches_are_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Glob(str(tree), "*.key", None)
    monkeypatch.setattr(globs, "MAX_MATCHES", len(globs.scan([glob])))
    globs.scan([glob])
    (tree / "more.key").touch()
    with pytest.raises(InternalError, match="match more than"):
        globs.scan([glob])


def test_too_large_a_search_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(globs, "MAX_ENTRIES", 5)
    with pytest.raises(InternalError, match="would search more than"):
        globs.scan([Glob(str(tree), "*.none", None)])
