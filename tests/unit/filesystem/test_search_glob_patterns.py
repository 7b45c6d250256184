"""Patterns of paths, name by name."""

from __future__ import annotations

import pytest

from exec_server.errors import InvalidParams
from exec_server.filesystem.search import GlobPatterns

pytestmark = pytest.mark.quick


def _is_match(pattern: str, path: str) -> bool:
    patterns = GlobPatterns(pattern)
    state = patterns.start()
    for name in path.split("/"):
        state = patterns.step(state, name)
    return patterns.is_match(state)


@pytest.mark.parametrize(
    ("pattern", "path", "is_match"),
    [
        ("*.py", "a.py", True),
        ("*.py", "d/a.py", False),
        ("**/*.py", "a.py", True),
        ("**/*.py", "d/e/a.py", True),
        ("src/**", "src", True),
        ("src/**", "src/a/b", True),
        ("src/**", "lib/a", False),
        ("{a,b}/?[0-9]", "b/x7", True),
        ("./a//b", "a/b", True),
        ("a", "a/b", False),
    ],
)
def test_patterns(pattern: str, path: str, is_match: bool) -> None:
    assert _is_match(pattern, path) is is_match


def test_a_directory_is_entered_only_if_something_below_may_match() -> None:
    patterns = GlobPatterns("src/*.py")
    below = patterns.step(patterns.start(), "src")
    assert patterns.may_continue(below)
    assert not patterns.may_continue(patterns.step(below, "a.py"))


@pytest.mark.parametrize(
    "pattern", ["", "/etc/*", "a/../b", "x" * 5000, "a\0b", "{a,b}" * 7, "a/" * 65]
)
def test_refused_patterns(pattern: str) -> None:
    with pytest.raises(InvalidParams, match="pattern must"):
        GlobPatterns(pattern)
