"""Patterns in paths of a target."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from exec_server.cli.errors import CommandError
from exec_server.cli.files.operands import find_matches, is_pattern, split_pattern
from exec_server.client.results import Found
from exec_server.errors import Unsupported


class Files:
    """A target with one odd name, and the matches of every other pattern."""

    def __init__(self, *matches: str, truncated: bool = False) -> None:
        self._found = Found(matches, truncated=truncated)

    async def exists(self, path: str) -> bool:
        return path == "odd*"

    async def glob(self, pattern: str, root: str, limit: int) -> Found[str]:
        assert root == "/logs"
        return self._found


def _find(path: str, files: Files) -> list[str]:
    return asyncio.run(find_matches(cast(Any, files), path))


def test_a_pattern_is_replaced_by_its_matches() -> None:
    assert _find("/logs/*.gz", Files("a.gz", "b.gz")) == ["/logs/a.gz", "/logs/b.gz"]
    assert _find("/logs/*.gz", Files()) == []
    assert _find("plain", Files("a.gz")) == ["plain"]
    assert _find("odd*", Files("a.gz")) == ["odd*"]
    with pytest.raises(CommandError, match="more than 10000 paths match"):
        _find("/logs/*.gz", Files("a.gz", truncated=True))


def test_a_server_that_knows_no_patterns_is_explained_with_a_command() -> None:
    class Plain(Files):
        async def glob(self, pattern: str, root: str, limit: int) -> Found[str]:
            raise Unsupported("fsGlob", "walk the tree with files.walk() and match its paths")

    with pytest.raises(CommandError) as caught:
        _find("/logs/*.gz", Plain())
    assert str(caught.value) == (
        "/logs/*.gz: this server cannot look for patterns (it has no fsGlob); name each path, or "
        "let a shell of the target find them: exec-server exec TARGET -- sh -c 'ls -d /logs/*.gz'"
    )


@pytest.mark.parametrize(
    ("pattern", "matches", "kept"),
    [
        ("*", (".git", "a", "b.c"), ["a", "b.c"]),
        (".*", (".git", ".x"), [".git", ".x"]),
        ("{.git,a}", (".git", "a"), [".git", "a"]),
        ("*/*", (".git/a", "a/.x", "a/b"), ["a/b"]),
        (".*/*", (".git/.x", ".git/a"), [".git/a"]),
        ("**/*.py", (".venv/a.py", "a.py", "b/.c.py", "b/c.py"), ["a.py", "b/c.py"]),
        ("**/.env", (".env", "a/.env"), [".env", "a/.env"]),
        ("{a,b/c}*", ("a", "b/c", "b/.d"), ["a", "b/c"]),
    ],
)
def test_wildcards_match_no_hidden_names(
    pattern: str, matches: tuple[str, ...], kept: list[str]
) -> None:
    found = _find(f"/logs/{pattern}", Files(*matches))
    assert found == [f"/logs/{each}" for each in kept]


def test_wildcards() -> None:
    assert [is_pattern(path) for path in ("a*", "a?", "[a]", "{a,b}", "a b")] == [
        *[True] * 4,
        False,
    ]


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("*.py", (".", "*.py")),
        ("/*.py", ("/", "*.py")),
        ("/a/b/c?/d", ("/a/b", "c?/d")),
        ("a/{b,c}", ("a", "{b,c}")),
    ],
)
def test_the_directory_of_a_pattern(path: str, parts: tuple[str, str]) -> None:
    assert split_pattern(path) == parts
