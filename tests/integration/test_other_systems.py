"""The client as on macOS and Windows, where developers sit; the server says that it needs Linux."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.client import DEFAULT_TIMEOUT, Server, scaled, server_environment
from tests.support.other_system import MACOS, WINDOWS

from exec_server.host.interpreter import COMMANDS_NEED_POSIX, SERVER_NEEDS_LINUX

pytestmark = pytest.mark.quick

_ROOT = Path(__file__).resolve().parents[2]
_LOOPS = {MACOS: "_UnixSelectorEventLoop", WINDOWS: "_WindowsLoop"}
_COMMANDS = [
    *("cli.main", "cli.connection", "cli.completion", "cli.help", "cli.info", "cli.login"),
    *("cli.mcp", "cli.tls", "cli.exec", "cli.files", "cli.registry"),
]
_NOT_EMPTY = {MACOS: 66, WINDOWS: 41}


def _run(part: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.elsewhere", part, *arguments],
        cwd=_ROOT,
        env=server_environment("ours"),
        capture_output=True,
        text=True,
        timeout=scaled(3 * DEFAULT_TIMEOUT),
        check=False,
    )


@pytest.mark.parametrize(
    ("system", "packages", "exceptions"),
    [
        (MACOS, ["client", "sync", "notebook", "relay", "registry", *_COMMANDS], []),
        (
            WINDOWS,
            ["client", "sync", "notebook", "relay", "registry"],
            ["client.transfer.posix_directory"],
        ),
    ],
)
def test_every_module_can_be_imported(
    system: str, packages: list[str], exceptions: list[str]
) -> None:
    ended = _run("imports", system, *(f"exec_server.{name}" for name in packages))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [f"exec_server.{name}" for name in exceptions]


@pytest.mark.parametrize("system", [MACOS, WINDOWS])
def test_the_client_needs_no_linux(system: str, server: Server, tmp_path: Path) -> None:
    ended = _run("client", system, server.url, str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        f"loop {_LOOPS[system]}",
        "run ['a', 'b']",
        "b'kept\\n'",
        "chunk b'<x>\\n'",
        "until b'<y>'",
        "exit code 129",
        "read b'\\x00\\r\\n'",
        f"error NotEmpty {_NOT_EMPTY[system]}",
        "changed sub/g",
        "found ['two']",
        "attached b'detached\\n'",
        "forwarded b'page'",
        "uploaded 2 2 () ()",
        "downloaded 2 2 () ()",
        "downloaded 2 2 () ()",
        "below/small True",
        "large True",
        "left over []",
        "stdio there",
        "sync hello",
        "sync [b'1', b'2', b'3']",
        "sync b'1'",
        "sync b'1'",
        *[SERVER_NEEDS_LINUX] * 3,
    ]


def test_the_commands_need_no_linux(server: Server, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"content\n")
    remote = f"{server.url}:{tmp_path}/copy"
    commands = [
        (["exec", server.url, "--", "cat", str(source)], "content\n"),
        (["cp", "-q", str(source), remote], ""),
        (["cat", remote], "content\n"),
        (["ls", f"{server.url}:{tmp_path}"], "copy\nsource\n"),
        (["rm", remote], ""),
        (["exec", "-d", "--name", tmp_path.name, server.url, "--", "echo", "kept"], None),
        (["logs", "-f", server.url, tmp_path.name], "kept\n"),
        (["info", server.url], None),
    ]
    for words, output in commands:
        ended = _run("command", MACOS, *words)
        assert (ended.stderr, ended.returncode) == ("", 0), words
        assert output is None or ended.stdout == output


@pytest.mark.parametrize(
    "words", [[], ["serve"], ["--listen", "stdio"], ["--remote", "https://example"], ["sandbox"]]
)
def test_the_server_says_that_it_needs_linux(words: list[str]) -> None:
    ended = _run("command", MACOS, *words)
    assert (ended.stdout, ended.stderr) == ("", f"Error: {SERVER_NEEDS_LINUX}\n")
    assert ended.returncode == 1


def test_the_commands_say_that_they_need_posix() -> None:
    ended = _run("command", WINDOWS, "exec", "ws://127.0.0.1:1", "--", "true")
    assert (ended.stdout, ended.stderr) == ("", f"Error: {COMMANDS_NEED_POSIX}\n")
    assert ended.returncode == 1
