"""Searches in files, on both servers, with ripgrep and without, and under policies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.client_targets import ClientTarget

from exec_server import Environment, GrepCount, GrepMatch, NotFound, RpcError, Unsupported

_TEXTS = {
    "a.py": "import os\n\ndef f():\n    return os\n",
    "src/b.py": "import re  # OS\r\n",
    "src/.hidden": "import os\n",
    ".git/config": "import os\n",
    "data.bin": "import os\n\0",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    for name, text in _TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, newline="")
    return tmp_path


def test_a_plain_text_is_found(there: ClientTarget, folder: Path) -> None:
    async def scene(env: Environment) -> None:
        found = await env.files.grep("os", folder, literal=True, context=1)
        assert found == [
            GrepMatch("a.py", 1, 8, "import os", (), ("",)),
            GrepMatch("a.py", 4, 12, "    return os", ("def f():",), ()),
            GrepMatch("src/.hidden", 1, 8, "import os"),
        ]
        assert not found.truncated
        found = await env.files.grep("OS", folder, literal=True, ignore_case=True, glob="*.py")
        assert [(match.path, match.column) for match in found] == [
            ("a.py", 8),
            ("a.py", 12),
            ("src/b.py", 14),
        ]
        found = await env.files.grep("os", folder / "a.py", literal=True, limit=1)
        assert (found, found.truncated) == ([GrepMatch("a.py", 1, 8, "import os")], True)
        assert await env.files.grep("none", folder, literal=True) == []
        with pytest.raises(NotFound):
            await env.files.grep("os", folder / "missing", literal=True)

    there.play(scene)


def test_words_other_lines_and_counts(there: ClientTarget, folder: Path) -> None:
    (folder / "word").write_text("os\nthose\n")

    async def scene(env: Environment) -> None:
        found = await env.files.grep("os", folder / "word", word=True)
        assert found == [GrepMatch("word", 1, 1, "os")]
        assert await env.files.grep("os", folder / "word", word=True, literal=True) == found
        found = await env.files.grep("import", folder / "a.py", literal=True, invert=True)
        assert [match.line for match in found] == [2, 3, 4]
        counts = await env.files.grep_count("os", folder, literal=True)
        assert counts == [GrepCount("a.py", 2), GrepCount("src/.hidden", 1), GrepCount("word", 2)]
        assert not counts.truncated
        counts = await env.files.grep_count("o?s", folder, limit=1)
        assert (counts, counts.truncated) == ([GrepCount("a.py", 2)], True)
        if env.capabilities.fs_grep_counts:
            found = await env.files.grep("im.ort", folder / "a.py", invert=True, context=1, limit=1)
            assert found == [GrepMatch("a.py", 2, 1, "", ("import os",), ("def f():",))]
        else:
            with pytest.raises(Unsupported, match="fsGrepCounts"):
                await env.files.grep("im.ort", folder, invert=True)

    there.play(scene)


def test_a_regular_expression(there: ClientTarget, folder: Path) -> None:
    async def scene(env: Environment) -> None:
        found = await env.files.grep("import (os|re)\\b", folder, exclude="src")
        assert [match.path for match in found] == [".git/config", "a.py"]
        found = await env.files.grep(r"\<[[:alpha:]]+(?= +[#o])", folder, ignore_case=True)
        assert [(match.path, match.line, match.column) for match in found] == [
            ("a.py", 1, 1),
            ("a.py", 4, 5),
            ("src/.hidden", 1, 1),
            ("src/b.py", 1, 8),
        ]
        with pytest.raises(RpcError, match="not a regular expression"):
            await env.files.grep("(", folder)

    there.play(scene)


def test_a_slow_pattern_ends_and_delays_no_other_request(ours: ClientTarget, folder: Path) -> None:
    (folder / "evil").write_text("a" * 60 + "b")

    async def scene(env: Environment) -> None:
        async with asyncio.TaskGroup() as tasks:
            search = tasks.create_task(env.files.grep("(?<!x)(?:a|aa)+$", folder / "evil"))
            await env.files.read(folder / "a.py")  # on the same connection
            assert not search.done()
        found = search.result()
        assert (found, found.truncated) == ([], True)

    ours.play(scene)


def test_a_policy_hides_files_from_a_search(ours: ClientTarget, folder: Path) -> None:
    entries = [
        {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
        {"path": {"type": "path", "path": f"file://{folder}/src"}, "access": "deny"},
        {"path": {"type": "glob_pattern", "pattern": f"{folder}/*.bin"}, "access": "deny"},
    ]
    sandbox = {
        "windowsSandboxLevel": "disabled",
        "permissions": {
            "type": "managed",
            "file_system": {"type": "restricted", "entries": entries},
            "network": "restricted",
        },
    }

    async def scene(env: Environment) -> None:
        (folder / "data.bin").write_text("import os\n")
        files = env.files.sandboxed(sandbox)
        found = await files.grep("import", folder, exclude=None)
        assert [match.path for match in found] == [".git/config", "a.py"]
        assert len(await env.files.grep("import", folder, exclude=None)) == 5

    ours.play(scene)
