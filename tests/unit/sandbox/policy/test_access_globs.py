"""The glob dialect as the reference showed it."""

from __future__ import annotations

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox.policy import access
from exec_server.sandbox.policy.model import Glob

_NAMES = (
    "a.key b.KEY .h.key sub/a.key sub/.h.key sub/d/a.key .hid/a.key x1 x2 x10 [z] {q} a,b.key "
    "é.key sub/x1 sub/d/x1 q.key/inner a*b star sub/y/a.txt x[ x] {a xa xb x-ab xé s/key"
)
FILES = _NAMES.split()


def matched(pattern: str, max_depth: int | None = None) -> set[str]:
    glob = Glob("/g", pattern, max_depth)
    access.check(glob)
    return {name for name in FILES if access.matches(glob, f"/g/{name}")}


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
        access.check(Glob("/g", pattern, None))


@pytest.mark.parametrize(
    ("depth", "expected"), [(1, "x1"), (2, "x1 sub/x1"), (3, "x1 sub/x1 sub/d/x1")]
)
def test_the_depth_counts_from_the_search_root(depth: int, expected: str) -> None:
    assert matched("**/x1", depth) == set(expected.split())
    assert matched("x1", depth) == set(expected.split())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/g/a.key", True),
        ("/g/dir.key", True),
        ("/g/dir.key/inner/file", True),
        ("/g/x/dir.key/file", True),
        ("/g/x/file", False),
        ("/g/dir.keys/file", False),
        ("/x.key/file", False),
        ("/g/open.key/w/file", False),
        ("/g/open.key/w", False),
        ("/g/open.key/w/b.key", True),
        ("/g/open.key/wide", True),
        ("/g/granted.key/file", True),
    ],
)
def test_directories_are_denied_with_everything_in_them(path: str, expected: bool) -> None:
    denied = [Glob("/g", "**/*.key", None), Glob("/g/none", "*", None)]
    writable = ["/", "/g", "/g/open.key/w", "/g/granted.key"]
    assert access.denies(denied, path, writable) == expected


def test_the_depth_limits_which_directories_match_but_not_their_contents() -> None:
    denied = [Glob("/g", "*.key", 1)]
    assert access.denies(denied, "/g/a.key/deep/file", [])
    assert not access.denies(denied, "/g/x/a.key/file", [])


def test_paths_outside_the_root_do_not_match() -> None:
    assert not access.matches(Glob("/g", "*", None), "/gg/x")
    assert not access.matches(Glob("/g", "*", None), "/g")
