"""Sources and destinations of cp: streams, patterns, names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.files.copier import Endpoint, expand_patterns, parse_endpoint
from exec_server.client.results import Found
from exec_server.errors import InternalError

pytestmark = pytest.mark.quick


def test_paths() -> None:
    assert parse_endpoint("-").is_stream
    assert not parse_endpoint("box:-").is_stream
    assert str(parse_endpoint("box:a/b")) == "box:a/b"
    assert [parse_endpoint(text).name for text in ("a/b/", "a/.", "..")] == ["b", "", ""]
    assert parse_endpoint("a").joined("b") == Endpoint(None, "a/b")
    assert str(parse_endpoint(":a").joined("b/c")) == ":a/b/c"
    for text in ("", "ws://h:1"):
        with pytest.raises(UsageError):
            parse_endpoint(text)


class Files:
    """A target with one odd name, and matches for every other pattern."""

    def __init__(self, found: list[str], *, truncated: bool = False) -> None:
        self._found = Found(found, truncated=truncated)

    async def exists(self, path: str) -> bool:
        if path == "bad*":
            raise InternalError("bad*: broken")
        return path == "odd[1]"

    async def glob(self, pattern: str, root: str, *, limit: int) -> Found[str]:
        return self._found


def _expand(files: Files, *paths: str) -> list[str]:
    async def get(name: str) -> Any:
        return SimpleNamespace(files=files)

    connections = cast(Any, SimpleNamespace(get=get))
    sources = [parse_endpoint(path) for path in paths]
    return [str(each) for each in asyncio.run(expand_patterns(connections, sources))]


def test_patterns_on_a_target_are_expanded() -> None:
    files = Files(["x", "y"])
    paths = ("local*", "box:plain", "box:odd[1]", "box:d/*")
    assert _expand(files, *paths) == ["local*", "box:plain", "box:odd[1]", "box:d/x", "box:d/y"]
    for wrong, path, text in (
        (Files([]), "box:*", "no path matches"),
        (Files(["x"], truncated=True), "box:*", "paths match"),
        (files, "box:bad*", "broken"),
    ):
        with pytest.raises(CommandError, match=text):
            _expand(wrong, path)
