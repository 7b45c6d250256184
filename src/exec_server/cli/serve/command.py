"""Checks the arguments of the server, binds its sockets and prints their URLs.

The server itself, `serve.run`, is imported after that: clients that connect meanwhile wait in the
kernel. Therefore the modules at the top of this file are few and small.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from exec_server.cli.serve.arguments import LOG_LEVELS, ignored_flags, parse
from exec_server.errors import RegistryError, StartupError, os_error_text
from exec_server.host import libc
from exec_server.host.libc import block_handled, ignore_unused
from exec_server.net.listen import Address, BoundSocket, TcpAddress, UnixAddress, parse_listen_url

if TYPE_CHECKING:
    import argparse

    from exec_server.cli.serve.watchdog import Watchdog
    from exec_server.net.auth import Authenticator
    from exec_server.net.tls_acceptor import ServerCertificate


_NO_PROC = (
    "Warning: /proc is not mounted: processes that leave their process group live until the "
    "server ends, and without root all sandboxed requests are refused; run `mount -t proc proc "
    "/proc` before the start"
)
_DEFAULT_CLOCK_SKEW = 30
_CAPABILITY_FLAGS = ("ws_token_file", "ws_token_sha256")
_SIGNED_FLAGS = ("ws_shared_secret_file", "ws_issuer", "ws_audience", "ws_max_clock_skew_seconds")


def serve(words: list[str], watchdog: Watchdog) -> int:
    """Run the server until a signal or the end of stdin; returns the exit code."""
    ignore_unused()
    try:
        arguments = parse(words)
        if arguments.log_level not in LOG_LEVELS:
            raise StartupError(f"EXEC_SERVER_LOG must be one of {', '.join(LOG_LEVELS)}")
        _run(arguments, watchdog)
    except SystemExit as end:  # argparse: --help and usage errors
        return end.code if isinstance(end.code, int) else 1
    except (StartupError, RegistryError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace, watchdog: Watchdog) -> None:
    if not os.path.exists("/proc/self/stat"):
        print(_NO_PROC, file=sys.stderr, flush=True)
    ignored = ignored_flags(arguments)
    if ignored is not None:
        print(ignored, file=sys.stderr, flush=True)
    if arguments.remote is not None:
        _import_msgspec()
        from exec_server.cli.serve.run import run_remote

        run_remote(arguments, watchdog)
        return
    addresses = _parse_addresses(arguments)
    authenticate = build_authenticator(arguments)
    if not addresses and arguments.ws_auth is not None:
        raise StartupError("WebSocket auth requires a WebSocket listener, not stdio")
    _check_exposure(addresses, arguments)
    certificate = _load_certificate(addresses, arguments)
    libc.become_subreaper()
    if not addresses:
        _import_msgspec()
        from exec_server.cli.serve.run import run_stdio

        run_stdio(arguments, watchdog)
        return
    bound = _bind(addresses)
    try:
        block_handled()  # once the URL is known, signals end the server in order
        _print_urls(bound)
        if os.isatty(2):
            with suppress(OSError):  # of a terminal that has gone
                print(explanation(bound, arguments.ws_auth), file=sys.stderr, flush=True)
        _import_msgspec()
        from exec_server.cli.serve.run import run_websocket

        run_websocket(arguments, watchdog, bound, authenticate, certificate)
    finally:
        for each in bound:
            each.remove_file()  # after a failure before the listener was opened


def _import_msgspec() -> None:
    """Import msgspec without typing_extensions, a third of a megabyte that nothing else needs."""
    name = "typing_extensions"
    is_imported = name in sys.modules
    if not is_imported:
        sys.modules[name] = None  # type: ignore[assignment]  # makes its import fail
    try:
        import msgspec  # noqa: F401
    finally:
        if not is_imported:
            del sys.modules[name]


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
    from exec_server.net.tls_acceptor import ServerCertificate

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


def explanation(bound: list[BoundSocket], auth: str | None) -> str:
    """For a person who has started a server: what it does, for whom, and how it is stopped."""
    from shlex import quote

    example = quote(bound[0].url)
    lines = [
        "`exec-server --help` lists all commands. This is a server: it runs commands and changes "
        f"files for its clients, with the rights of {_own_name()}.",
        f"A client: exec-server exec {example} -- uname -a",
        *dict.fromkeys(_admitted(each.address, auth) for each in bound),
        "Ctrl-C stops it, and ends all that it runs.",
    ]
    return "\n".join(lines)


def _own_name() -> str:
    import pwd

    user = os.geteuid()
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def _admitted(address: Address, auth: str | None) -> str:
    """Who may be a client at an address."""
    if isinstance(address, UnixAddress):
        return f"Clients of {address.url}: you and root."
    if auth is not None:
        return f"Clients of {address.scheme}://: all who have a token of --ws-auth {auth}."
    if address.is_loopback:
        return (
            "Clients: every user of this machine, without a password. `--listen unix:/PATH` admits "
            "only you, `--ws-auth capability-token` only those with a token."
        )
    return "Clients: everyone who can reach this address, without a password (see --ws-auth)."


def build_authenticator(arguments: argparse.Namespace) -> Authenticator | None:
    """The authenticator that the flags select; raises StartupError if they conflict."""
    token_flags = _is_any_set(arguments, _CAPABILITY_FLAGS)
    signed_flags = _is_any_set(arguments, _SIGNED_FLAGS)
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
        return _capability_token(arguments)
    if arguments.ws_auth == "signed-bearer-token":
        return _signed_bearer_token(arguments)
    return None


def _is_any_set(arguments: argparse.Namespace, names: tuple[str, ...]) -> bool:
    return any(getattr(arguments, name) is not None for name in names)


# The modules of tokens are imported only here: most servers have no flag for them, and all servers
# parse their flags before they print their URL.


def _capability_token(arguments: argparse.Namespace) -> Authenticator:
    import hashlib

    from exec_server.net.auth import capability_token, is_digest

    path, digest = arguments.ws_token_file, arguments.ws_token_sha256
    if path is not None and digest is not None:
        raise StartupError("`--ws-token-file` and `--ws-token-sha256` are mutually exclusive")
    if digest is not None:
        if not is_digest(digest.strip()):
            raise StartupError("--ws-token-sha256 must be a 64-character hex SHA-256 digest")
        return capability_token(bytes.fromhex(digest.strip()))
    if path is None:
        raise StartupError(
            "`--ws-token-file` or `--ws-token-sha256` is required when "
            "`--ws-auth capability-token` is set"
        )
    token = _read_secret(path)
    if (count := len(token.splitlines())) > 1:  # no header can carry such a token
        raise StartupError(
            f"websocket auth secret {path} has {count} lines, and must have one: the token"
        )
    return capability_token(hashlib.sha256(token).digest())


def _signed_bearer_token(arguments: argparse.Namespace) -> Authenticator:
    from exec_server.net.auth import SignedTokens, is_strong_secret, signed_bearer_token

    path = arguments.ws_shared_secret_file
    if path is None:
        raise StartupError(
            "`--ws-shared-secret-file` is required when `--ws-auth signed-bearer-token` is set"
        )
    secret = _read_secret(path)
    if not is_strong_secret(secret):
        raise StartupError(f"signed websocket bearer secret {path} must be at least 32 bytes")
    skew = arguments.ws_max_clock_skew_seconds
    rules = SignedTokens(
        secret,
        (arguments.ws_issuer or "").strip() or None,
        (arguments.ws_audience or "").strip() or None,
        _DEFAULT_CLOCK_SKEW if skew is None else skew,
        time.time,
    )
    return signed_bearer_token(rules)


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
