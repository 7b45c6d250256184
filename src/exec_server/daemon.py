"""The server process behind the command: addresses, secrets, signals."""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from exec_server import logs
from exec_server.arguments import parse
from exec_server.core import system
from exec_server.core.command import STRIPPED_NAMES
from exec_server.errors import RegistryError, StartupError, os_error_text
from exec_server.protocol import older_sandbox
from exec_server.server import Options, serve_stdio, serve_websocket
from exec_server.transports.auth import (
    Authenticator,
    SignedTokens,
    capability_token,
    is_digest,
    is_strong_secret,
    signed_bearer_token,
)

_ADDRESS = re.compile(r"(?:(\d+\.\d+\.\d+\.\d+)|\[([0-9a-fA-F:.]+)\]):(\d{1,5})")
_BACKLOG = 1024
_DEFAULT_CLOCK_SKEW = 30

_CAPABILITY_FLAGS = ("ws_token_file", "ws_token_sha256")
_SIGNED_FLAGS = (
    "ws_shared_secret_file",
    "ws_issuer",
    "ws_audience",
    "ws_max_clock_skew_seconds",
)


def serve(words: list[str], remember: Callable[[str, bool], None]) -> int:
    """Serve as the arguments say until a signal or the end of stdin; returns the exit code.

    `remember` is told of what has to be removed should this process be killed.
    """
    try:
        arguments = parse(words)
        if arguments.log_level not in logs.LEVELS:
            raise StartupError(f"EXEC_SERVER_LOG must be one of {', '.join(logs.LEVELS)}")
        _run(arguments, remember)
    except SystemExit as end:  # argparse: --help and mistakes
        return end.code if isinstance(end.code, int) else 1
    except (StartupError, RegistryError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace, remember: Callable[[str, bool], None]) -> None:
    logs.configure(arguments.log_level, arguments.log_format)
    if arguments.remote is not None:
        _run_remote(arguments, remember)
        return
    address = _listen_address(arguments.listen)
    authenticate = _authenticator(arguments)
    if address is None and arguments.ws_auth is not None:
        raise StartupError("WebSocket auth requires a WebSocket listener, not stdio")
    older_sandbox.settings.translates = arguments.older_sandbox_forms
    options = Options(arguments.concurrent_requests, arguments.session_retention, remember)
    system.hide_memory()
    system.become_subreaper()
    variables = _inheritable_variables()
    stop = asyncio.Event()
    if address is None:
        job = serve_stdio(stop, options=options, variables=variables)
        uvloop.run(_until_signalled(job, stop))
    else:
        open_to_all = authenticate is None and not arguments.allow_unauthenticated
        if open_to_all and not ipaddress.ip_address(address[0]).is_loopback:
            raise StartupError(
                f"refusing to listen on {address[0]} without authentication: anybody who can "
                "reach it could run commands here; use --ws-auth, or --allow-unauthenticated"
            )
        bound = _bind(address)
        hosts = frozenset(name.lower() for name in arguments.allow_host)
        job = serve_websocket(
            bound,
            stop,
            options=options,
            variables=variables,
            authenticate=authenticate,
            allowed_hosts=hosts if authenticate is None else None,
        )
        uvloop.run(
            _until_signalled(job, stop, bound=bound, watch_stdin=arguments.exit_on_stdin_close)
        )


def _run_remote(arguments: argparse.Namespace, remember: Callable[[str, bool], None]) -> None:
    # Imported only here: a server that listens has no use for what it takes to ask a registry.
    from exec_server.registry.secrets import SECRET_NAMES
    from exec_server.remote_command import RemoteJob

    older_sandbox.settings.translates = arguments.older_sandbox_forms
    options = Options(arguments.concurrent_requests, arguments.session_retention, remember)
    system.hide_memory()
    system.become_subreaper()
    job = RemoteJob(arguments, dict(os.environ))
    variables = _inheritable_variables(SECRET_NAMES)
    stop = asyncio.Event()
    # Where stdin brings credentials, these say when it ends.
    watch_stdin = arguments.exit_on_stdin_close and not arguments.executor_credential_stdin
    uvloop.run(_until_signalled(job.run(stop, options, variables), stop, watch_stdin=watch_stdin))


