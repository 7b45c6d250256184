"""The README's example session, typed into the client that it names, works as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from wire import PATIENCE, Server, scaled, start_server

_README = Path(__file__).resolve().parents[2] / "README.md"
_ESCAPES = re.compile(r"\x1b(?:[78]|\[[0-9]*[A-Z])")


class _Terminal:
    """`python -m websockets` on pipes: types lines, and sees the messages it prints."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "websockets", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._shown = ""
        self._seen = 0

    def type(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def message(self) -> str:
        """The next line that starts with `< `."""
        deadline = time.monotonic() + scaled(PATIENCE)
        while True:
            lines = re.findall(r"< (.*)\n", _ESCAPES.sub("", self._shown))
            if len(lines) > self._seen:
                self._seen += 1
                return str(lines[self._seen - 1])
            assert time.monotonic() < deadline, f"no further message; shown: {self._shown}"
            self._read()

    def _read(self) -> None:
        assert self._process.stdout is not None
        data = self._process.stdout.read()
        if data:
            self._shown += data.decode()
        else:
            time.sleep(0.005)

    def end(self) -> str:
        """Types the end of the input; returns what the client says about it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(scaled(PATIENCE))
        self._read()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._shown

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _session() -> tuple[str, list[str]]:
    """The command of the README's console block, and the lines of its session."""
    block = re.search(r"```console\n\$ (.*?)\n(.*?)```", _README.read_text(), re.DOTALL)
    assert block is not None
    return block[1], block[2].splitlines()


def _pattern(printed: str) -> str:
    """A printed line as an expression, in which an ellipsis stands for anything."""
    return ".*".join(re.escape(part) for part in printed.split("…"))


@pytest.fixture
def server() -> Iterator[Server]:
    """Ours, without the files that the session leaves."""
    with start_server("ours") as running:
        yield running
    Path("/tmp/hello.txt").unlink(missing_ok=True)


def test_session_works_as_printed(server: Server) -> None:
    command, lines = _session()
    assert re.fullmatch(r"\.venv/bin/python -m websockets ws://127\.0\.0\.1:7700", command)
    assert len([line for line in lines if line.startswith("< ")]) >= 7
    terminal = _Terminal(server.url)
    try:
        for line in lines:
            mark, _, text = line.partition(" ")
            if mark == ">":
                terminal.type(text)
            else:
                assert mark == "<"
                message = terminal.message()
                assert re.fullmatch(_pattern(text), message), f"{message}\ninstead of\n{text}"
        assert "Connection closed: 1000 (OK)." in terminal.end()
    finally:
        terminal.kill()


def test_commands_exist() -> None:
    makefile = (_README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)$", _README.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
