"""`exec-server mcp`: commands and files of a target as tools of the Model Context Protocol."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.targets import TargetParser, chosen_target, with_access_flags

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from mcp.server.mcpserver import MCPServer

    from exec_server.cli.streams import StdinReader
    from exec_server.client.environment import Environment


# A request holds at most the content of a file. A longer line ends the connection.
LINE_BYTES: Final = 8 * 1_048_576
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

_DESCRIPTION: Final = """\
Serve an MCP client, such as Codex, Claude Code or Cursor, on stdin and stdout: its model runs
commands and changes files on the target. What it has started ends with it.
"""
_EPILOG: Final = """\
It needs the package mcp: pip install '.[mcp]' in a checkout of exec-server, or pip install
'exec-server[mcp] @ URL' with the URL of one. docs/mcp.md lists the tools.

examples:
  exec-server mcp build
  exec-server mcp --sandbox workspace-write --cwd /srv/app ws://127.0.0.1:7700
  exec-server mcp --http 8000 --http-token-env MCP_TOKEN build
"""


def build_parser() -> CommandParser:
    parser = TargetParser("mcp", _DESCRIPTION, _EPILOG)
    parser.add_argument("target", metavar="TARGET", nargs="?")
    parser.add_argument(
        "--cwd", metavar="DIR", help="where relative paths start (default: that of the server)"
    )
    parser.add_argument(
        "--read-only", action="store_true", help="offer only the tools that read files"
    )
    parser.add_argument(
        "--sandbox",
        metavar="POLICY",
        help="confine commands and files: read-only, workspace-write (DIR and /tmp), or a JSON "
        "file as `exec-server sandbox run --policy` takes it (default: not confined)",
    )
    group = parser.add_argument_group("http", "Streamable HTTP instead of stdin and stdout.")
    group.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        help="serve at http://HOST:PORT/mcp, on this machine only (default host: 127.0.0.1)",
    )
    group.add_argument("--http-token-file", metavar="FILE", help="file with the token of clients")
    group.add_argument(
        "--http-token-env", metavar="NAME", help="environment variable with the token of clients"
    )
    return with_access_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from exec_server.cli.errors import CommandError
    from exec_server.cli.start_options import command_sandbox, load_policy

    target = chosen_target(arguments)
    policy = load_policy("--sandbox", arguments.sandbox)
    address, token = http_options(arguments)
    try:
        from exec_server.adapters import mcp as adapter
    except ImportError as error:
        raise CommandError(str(error)) from None
    from exec_server.adapters.mcp_commands import CommandSessions
    from exec_server.cli.connection import open_environment, run_until_signal

    listener = None if address is None else listen(*address)

    async def work() -> int:
        async with open_environment(target) as environment:
            command_policy = command_sandbox(policy, arguments.cwd, environment.info)
            sandbox, cwd = adapter.confined(environment, command_policy, arguments.cwd)
            if arguments.cwd is not None:
                await _check_directory(environment, cwd)
            async with CommandSessions(environment, sandbox) as sessions:
                server = adapter.build_server(
                    environment, sessions, cwd, sandbox, is_read_only=arguments.read_only
                )
                if listener is None:
                    await _serve_stdio(server)
                else:
                    await _serve_http(server, listener, token, target.label)
        return 0

    return run_until_signal(work)


async def _check_directory(environment: Environment, path: str) -> None:
    """Raise CommandError, because without its directory every tool would fail."""
    from exec_server.cli.errors import CommandError
    from exec_server.client.exceptions import FileError

    try:
        is_directory = (await environment.files.stat(path)).is_directory
    except FileError as error:
        raise CommandError(f"--cwd {path}: {error.strerror}") from None
    if not is_directory:
        raise CommandError(f"--cwd {path}: Not a directory")


async def _serve_stdio(server: MCPServer) -> None:
    from exec_server.adapters.mcp_stdio import serve_stdio
    from exec_server.cli.errors import CommandError
    from exec_server.cli.streams import OutputWriter, StdinReader
    from exec_server.errors import ProtocolError

    writer = OutputWriter()
    try:
        await serve_stdio(server, read_lines(StdinReader(0)), lambda data: writer.write(1, data))
    except ProtocolError:
        raise CommandError(f"the client has sent a line of more than {LINE_BYTES} bytes") from None


async def _serve_http(server: MCPServer, listener: socket.socket, token: str, label: str) -> None:
    from exec_server.adapters.mcp_http import serve_http
    from exec_server.cli.streams import print_notice
    from exec_server.protocol.urls import bracketed

    host, port = listener.getsockname()[:2]
    address = bracketed(host)
    await serve_http(
        server,
        listener,
        host,
        token,
        lambda: print_notice(f"serving {label} at http://{address}:{port}/mcp"),
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket of this machine; raises CommandError."""
    import os
    import socket

    from exec_server.cli.errors import CommandError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise CommandError(
            f"--http: cannot listen at {host}:{port}: {os.strerror(error.errno or 0)}"
        ) from None


def http_options(arguments: argparse.Namespace) -> tuple[tuple[str, int] | None, str]:
    """The address and the token of --http, if it is given; raises UsageError."""
    from exec_server.client.targets import AccessOptions

    file, name = arguments.http_token_file, arguments.http_token_env
    if sum(each is not None for each in (file, name)) != (arguments.http is not None):
        raise UsageError(
            "--http needs a token, by one of --http-token-file and --http-token-env, which need "
            "--http"
        )
    if arguments.http is None:
        return None, ""
    token = AccessOptions(token_file=file, token_env=name).read_token()
    assert token is not None
    return parse_address(arguments.http), token


def parse_address(text: str) -> tuple[str, int]:
    """The host and port of --http; raises UsageError."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or _LOOPBACK[0]
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UsageError(f"--http: {text!r} is no [HOST:]PORT")
    if host not in _LOOPBACK:
        raise UsageError(
            f"--http: {host} is not this machine, and the token would be sent unencrypted: put a "
            "proxy with TLS before it"
        )
    return host, int(port)


async def read_lines(stdin: StdinReader) -> AsyncIterator[str]:
    """Lines of stdin, other bytes than UTF-8 as surrogates; ProtocolError if one is too long."""
    from exec_server.net.lines import LineSplitter

    splitter = LineSplitter(LINE_BYTES, must_be_utf8=False)
    while data := await stdin.read():
        splitter.feed(data)
        while (line := splitter.next_line()) is not None:
            yield line.decode(errors="surrogateescape")
