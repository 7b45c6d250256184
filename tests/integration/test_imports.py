"""What is imported before the first answer of a server, and by `exec`: each module delays it.

A module of a standard library or of a dependency that is not listed here has to be imported in the
function that needs it. Private modules, such as `_json`, come with others.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.client import DEFAULT_TIMEOUT, scaled, server_environment
from tests.support.client_targets import ClientTarget

_PYTHON = [sys.executable, "-X", "importtime"]
_OURS = "exec_server."
# Without targets of the user, and without the modules that measure coverage.
_VARIABLES = server_environment(
    "ours", {"XDG_CONFIG_HOME": "/nonexistent", "COVERAGE_PROCESS_CONFIG": None}
)

SERVER_NEEDS = {
    *("argparse", "gettext", "runpy"),  # the command line
    *("ctypes", "grp", "pwd", "resource", "termios"),  # processes
    *("bisect", "hashlib", "pybase64"),  # the session and its messages
}
CLIENT_NEEDS = {
    *("argparse", "gettext", "runpy"),
    *("pybase64", "termios"),
    *("aiohappyeyeballs", "ipaddress"),  # the connection
}
# Subjects of our own that come later, or never. Each takes milliseconds.
SERVER_NEEDS_NOT = (
    *("adapters", "cli.connection", "client", "codex", "hosting", "patching", "relay"),
    *("filesystem.handles", "filesystem.operations", "filesystem.walk", "filesystem.watch"),
    *("host.http", "net.auth", "net.http_client", "net.port_socket", "net.websocket"),
    *("protocol.files", "protocol.http", "protocol.port", "proxy.process_proxy"),
    *("registry.api", "sandbox.policy", "sandbox.runtime", "server.file_access"),
    *("server.handlers", "server.port_table", "server.shell_snapshots"),
)
CLIENT_NEEDS_NOT = (
    *("adapters", "cli.serve", "codex", "filesystem", "hosting"),
    *("client.engine.relay", "client.engine.stdio", "client.files", "client.polyfills"),
    *("client.http", "client.port_forwarding", "client.transfer", "patching", "process"),
    *("host.libc", "net.http_client", "protocol.files", "protocol.http", "protocol.port"),
    *("proxy", "registry.api", "relay", "sandbox", "server", "sync"),
)


def _names(log: bytes) -> set[str]:
    """The modules that `-X importtime` has logged."""
    lines = (line for line in log.decode().splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip() for line in lines}


def _check(log: bytes, needs: set[str], needs_not: tuple[str, ...]) -> None:
    names = _names(log)
    ours = {name.removeprefix(_OURS) for name in names if name.startswith(_OURS)}
    parents = {
        ".".join(name.split(".")[:count])
        for name in ours
        for count in range(1, name.count(".") + 2)
    }
    assert parents.intersection(needs_not) == set()
    code = "import asyncio, msgspec, uvloop"
    floor = subprocess.run([*_PYTHON, "-c", code], capture_output=True, check=True).stderr
    others = {name.partition(".")[0] for name in names - _names(floor)} - {"exec_server"}
    others -= {name.partition(".")[0] for name in _names(floor)}
    assert {name for name in others if not name.startswith("_")} <= needs


def test_until_the_first_answer_of_a_server() -> None:
    server = subprocess.Popen(
        [*_PYTHON, "-m", "exec_server", "--listen", "stdio"],
        env=_VARIABLES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(b'{"id":1,"method":"initialize","params":{"clientName":"x"}}\n')
        server.stdin.flush()
        assert "result" in json.loads(server.stdout.readline())
    finally:
        server.terminate()
        _, log = server.communicate(timeout=scaled(DEFAULT_TIMEOUT))
    _check(log, SERVER_NEEDS, SERVER_NEEDS_NOT)


def test_of_a_command_on_a_websocket(ours: ClientTarget) -> None:
    ended = subprocess.run(
        [*_PYTHON, "-m", "exec_server", "exec", ours.url, "--", "true"],
        env=_VARIABLES,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=scaled(DEFAULT_TIMEOUT),
    )
    _check(ended.stderr, CLIENT_NEEDS, CLIENT_NEEDS_NOT)
