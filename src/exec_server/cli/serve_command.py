"""Runs the server that the arguments describe, until a signal or the end of stdin."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import uvloop

from exec_server.cli import logs
from exec_server.cli.auth_flags import build_authenticator
from exec_server.cli.server_arguments import parse
from exec_server.cli.signal_handlers import SignalHandlers
from exec_server.errors import RegistryError, StartupError, os_error_text
from exec_server.host import libc
from exec_server.host.secret_variables import STRIPPED_NAMES
from exec_server.host.signals import ignore_unused
from exec_server.sandbox.runtime.placeholders import RegisterCleanup
from exec_server.server.serve import Options, serve_stdio, serve_websocket

_ADDRESS = re.compile(r"(?:(\d+\.\d+\.\d+\.\d+)|\[([0-9a-fA-F:.]+)\]):(\d{1,5})")
_BACKLOG = 1024
_NO_PROC = (
    "Warning: /proc is not mounted: processes that leave their process group live until the "
    "server ends, and without root all sandboxed requests are refused; run `mount -t proc proc "
    "/proc` before the start"
)


def serve(words: list[str], register_cleanup: RegisterCleanup) -> int:
    """Run the server until a signal or the end of stdin; returns the exit code.

    `register_cleanup` gets the paths that have to be removed if this process is killed.
    """
    ignore_unused()
    try:
        arguments = parse(words)
        if arguments.log_level not in logs.LEVELS:
            raise StartupError(f"EXEC_SERVER_LOG must be one of {', '.join(logs.LEVELS)}")
        _run(arguments, register_cleanup)
    except SystemExit as end:  # argparse: --help and usage errors
        return end.code if isinstance(end.code, int) else 1
    except (StartupError, RegistryError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace, register_cleanup: RegisterCleanup) -> None:
    logs.configure(arguments.log_level, arguments.log_format)
    if not os.path.exists("/proc/self/stat"):
        print(_NO_PROC, file=sys.stderr, flush=True)
    if arguments.remote is not None:
        _run_remote(arguments, register_cleanup)
        return
    address = _parse_listen_url(arguments.listen)
    authenticate = build_authenticator(arguments)
    if address is None and arguments.ws_auth is not None:
        raise StartupError("WebSocket auth requires a WebSocket listener, not stdio")
    options = _options(arguments, register_cleanup)
    libc.hide_memory()
    libc.become_subreaper()
    variables = _inheritable_variables()
    stop = asyncio.Event()
    if address is None:
        server = serve_stdio(stop, options=options, variables=variables)
        uvloop.run(_run_until_signal(server, stop))
    else:
        needs_loopback = authenticate is None and not arguments.allow_unauthenticated
        if needs_loopback and not ipaddress.ip_address(address[0]).is_loopback:
            raise StartupError(
                f"refusing to listen on {address[0]} without authentication: every client that "
                "can reach it could run commands; use --ws-auth or --allow-unauthenticated"
            )
        bound = _bind(address)
        hosts = frozenset(name.lower() for name in arguments.allow_host)
        server = serve_websocket(
            bound,
            stop,
            options=options,
            variables=variables,
            authenticate=authenticate,
            allowed_hosts=hosts if authenticate is None else None,
        )
        uvloop.run(
            _run_until_signal(server, stop, bound=bound, watch_stdin=arguments.exit_on_stdin_close)
        )


def _options(arguments: argparse.Namespace, register_cleanup: RegisterCleanup) -> Options:
    return Options(
        arguments.concurrent_requests,
        arguments.session_retention,
        register_cleanup,
        legacy_sandbox_forms=arguments.legacy_sandbox_forms,
    )


def _run_remote(arguments: argparse.Namespace, register_cleanup: RegisterCleanup) -> None:
    # Imported only here: a listening server does not need the registry client.
    from exec_server.cli.remote_mode import RemoteMode
    from exec_server.registry.secrets import SECRET_NAMES

    options = _options(arguments, register_cleanup)
    libc.hide_memory()
    libc.become_subreaper()
    remote = RemoteMode(arguments, dict(os.environ))
    variables = _inheritable_variables(SECRET_NAMES)
    stop = asyncio.Event()
    # With --executor-credential-stdin, the credential reader handles the end of stdin.
    watch_stdin = arguments.exit_on_stdin_close and not arguments.executor_credential_stdin
    server = remote.run(stop, options, variables)
    uvloop.run(_run_until_signal(server, stop, watch_stdin=watch_stdin))


async def _run_until_signal(
    server: Coroutine[Any, Any, None],
    stop: asyncio.Event,
    *,
    bound: socket.socket | None = None,
    watch_stdin: bool = False,
) -> None:
    # The loaded modules stay, so the garbage collector can skip them. Requests create no
    # reference cycles, so it need not run often either.
    gc.freeze()
    gc.set_threshold(10_000)
    loop = asyncio.get_running_loop()
    with contextlib.closing(SignalHandlers(loop, stop.set)):
        if bound is not None:
            _print_url(bound)  # only now do signals end the server in order
        if watch_stdin:
            threading.Thread(target=_wait_for_end_of_stdin, args=(loop, stop), daemon=True).start()
        await server


def _wait_for_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    # The reaper blocks SIGCHLD for threads started after it. This thread is older and must block
    # the signal itself, or the kernel could deliver it here instead of to the reaper.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        while os.read(0, 65_536):
            pass
    except OSError:
        pass  # an unreadable stdin counts as closed
    loop.call_soon_threadsafe(stop.set)


def _inheritable_variables(secret: frozenset[str] = frozenset()) -> dict[str, str]:
    """Remove secrets from os.environ, and return the rest, which children may inherit."""
    for name in [name for name in os.environ if name.upper() in STRIPPED_NAMES | secret]:
        del os.environ[name]
    return dict(os.environ)


# ---- addresses ------------------------------------------------------------------------


def _parse_listen_url(url: str) -> tuple[str, int] | None:
    """Address and port of a --listen URL; None for stdio."""
    if url in ("stdio", "stdio://"):
        return None
    if not url.startswith("ws://"):
        raise StartupError(f"unsupported --listen URL `{url}`; expected `ws://IP:PORT` or `stdio`")
    match = _ADDRESS.fullmatch(url.removeprefix("ws://"))
    try:
        if match is None:
            raise ValueError(url)
        host = str(ipaddress.ip_address(match[1] or match[2]))
        port = int(match[3])
        if port > 65_535:
            raise ValueError(url)
    except ValueError:
        raise StartupError(
            f"invalid websocket --listen URL `{url}`; expected `ws://IP:PORT`"
        ) from None
    return host, port


def _bind(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise StartupError(os_error_text(error)) from None
    return bound


def _print_url(bound: socket.socket) -> None:
    host, port = bound.getsockname()[:2]
    try:
        print(f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}", flush=True)
    except OSError as error:
        raise StartupError(f"cannot write the URL to stdout: {os_error_text(error)}") from None
