"""docs/tutorial.md: its blocks run in their order and print the texts below them."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import DEFAULT_TIMEOUT, Server, scaled
from tests.support.client_targets import bounded

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
_URL = "ws://127.0.0.1:7700"
# The longest part waits for Python to start several times, on a machine that may be busy.
_PATIENCE = 6


def _blocks() -> list[tuple[str, str, str]]:
    """The language, the text and the printed text of each block."""
    fences = re.findall(r"^```(\w+)\n(.*?)^```", _DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    blocks = []
    for number, (language, text) in enumerate(fences):
        following = fences[number + 1] if number + 1 < len(fences) else ("", "")
        if language in ("python", "sh"):
            blocks.append((language, text, following[1] if following[0] == "text" else ""))
    return blocks


def _unused_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


async def _type(code: str, names: dict[str, Any]) -> str:
    """Run a block as the prompt of `python -m asyncio` does; returns the printed text."""
    compiled = compile(code, "tutorial.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = eval(compiled, names)
        if inspect.isawaitable(result):
            await result
    return printed.getvalue()


def test_each_block_can_be_typed_at_a_prompt() -> None:
    """A prompt ends a block at a blank line, and takes no other statement before one."""
    for language, text, _ in _blocks():
        if language == "python":
            assert not re.search(r"\n\n+[ \t]", text), text
            assert not re.search(r"\n[ \t][^\n]*\n(?=[^\s)\]}])(?!else|except|finally)", text), text


@pytest.mark.quick
def test_the_python_of_the_tutorial(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = _unused_port()
    monkeypatch.chdir(tmp_path)  # a download has a relative path

    async def scene() -> None:
        names: dict[str, Any] = {"asyncio": asyncio}  # as at the prompt
        for language, text, expected in _blocks():
            if language == "python":
                code = text.replace(_URL, server.url).replace("3000", port)
                assert await _type(code, names) == expected, text

    bounded(scene(), asyncio.run, patience=_PATIENCE)


@pytest.mark.quick
def test_the_commands_of_the_tutorial(server: Server, tmp_path: Path) -> None:
    scripts = [(text, expected) for language, text, expected in _blocks() if language == "sh"]
    assert len(scripts) == 2
    folder = str(Path(sys.executable).parent)
    for script, expected in scripts:
        ended = subprocess.run(
            ["sh", "-ec", script.replace(". .venv/bin/activate\n", "").replace(_URL, server.url)],
            env=os.environ
            | {"PATH": f"{folder}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=scaled(DEFAULT_TIMEOUT),
            check=False,
        )
        assert (ended.stdout, ended.stderr) == (expected, "")
