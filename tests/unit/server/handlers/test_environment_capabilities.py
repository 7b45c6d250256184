"""Discovery: the order of roots, the limit of a request, and answers that are kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exec_server.codex.installed import CapabilityCache
from exec_server.errors import InvalidRequest
from exec_server.filesystem.inotify import Inotify
from exec_server.protocol import codex
from exec_server.protocol.paths import PathUri
from exec_server.server.handlers import environment as handlers


def _context(root: Path) -> Any:
    async def in_thread(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    inotify, cache = Inotify(lambda function: function()), CapabilityCache()
    server = SimpleNamespace(
        variables={"CODEX_HOME": str(root), "HOME": str(root)},
        sandboxes=SimpleNamespace(files=None),
        search_slots=asyncio.Semaphore(1),
        inotify=lambda: inotify,
        capability_cache=lambda: cache,
    )
    return SimpleNamespace(server=server, in_thread=in_thread, search_slots=asyncio.Semaphore(1))


def _root(path: Path | str, name: str = "") -> codex.RootParams:
    return codex.RootParams(name, PathUri.from_text(str(path)))


def test_roots_are_answered_in_their_order(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "SKILL.md").write_text("s")
        roots = [_root(tmp_path, "a"), _root(tmp_path / "none", "b"), _root(tmp_path, "a")]
        params = codex.DiscoverRootsParams(roots)
        result = await handlers.discover_roots(_context(tmp_path), params)
        assert [(root.id, root.error is None) for root in result.roots] == [
            ("a", True),
            ("b", False),
            ("a", True),
        ]

    asyncio.run(scene())


def test_a_request_has_few_roots(tmp_path: Path) -> None:
    async def scene() -> None:
        roots = [_root(tmp_path / "none")] * (handlers.MAX_ROOTS + 1)
        with pytest.raises(InvalidRequest, match="accepts at most 128 roots"):
            await handlers.discover_roots(_context(tmp_path), codex.DiscoverRootsParams(roots))
        result = await handlers.discover_roots(
            _context(tmp_path), codex.DiscoverRootsParams(roots[1:])
        )
        assert len(result.roots) == handlers.MAX_ROOTS

    asyncio.run(scene())


def test_an_answer_is_kept_until_something_changes(tmp_path: Path) -> None:
    async def scene() -> None:
        context = _context(tmp_path)
        params = codex.DiscoverParams(PathUri.from_text("/"))
        first = await handlers.discover(context, params)
        assert json.loads(first.text) == {"plugins": [], "skills": [], "warnings": []}
        assert (await handlers.discover(context, params)).text is first.text
        (tmp_path / "skills").mkdir()
        assert (await handlers.discover(context, params)).text is not first.text
        context.server.variables["CODEX_HOME"] = str(tmp_path / "none")
        (tmp_path / "skills").rmdir()
        with pytest.raises(Exception, match="does not exist"):
            await handlers.discover(context, params)
        context.server.inotify().close()

    asyncio.run(scene())


def test_nothing_is_watched_for_a_discovery_that_failed(tmp_path: Path) -> None:
    async def scene() -> None:
        context = _context(tmp_path / "none")
        removed: list[object] = []
        context.server.inotify().remove_listener_later = removed.append
        with pytest.raises(Exception, match="does not exist"):
            await handlers.discover(context, codex.DiscoverParams(PathUri.from_text("/")))
        assert len(removed) == 1

    asyncio.run(scene())
