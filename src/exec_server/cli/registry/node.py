"""Runs a node of `exec-server registry` until a signal."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shlex
import signal
import stat
from dataclasses import asdict
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

from exec_server.cli import logs
from exec_server.cli.errors import UsageError
from exec_server.cli.registry.flags import (
    DEFAULT_LISTEN,
    checked_url,
    data_directory,
    database_url,
    normalised_url,
    open_database,
)
from exec_server.cli.streams import print_status, print_text
from exec_server.errors import StartupError
from exec_server.host.descriptor_limit import raise_descriptor_limit
from exec_server.host.event_loop import run as run_loop
from exec_server.hosting.http_connection import SOCKETS, WANTED_DESCRIPTORS, Capacity, capacity_of
from exec_server.hosting.http_messages import Networks
from exec_server.hosting.node import ServiceOptions
from exec_server.hosting.rules import secret_hash
from exec_server.hosting.service import Listening, Signals, serve
from exec_server.net.listen import BoundSocket, TcpAddress, parse_listen_url
from exec_server.net.tls_acceptor import ServerCertificate
from exec_server.protocol.urls import Url


class _Place(NamedTuple):
    """Where a node listens, and its settings."""

    bound: BoundSocket
    metrics: BoundSocket | None
    listen: str
    options: ServiceOptions


def run_node(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises StartupError."""
    logs.configure(arguments.log_level, arguments.log_format)
    certificate = _certificate(arguments)
    if database_url(arguments) is None:
        _warn_about_modes(data_directory(arguments))
    _hide_memory()
    place = _bind(arguments, certificate)

    async def node() -> None:
        database = open_database(arguments)
        signals = Signals(asyncio.Event(), asyncio.Event(), asyncio.Event())
        _handle_signals(signals)
        await serve(
            place.bound,
            database,
            place.options,
            signals,
            listening=lambda facts: _print_listening(arguments, place, facts),
            metrics_bound=place.metrics,
            certificate=certificate,
        )

    try:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000)
        run_loop(node())
    finally:
        place.bound.close()
        if place.metrics is not None:
            place.metrics.close()
    return 0


def _capacity() -> Capacity:
    """Raise the limit of descriptors; the limits of sockets that follow from it."""
    descriptors = raise_descriptor_limit(WANTED_DESCRIPTORS)
    capacity = capacity_of(descriptors)
    if capacity.sockets < SOCKETS:
        print_status(
            f"this node serves at most {capacity.sockets} sockets instead of {SOCKETS}: its limit "
            f"of open files is {descriptors}; raise it to {WANTED_DESCRIPTORS} with `ulimit -Hn`, "
            "or LimitNOFILE= of systemd"
        )
    return capacity


def _hide_memory() -> None:
    """No core file, and no look into the memory by other processes of the user."""
    try:
        from exec_server.host.libc import hide_memory
    except (ImportError, OSError, AttributeError):  # not Linux
        return
    hide_memory()


def _handle_signals(signals: Signals) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        if signals.drain.is_set():
            signals.stop.set()
        signals.drain.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, signals.reload.set)


def _certificate(arguments: argparse.Namespace) -> ServerCertificate | None:
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together")
    if arguments.tls_cert is None:
        return None
    certificate = ServerCertificate(arguments.tls_cert, arguments.tls_key)
    if certificate.is_key_exposed():
        key = shlex.quote(arguments.tls_key)
        print_status(f"other users can read --tls-key {arguments.tls_key}: run `chmod 600 {key}`")
    return certificate


def _warn_about_modes(directory: Path) -> None:
    """Name what other users may open. Its mode is kept: other programs may need the directory."""
    for path, mode in ((directory, 0o700), (directory / "registry.db", 0o600)):
        try:
            is_exposed = bool(stat.S_IMODE(path.stat().st_mode) & 0o077)
        except OSError:
            continue  # a missing one is created with its mode
        if is_exposed:
            print_status(
                f"other users may open {path}: run `chmod {mode:o} {shlex.quote(str(path))}`"
            )


def _networks(texts: list[str]) -> Networks:
    try:
        return tuple(ip_network(text, strict=False) for text in texts)
    except ValueError as error:
        raise UsageError(f"--trust-forwarded: {error}") from None


def _address(flag: str, text: str) -> TcpAddress:
    try:
        address = parse_listen_url(f"ws://{text}")
    except StartupError:
        raise UsageError(f"{flag} `{text}`: expected IP:PORT, such as 127.0.0.1:7800") from None
    assert isinstance(address, TcpAddress)
    return address