async def _until_signalled(
    job: Coroutine[Any, Any, None],
    stop: asyncio.Event,
    *,
    bound: socket.socket | None = None,
    watch_stdin: bool = False,
) -> None:
    # What is loaded stays: the collector need not look at it again. Requests make no cycles, so
    # it need not look often either.
    gc.freeze()
    gc.set_threshold(10_000)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if bound is not None:
        _announce(bound)  # not before a signal would end us properly
    if watch_stdin:
        threading.Thread(target=_wait_for_end_of_stdin, args=(loop, stop), daemon=True).start()
    await job


def _wait_for_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    # This thread is older than the reaper, which blocks the signal for those that come after it:
    # a thread that did not block it would be told of the ends of children in its place.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        while os.read(0, 65_536):
            pass
    except OSError:
        pass  # a stdin that cannot be read has ended
    loop.call_soon_threadsafe(stop.set)


def _inheritable_variables(secret: frozenset[str] = frozenset()) -> dict[str, str]:
    """The environment that children may inherit; secrets are gone from ours too from here on."""
    for name in [name for name in os.environ if name.upper() in STRIPPED_NAMES | secret]:
        del os.environ[name]
    return dict(os.environ)


# ---- addresses ------------------------------------------------------------------------


def _listen_address(url: str) -> tuple[str, int] | None:
    """Address and port of a ws:// URL, None for stdio."""
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


def _announce(bound: socket.socket) -> None:
    host, port = bound.getsockname()[:2]
    print(f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}", flush=True)


# ---- secrets --------------------------------------------------------------------------


def _authenticator(arguments: argparse.Namespace) -> Authenticator | None:
    """What the --ws-* flags ask for; raises StartupError where they do not fit together."""
    token_flags = _given(arguments, _CAPABILITY_FLAGS)
    signed_flags = _given(arguments, _SIGNED_FLAGS)
    if arguments.ws_auth is None and (token_flags or signed_flags):
        raise StartupError(
            "websocket auth flags require `--ws-auth capability-token` or "
            "`--ws-auth signed-bearer-token`"
        )
    if arguments.ws_auth == "capability-token" and signed_flags:
        raise StartupError(
            "`--ws-shared-secret-file`, `--ws-issuer`, `--ws-audience`, and "
            "`--ws-max-clock-skew-seconds` require `--ws-auth signed-bearer-token`"
        )
    if arguments.ws_auth == "signed-bearer-token" and token_flags:
        raise StartupError(
            "`--ws-token-file` and `--ws-token-sha256` require `--ws-auth capability-token`, "
            "not `signed-bearer-token`"
        )
    if arguments.ws_auth == "capability-token":
        return capability_token(_token_digest(arguments))
    if arguments.ws_auth == "signed-bearer-token":
        return signed_bearer_token(_signed_tokens(arguments))
    return None


def _given(arguments: argparse.Namespace, flags: tuple[str, ...]) -> bool:
    return any(getattr(arguments, flag) is not None for flag in flags)


def _token_digest(arguments: argparse.Namespace) -> bytes:
    import hashlib

    path, digest = arguments.ws_token_file, arguments.ws_token_sha256
    if path is not None and digest is not None:
        raise StartupError("`--ws-token-file` and `--ws-token-sha256` are mutually exclusive")
    if digest is not None:
        if not is_digest(digest.strip()):
            raise StartupError("--ws-token-sha256 must be a 64-character hex SHA-256 digest")
        return bytes.fromhex(digest.strip())
    if path is None:
        raise StartupError(
            "`--ws-token-file` or `--ws-token-sha256` is required when "
            "`--ws-auth capability-token` is set"
        )
    return hashlib.sha256(_read_secret(path)).digest()


def _signed_tokens(arguments: argparse.Namespace) -> SignedTokens:
    path = arguments.ws_shared_secret_file
    if path is None:
        raise StartupError(
            "`--ws-shared-secret-file` is required when `--ws-auth signed-bearer-token` is set"
        )
    secret = _read_secret(path)
    if not is_strong_secret(secret):
        raise StartupError(f"signed websocket bearer secret {path} must be at least 32 bytes")
    skew = arguments.ws_max_clock_skew_seconds
    return SignedTokens(
        secret,
        (arguments.ws_issuer or "").strip() or None,
        (arguments.ws_audience or "").strip() or None,
        _DEFAULT_CLOCK_SKEW if skew is None else skew,
        time.time,
    )


def _read_secret(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            secret = file.read().strip()
    except OSError as error:
        text = os_error_text(error)
        raise StartupError(f"failed to read websocket auth secret {path}: {text}") from None
    if not secret:
        raise StartupError(f"websocket auth secret {path} must not be empty")
    return secret
