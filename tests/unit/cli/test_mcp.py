"""The arguments of `exec-server mcp`, and the lines that it reads."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from exec_server.cli import mcp
from exec_server.cli.errors import UsageError
from exec_server.cli.main import run_client
from exec_server.cli.streams import StdinReader
from exec_server.errors import ProtocolError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8000", ("127.0.0.1", 8000)),
        ("localhost:1", ("localhost", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses_of_this_machine(text: str, address: tuple[str, int]) -> None:
    assert mcp.parse_address(text) == address


@pytest.mark.parametrize("text", ["", "x", "0", "65536", "localhost:", "0.0.0.0:80", "[::]:80"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--http"):
        mcp.parse_address(text)


def test_http_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def options(*words: str) -> object:
        return mcp.http_options(mcp.build_parser().parse_words([*words, "build"]))

    token = tmp_path / "token"
    token.write_text("secret\n")
    monkeypatch.setenv("MCP_TOKEN", "other")
    from_file, from_variable = ("--http-token-file", str(token)), ("--http-token-env", "MCP_TOKEN")
    assert options() == (None, "")
    assert options("--http", "80", *from_file) == (("127.0.0.1", 80), "secret")
    assert options("--http", "80", *from_variable) == (("127.0.0.1", 80), "other")
    for wrong in (("--http", "80"), from_file, ("--http", "80", *from_file, *from_variable)):
        with pytest.raises(UsageError, match="--http needs a token"):
            options(*wrong)


def test_without_the_package_it_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    monkeypatch.delitem(sys.modules, "exec_server.adapters.mcp", raising=False)
    assert run_client("mcp", ["ws://127.0.0.1:1"]) == 1
    shown = capfd.readouterr().err
    assert shown.startswith("Error: this adapter needs mcp (extra `mcp`): pip install '.[mcp]'")
    assert shown.count("\n") == 1


def _lines(data: bytes) -> list[str]:
    async def read() -> list[str]:
        return [line async for line in mcp.read_lines(StdinReader(reading))]

    reading, writing = os.pipe()
    try:
        os.write(writing, data)
        os.close(writing)
        return asyncio.run(read())
    finally:
        os.close(reading)


def test_lines_of_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _lines('{"ä":1}\n\r\n{}\nunfinished'.encode()) == ['{"ä":1}', "{}"]
    monkeypatch.setattr(mcp, "LINE_BYTES", 10)
    with pytest.raises(ProtocolError):
        _lines(b"x" * 12)


def test_the_lines_of_the_document_are_accepted() -> None:
    """`make adapters` tries those of Codex and Claude Code; Cursor has a documented form."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "mcp.md").read_text()
    words = re.findall(r"`(?:codex|claude) mcp add build -- exec-server mcp ([^`]*)`", text)
    assert len(words) == 2
    files = [json.loads(found) for found in re.findall(r'`(\{"mcpServers".*?\}\}\})`', text)]
    files += map(json.loads, re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    servers = [file["mcpServers"]["build"] for file in files]
    local, remote = servers
    assert set(local) <= {"type", "command", "args", "env", "envFile"}
    assert local["command"] == "exec-server"
    assert local["args"][0] == "mcp"
    assert set(remote) == {"url", "headers"}
    assert remote["headers"] == {"Authorization": "Bearer ${env:MCP_TOKEN}"}
    for line in (*words, shlex.join(local["args"][1:])):
        parsed = mcp.build_parser().parse_words(shlex.split(line))
        assert parsed.target == "build"
