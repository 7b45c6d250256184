"""connect(): an environment for a URL, a command or a registry."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Sequence
from typing import Final, TypedDict, TypeGuard

from exec_server.client.engine.dialers import WebSocketDialer
from exec_server.client.engine.session import CLIENT_NAME, Dialer
from exec_server.client.environment import Environment, OnNetworkRequest, display_address
from exec_server.errors import RegistryUnavailable, StartupError
from exec_server.net.client_tls import client_context

# The same as for commands.
_RELAY: Final = r"relay:(https?://.+)/([^/]+)"


class MachineOptions(TypedDict, total=False):
    """The plain options of `connect` about a machine, without secrets: a file may store them.

    This is the one definition of how to connect. Flags, targets.toml, stored configurations of
    adapters and `sync.connect` derive theirs from it; tests/unit/client/test_connect.py lists what
    each of them leaves out, with the reason. `connect` spells the options out because its signature
    is what `help` and editors show.
    """

    registry: str | None
    environment_id: str | None
    executor_key: str | None
    account_id: str | None
    ca_file: str | None
    pin: str | Sequence[str] | None
    allow_insecure_token: bool
    retention: float | str | None


class ConnectOptions(MachineOptions, total=False):
    """The options of `connect`, for functions that pass them on; a test compares both."""

    token: str | None
    tls: ssl.SSLContext | None
    client_name: str
    reconnect: bool
    on_network_request: OnNetworkRequest | None


def connect(
    target: str | None = None,
    *,
    token: str | None = None,
    registry: str | None = None,
    environment_id: str | None = None,
    executor_key: str | None = None,
    account_id: str | None = None,
    tls: ssl.SSLContext | None = None,
    ca_file: str | None = None,
    pin: str | Sequence[str] | None = None,
    allow_insecure_token: bool = False,
    retention: float | str | None = None,
    client_name: str = CLIENT_NAME,
    reconnect: bool = False,
    on_network_request: OnNetworkRequest | None = None,
) -> Environment:
    """An environment, which connects on `async with`; StartupError for invalid arguments.

    `target` is `ws://HOST:PORT` or `wss://HOST`, `unix:/PATH` (a socket of this machine), or
    `stdio:` and a command that serves on its standard streams, quoted as in a shell. Instead of it,
    `registry` (a URL) and `environment_id` name a machine behind a relay, as
    `relay:REGISTRY/ENVIRONMENT` does; `executor_key` is then the fingerprint of its key, if the
    registry is not trusted. `token` authenticates the client to the server or the registry; it is
    sent only to this machine or over TLS, unless `allow_insecure_token` is set. `ca_file` names a
    file with the root certificates to trust, `pin` the SHA-256 fingerprint of the only certificate
    to accept, or a list of several; `tls` is a context of your own instead of them. `retention` is
    how long the server is to keep the session without a connection, in seconds or as "30m", "8h" or
    "1d"; the client goes on trying for as long as the server grants (default: 45 s). With
    `reconnect`, the first call after a session was lost opens a new one, as `Environment.reconnect`
    does. `on_network_request` decides about hosts that the rules of a process with a `networkProxy`
    do not list; without it they are denied.
    """
    options: ConnectOptions = {
        "token": token,
        "registry": registry,
        "environment_id": environment_id,
        "executor_key": executor_key,
        "account_id": account_id,
        "tls": tls,
        "ca_file": ca_file,
        "pin": pin,
        "allow_insecure_token": allow_insecure_token,
    }
    if registry is None and _is_relay(target):
        (registry, environment_id), target = _relay_parts(target), None
        options |= {"registry": registry, "environment_id": environment_id}
    dialer = make_dialer(target, options)
    from exec_server.client.engine.stdio import StdioDialer  # slow to import; commands skip it

    return Environment(
        dialer,
        client_name=client_name,
        reconnect=reconnect,
        retention=retention,
        address=display_address(target, registry, environment_id),
        stderr=dialer.last_lines if isinstance(dialer, StdioDialer) else (),
        on_network_request=on_network_request,
    )


def make_dialer(
    target: str | None,
    options: ConnectOptions,
    *,
    on_retry: Callable[[RegistryUnavailable], None] | None = None,
) -> Dialer:
    """The dialer of a target or of the registry in `options`; raises StartupError.

    `on_retry` gets the first error of the first connection through a registry.
    """
    tls = _context(options.get("tls"), options.get("ca_file"), options.get("pin"))
    token = options.get("token")
    registry = options.get("registry")
    allow_insecure_token = options.get("allow_insecure_token", False)
    environment_id = options.get("environment_id")
    if registry is None:
        if target is not None and environment_id is not None:
            raise StartupError("environment_id= needs registry=, and excludes a target")
        return _direct_dialer(target, token, tls, allow_insecure_token=allow_insecure_token)
    if target is not None or environment_id is None or token is None:
        raise StartupError("registry= needs environment_id= and token=, and excludes a target")
    from exec_server.client.engine.relay import RelayDialer  # slow to import

    return RelayDialer(
        registry,
        environment_id,
        token=token,
        account_id=options.get("account_id"),
        executor_key_fingerprint=options.get("executor_key"),
        tls=tls,
        allow_insecure_token=allow_insecure_token,
        on_retry=on_retry,
    )


def _direct_dialer(
    target: str | None, token: str | None, tls: ssl.SSLContext | None, *, allow_insecure_token: bool
) -> Dialer:
    if target is None:
        raise StartupError("no target: pass a URL, stdio:COMMAND or registry=")
    if target.startswith("stdio:"):
        return _stdio_dialer(target.removeprefix("stdio:"))
    if not target.startswith(("ws:", "wss:", "unix:")):
        hint = "; names of targets.toml are for commands" if _is_name(target) else ""
        raise StartupError(
            f"invalid exec-server URL {display_address(target)!r}: use ws://HOST:PORT, "
            f"wss://HOST, unix:/PATH, stdio:COMMAND or relay:REGISTRY/ENVIRONMENT{hint}"
        )
    return WebSocketDialer(target, token=token, tls=tls, allow_insecure_token=allow_insecure_token)


def _is_relay(target: str | None) -> TypeGuard[str]:
    if target is not None and not isinstance(target, str):
        raise TypeError(f"target must be str, not {type(target).__name__}: ws://HOST:PORT")
    return target is not None and target.startswith("relay:")


def _relay_parts(target: str) -> tuple[str, str]:
    parts = re.fullmatch(_RELAY, target, re.DOTALL)
    if parts is None:
        raise StartupError(
            "a relay target is relay:https://REGISTRY/ENVIRONMENT; or pass registry= and "
            "environment_id="
        )
    return parts[1], parts[2]


def _is_name(target: str) -> bool:
    return re.fullmatch(r"[\w.-]+", target) is not None


def _context(
    tls: ssl.SSLContext | None, ca_file: str | None, pin: str | Sequence[str] | None
) -> ssl.SSLContext | None:
    if ca_file is None and pin is None:
        return tls
    if tls is not None:
        raise StartupError("tls= excludes ca_file= and pin=")
    return client_context(ca_file, (pin,) if isinstance(pin, str) else pin or ())


def _stdio_dialer(command: str) -> Dialer:
    import shlex

    from exec_server.client.engine.stdio import StdioDialer

    try:
        return StdioDialer(shlex.split(command))
    except ValueError as error:
        raise StartupError(f"cannot parse the command after stdio: {error}") from None
