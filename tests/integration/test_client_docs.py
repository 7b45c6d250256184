"""docs/client.md: its examples run, and every public name is in it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import KINDS, Server, start_server
from tests.support.client_targets import bounded, web

import exec_server
from exec_server import connect, sync

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "client.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PROGRAMS = [example for example in EXAMPLES if "await " not in example or "asyncio.run" in example]
SNIPPETS = [example for example in EXAMPLES if example not in PROGRAMS]


@pytest.fixture(params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server").mkdir()
    with start_server(request.param, cwd=tmp_path / "server") as running:
        yield running


def title(example: str) -> str:
    return example.strip().splitlines()[-1][:40]


@pytest.mark.quick
@pytest.mark.parametrize("program", PROGRAMS, ids=title)
def test_programs(program: str, server: Server) -> None:
    exec(program.replace("ws://127.0.0.1:7700", server.url), {"__name__": "__main__"})


@pytest.mark.parametrize("snippet", SNIPPETS, ids=title)
def test_snippets(snippet: str, server: Server) -> None:
    code = compile(snippet, "client.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def scene() -> None:
        async with connect(server.url) as env, web() as url:
            names: dict[str, Any] = {"env": env, "url": f"{url}/body"}
            result = eval(code, names)
            assert inspect.isawaitable(result)
            await result

    bounded(scene(), asyncio.run)


def test_there_are_examples() -> None:
    assert len(PROGRAMS) >= 3
    assert len(SNIPPETS) >= 9


def test_every_public_name_is_in_the_guide() -> None:
    words = set(re.findall(r"\w+", TEXT))
    assert set(exec_server.__all__) <= words
    assert set(sync.__all__) <= words
    for owner in (
        exec_server.Environment,
        exec_server.Files,
        exec_server.Process,
        exec_server.Result,
        exec_server.Transfer,
    ):
        names = {name for name in dir(owner) if not name.startswith(("_", "on_"))}
        assert names - {"is_over"} <= words, owner
        for name in names:
            assert inspect.getdoc(getattr(owner, name)) or not callable(getattr(owner, name))