def _bind(arguments: argparse.Namespace, certificate: ServerCertificate | None) -> _Place:
    address = _address("--listen", arguments.listen or DEFAULT_LISTEN)
    public = checked_url("--public-url", arguments.public_url)
    _check_exposure(arguments, address, certificate, public)
    _check_node_url(arguments, address)
    metrics = arguments.metrics_listen
    metrics_address = None if metrics is None else _address("--metrics-listen", metrics)
    token_hash = _metrics_token(arguments)
    _check_metrics(arguments, metrics_address, token_hash)
    trusted = _networks(arguments.trust_forwarded)
    bound = _listen("--listen", address)
    try:
        metrics_bound = None
        if metrics_address is not None:
            metrics_bound = _listen("--metrics-listen", metrics_address)
    except StartupError:
        bound.close()
        raise
    listen = bound.url.removeprefix("ws://")
    own = f"{'http' if certificate is None else 'https'}://{listen}"
    options = ServiceOptions(
        normalised_url(arguments.public_url or own),
        normalised_url(arguments.node_url or own),
        arguments.ticket_seconds,
        arguments.authorization_seconds,
        arguments.stall_seconds,
        arguments.drain_seconds,
        arguments.takeover == "allow",
        trusted,
        _capacity(),
        dict(os.environ),
        metrics_token_hash=token_hash,
        metrics_are_open=address.is_loopback and certificate is None,
        makes_first_tokens=arguments.print_json,
    )
    return _Place(bound, metrics_bound, listen, options)


def _metrics_token(arguments: argparse.Namespace) -> str:
    """The hash of the token for /metrics, empty without one."""
    file = arguments.metrics_token_file
    if file is None:
        return ""
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--metrics-token-file {file}: {error}") from None
    if not token:
        raise UsageError(f"--metrics-token-file {file}: it is empty")
    return secret_hash(token)


def _check_metrics(
    arguments: argparse.Namespace, address: TcpAddress | None, token_hash: str
) -> None:
    if address is None or address.is_loopback or token_hash or arguments.insecure_listen:
        return
    raise UsageError(
        f"refusing to serve /metrics on {address.host} without a token: use --metrics-token-file, "
        "a loopback address, or --insecure-listen"
    )


def _listen(flag: str, address: TcpAddress) -> BoundSocket:
    """Listen; raises StartupError, which names the flag and the address without a scheme."""
    try:
        return BoundSocket(address)
    except StartupError as error:
        text = str(error).replace(f"{address.scheme}://", "", 1)
        raise StartupError(f"{flag}: {text}") from None


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _check_node_url(arguments: argparse.Namespace, address: TcpAddress) -> None:
    """Refuse a URL of this node by which the other nodes of its site could not reach it."""
    node = checked_url("--node-url", arguments.node_url)
    if node is not None and _is_wildcard(node.host):
        raise UsageError(f"--node-url {arguments.node_url}: other nodes cannot connect to it")
    may_have_others = arguments.database is not None or arguments.database_url_file is not None
    if node is None and may_have_others and _is_wildcard(address.host):
        raise UsageError(
            f"--listen {arguments.listen} with a --database needs --node-url: the address by which "
            "other nodes reach this one, such as http://10.0.0.5:7800"
        )


def _check_exposure(
    arguments: argparse.Namespace,
    address: TcpAddress,
    certificate: ServerCertificate | None,
    public: Url | None,
) -> None:
    is_encrypted = certificate is not None or (public is not None and public.secure)
    if address.is_loopback or is_encrypted or arguments.insecure_listen:
        return
    raise UsageError(
        f"refusing to listen on {address.host} without TLS: tokens would cross the network "
        "readable; use --tls-cert and --tls-key, or --public-url https://… with a proxy in front, "
        "or --insecure-listen"
    )


def _print_listening(arguments: argparse.Namespace, place: _Place, facts: Listening) -> None:
    url = place.options.public_url
    if arguments.print_json:
        import json

        first = facts.first_start
        event = {
            "event": "listening",
            "version": 1,
            "url": url,
            "listen": place.listen,
            "node": facts.node,
            "first_start": first is not None,
            **({} if first is None else asdict(first)),
        }
        print_text(json.dumps(event) + "\n")
        return
    lines = [f"listening on {place.listen} as {facts.node}, for {url}"]
    if not facts.has_tenant:
        # Not the tokens: the output of a service is a log.
        lines += [
            "There are no tokens yet: `exec-server registry init`, with the same --data or",
            "--database, makes the first two and shows them once. It can run beside this node.",
        ]
    print_text("\n".join(lines) + "\n")
