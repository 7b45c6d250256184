"""The commands, scripts and figures of README.md and docs/first-steps.md are true as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cli import run_client
from tests.support.client import DEFAULT_TIMEOUT, Server, scaled, start_server
from tests.support.registry import start_node

_ROOT = Path(__file__).resolve().parents[2]
_README = _ROOT / "README.md"
_URL = "ws://127.0.0.1:7700"
_REGISTRY = "http://127.0.0.1:7800"
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
        deadline = time.monotonic() + scaled(DEFAULT_TIMEOUT)
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
        self._process.wait(scaled(DEFAULT_TIMEOUT))
        self._read()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._shown

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _session() -> tuple[str, list[str]]:
    """The command of the console block in docs/first-steps.md, and the lines of its session."""
    text = (_ROOT / "docs" / "first-steps.md").read_text()
    block = re.search(r"```console\n\$ (.*?)\n(.*?)```", text, re.DOTALL)
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
    for name in ("hello.txt", "notes.txt", "README.md"):
        Path("/tmp", name).unlink(missing_ok=True)


@pytest.mark.quick
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


def _blocks(language: str) -> list[str]:
    """The code blocks of the README in one language."""
    return re.findall(rf"```{language}\n(.*?)```", _README.read_text(), re.DOTALL)


def _run(argv: list[str], server: Server, text: str = "") -> str:
    """The output of a command in the root of the repository; it has to succeed."""
    folder = os.path.dirname(sys.executable)
    done = subprocess.run(
        [word.replace(_URL, server.url) for word in argv],
        input=text.replace(_URL, server.url),
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(DEFAULT_TIMEOUT),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shell_and_python_work_as_printed(server: Server) -> None:
    (block,) = [block for block in _blocks("sh") if "activate" in block]
    activate, uname, copy, shell = block.splitlines()
    assert activate == ". .venv/bin/activate"
    assert "Linux" in _run(shlex.split(uname), server)
    _run(shlex.split(copy), server)
    assert Path("/tmp/README.md").read_bytes() == _README.read_bytes()
    assert _run(shlex.split(shell.replace(" -t ", " ")), server, "echo it is $((6 * 7))") == (
        "it is 42\n"
    )
    (script,) = _blocks("python")
    assert "0 -rw" in _run([sys.executable, "-"], server, script)
    assert Path("/tmp/notes.txt").read_bytes() == b"it works"


def test_the_default_target_works_as_printed(server: Server, tmp_path: Path) -> None:
    (block,) = [block for block in _blocks("sh") if "targets add" in block]
    add, export, uname = block.splitlines()
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    added = run_client(*shlex.split(add.replace(_URL, server.url))[1:], env=variables)
    assert added.returncode == 0, added.stderr
    name, value = export.removeprefix("export ").split("=")
    ended = run_client(*shlex.split(uname)[1:], env=variables | {name: value})
    assert (ended.returncode, ended.stdout[:5]) == (0, b"Linux"), ended


def test_a_machine_behind_a_nat_is_reached_as_printed(tmp_path: Path) -> None:
    blocks = [block.splitlines() for block in _blocks("sh") if _REGISTRY in block]
    assert [[line.split()[1] for line in block] for block in blocks] == [
        ["login", "up"],
        ["login", "exec"],
    ]
    machine, client = ({"XDG_CONFIG_HOME": str(tmp_path / name)} for name in ("machine", "client"))
    with start_node(tmp_path / "data") as node:

        def words(line: str) -> list[str]:
            return shlex.split(line.replace(_REGISTRY, node.url))[1:]

        for (login, _), variables, token in (
            (blocks[0], machine, node.site.executor_token),
            (blocks[1], client, node.site.client_token),
        ):
            ended = run_client(*words(login), env=variables, input=token.encode())
            assert ended.returncode == 0, ended.stderr
        up = Server("ours", words(blocks[0][1]), env=machine)
        try:
            up.read_url()
            assert up.url == "This machine is reachable. On a client that has logged in:"
            ended = run_client(*words(blocks[1][1]), env=client)
            assert (ended.returncode, ended.stdout[:5]) == (0, b"Linux"), ended
        finally:
            up.process.terminate()
            assert up.process.wait(scaled(DEFAULT_TIMEOUT)) == 0, up.stderr()
            up.release()


def test_figures_are_those_that_the_benchmark_printed() -> None:
    reasons = re.findall(r"^- \*\*.*?(?=\n\n|\n- )", _README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(reasons) == 3
    printed = set(re.findall(r"[\d.,]+x?", (_ROOT / "docs" / "performance.md").read_text()))
    for reason in reasons:
        figures = re.findall(r"\d[\d.,]*\d(?= (?:ms|µs|KiB))|[\d.]+x", reason)
        assert len(figures) >= 3
        assert set(figures) <= printed


def test_commands_exist() -> None:
    makefile = (_ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake ([a-z-]+)[`\n]", _README.read_text())
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
