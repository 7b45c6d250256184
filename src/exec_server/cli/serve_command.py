"""Runs the server that the arguments describe, until a signal or the end of stdin."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
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
from exec_server.net.listen import Address, BoundSocket, TcpAddress, parse_listen_url
from exec_server.net.server_certificate import ServerCertificate
from exec_server.sandbox.runtime.placeholders import RegisterCleanup
from exec_server.server.serve import Options, serve_stdio, serve_websocket

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
    addresses = _parse_addresses(arguments)
    authenticate = build_authenticator(arguments)
    if not addresses and arguments.ws_auth is not None:
        raise StartupError("WebSocket auth requires a WebSocket listener, not stdio")
    _check_exposure(addresses, arguments)
    certificate = _load_certificate(addresses, arguments)
    options = _options(arguments, register_cleanup)
    libc.hide_memory()
    libc.become_subreaper()
    variables = _inheritable_variables()
    stop = asyncio.Event()
    if not addresses:
        server = serve_stdio(stop, options=options, variables=variables)
        uvloop.run(_run_until_signal(server, stop))
        return
    bound = _bind(addresses)
    hosts = frozenset(name.lower() for name in arguments.allow_host)
    reload = asyncio.Event() if certificate is not None else None
    server = serve_websocket(
        bound,
        stop,
        options=options,
        variables=variables,
        authenticate=authenticate,
        allowed_hosts=hosts if authenticate is None else None,
        certificate=certificate,
        reload=reload,
    )
    run = _run_until_signal(
        server, stop, bound=bound, watch_stdin=arguments.exit_on_stdin_close, reload=reload
    )
    try:
        uvloop.run(run)
    finally:
        for each in bound:
            each.remove_file()  # after a failure before the listener was opened


def _options(arguments: argparse.Namespace, register_cleanup: RegisterCleanup) -> Options:
    return Options(
        arguments.concurrent_requests,
        arguments.session_retention,
        register_cleanup,
        legacy_sandbox_forms=arguments.legacy_sandbox_forms,
        allow_port_hosts=arguments.allow_port_hosts,
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
    bound: list[BoundSocket] | None = None,
    watch_stdin: bool = False,
    reload: asyncio.Event | None = None,
) -> None:
    # The loaded modules stay, so the garbage collector can skip them. Requests create no
    # reference cycles, so it need not run often either.
    gc.freeze()
    gc.set_threshold(10_000)
    loop = asyncio.get_running_loop()
    handlers = SignalHandlers(loop, stop.set, None if reload is None else reload.set)
    with contextlib.closing(handlers):
        if bound is not None:
            _print_urls(bound)  # only now do signals end the server in order
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


def _parse_addresses(arguments: argparse.Namespace) -> list[Address]:
    """The addresses of all --listen flags, none for stdio; raises StartupError."""
    parsed = [parse_listen_url(url) for url in arguments.listen]
    addresses = [address for address in parsed if address is not None]
    if addresses and len(addresses) < len(parsed):
        raise StartupError("--listen stdio and other --listen URLs exclude each other")
    return addresses


def _check_exposure(addresses: list[Address], arguments: argparse.Namespace) -> None:
    if arguments.ws_auth is not None or arguments.allow_unauthenticated:
        return
    for address in addresses:
        if isinstance(address, TcpAddress) and not address.is_loopback:
            raise StartupError(
                f"refusing to listen on {address.host} without authentication: every client that "
                "can reach it could run commands; use --ws-auth or --allow-unauthenticated"
            )


def _load_certificate(
    addresses: list[Address], arguments: argparse.Namespace
) -> ServerCertificate | None:
    has_files = (arguments.tls_cert is not None, arguments.tls_key is not None)
    needs_files = any(isinstance(a, TcpAddress) and a.scheme == "wss" for a in addresses)
    if not needs_files:
        if any(has_files):
            raise StartupError("--tls-cert and --tls-key require --listen wss://IP:PORT")
        return None
    if not all(has_files):
        raise StartupError(
            "--listen wss:// requires --tls-cert and --tls-key; `exec-server tls-init` makes both"
        )
    certificate = ServerCertificate(arguments.tls_cert, arguments.tls_key)
    if certificate.is_key_exposed():
        print(
            f"Warning: other users can read --tls-key {arguments.tls_key}: run "
            f"`chmod 600 {arguments.tls_key}`",
            file=sys.stderr,
            flush=True,
        )
    return certificate


def _bind(addresses: list[Address]) -> list[BoundSocket]:
    bound: list[BoundSocket] = []
    try:
        for address in addresses:
            bound.append(BoundSocket(address))
    except StartupError:
        for earlier in bound:
            earlier.close()
        raise
    return bound


def _print_urls(bound: list[BoundSocket]) -> None:
    try:
        print("\n".join(each.url for each in bound), flush=True)
    except OSError as error:
        raise StartupError(f"cannot write the URL to stdout: {os_error_text(error)}") from None
