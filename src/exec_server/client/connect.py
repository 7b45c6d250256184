"""connect(): an environment for a URL, a name of targets.toml, a command or a registry."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from typing import TypedDict

from exec_server.client.arguments import check_number
from exec_server.client.engine.dialers import OnRetry, PatientDialer, WebSocketDialer
from exec_server.client.engine.session import CLIENT_NAME, Dialer
from exec_server.client.environment import Environment, OnNetworkRequest
from exec_server.client.logins import find_login
from exec_server.client.targets import AccessOptions, Target, find_target, without_secrets
from exec_server.errors import StartupError
from exec_server.net.client_tls import client_context


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
    wait: float | None


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
    wait: float | None = None,
    client_name: str = CLIENT_NAME,
    reconnect: bool = False,
    on_network_request: OnNetworkRequest | None = None,
) -> Environment:
    """An environment, which connects on `async with`; StartupError for invalid arguments.

    `target` is `ws://HOST:PORT` or `wss://HOST`, `unix:/PATH` (a socket of this machine), `stdio:`
    and a command that serves on its standard streams, quoted as in a shell, or a name of
    targets.toml, whose table has options too: those given here replace them. Without a target, or
    as `:`, it is the one that the variable EXEC_SERVER_TARGET names. Instead of it, `registry` (a
    URL) and `environment_id` name a machine behind a relay, as `relay:REGISTRY/ENVIRONMENT` does;
    `executor_key` is then the fingerprint of its key, if the registry is not trusted. `token`
    authenticates the client to the server or the registry (by default the token of `exec-server
    login`); it is sent only to this machine or over TLS, unless `allow_insecure_token` is set.
    `ca_file` names a file with the root certificates to trust, `pin` the SHA-256 fingerprint of the
    only certificate to accept, or a list of several; `tls` is a context of your own instead of
    them. `retention` is how long the server is to keep the session without a connection, in seconds
    or as "30m", "8h" or "1d"; the client goes on trying for as long as the server grants (default:
    45 s). `wait` is for how many seconds a server that is not there yet is tried again. With
    `reconnect`, the first call after a session was lost opens a new one, as `Environment.reconnect`
    does. `on_network_request` decides about hosts that the rules of a process with a `networkProxy`
    do not list; without it they are denied.
    """
    access = AccessOptions(
        token=token,
        executor_key=executor_key,
        ca_file=ca_file,
        pin=(pin,) if isinstance(pin, str) else tuple(pin or ()),
        allow_insecure_token=allow_insecure_token,
        retention=retention,
        wait=_checked_wait(wait),
    )
    if tls is not None and (access.ca_file is not None or access.pin):
        raise StartupError("tls= excludes ca_file= and pin=")
    found = _find(target, registry, environment_id, access)
    dialer = make_dialer(found, account_id=account_id, tls=tls)
    return Environment(
        dialer,
        client_name=client_name,
        reconnect=reconnect,
        retention=found.access.retention,
        address=found.place,
        stderr=_stderr_of(dialer),
        on_network_request=on_network_request,
    )


def _stderr_of(dialer: Dialer) -> Sequence[str]:
    """The last lines of a program's stderr, for errors."""
    from exec_server.client.engine.stdio import StdioDialer  # slow to import; commands skip it

    return dialer.last_lines if isinstance(dialer, StdioDialer) else ()


def _checked_wait(wait: float | None) -> float | None:
    check_number(wait, "wait")
    if wait is not None and not wait >= 0:  # NaN is not, either
        raise StartupError(f"wait must be at least 0 seconds, not {wait:g}")
    return wait


def starts_program(target: str | None, options: ConnectOptions) -> bool:
    """Whether `connect` would start a program on this machine; raises StartupError."""
    registry, environment_id = options.get("registry"), options.get("environment_id")
    return _find(target, registry, environment_id, AccessOptions()).argv is not None


def _find(
    target: str | None, registry: str | None, environment_id: str | None, access: AccessOptions
) -> Target:
    if target is not None and not isinstance(target, str):
        raise TypeError(f"target must be str, not {type(target).__name__}: ws://HOST:PORT")
    if registry is None and environment_id is None:
        return find_target(target, access)
    if target is not None or registry is None or environment_id is None:
        raise StartupError("registry= and environment_id= need each other, and exclude a target")
    label = f"relay:{registry}/{environment_id}"
    return Target(label, registry=registry, environment_id=environment_id, access=access)


def make_dialer(
    target: Target,
    *,
    account_id: str | None = None,
    tls: ssl.SSLContext | None = None,
    on_stderr: Callable[[str], None] | None = None,
    on_retry: OnRetry | None = None,
) -> Dialer:
    """The dialer of a target; raises StartupError.

    `tls` replaces its certificates. `on_stderr` gets each line of a program's stderr. `on_retry`
    gets the first error of the first connection, if that is tried again.
    """
    if target.argv is not None:
        from exec_server.client.engine.stdio import StdioDialer  # slow to import

        return StdioDialer(target.argv, on_stderr=on_stderr)
    wait = target.access.wait
    inner_on_retry = None if wait else on_retry
    if target.registry is None:
        dialer: Dialer = _web_socket_dialer(target, tls)
    else:
        dialer = _relay_dialer(target, account_id, tls, inner_on_retry)
    return PatientDialer(dialer, wait, on_retry) if wait else dialer


def _web_socket_dialer(target: Target, tls: ssl.SSLContext | None) -> WebSocketDialer:
    access = target.access
    assert target.url is not None
    return WebSocketDialer(
        target.url,
        token=access.read_token(),
        tls=tls or _context(access),
        allow_insecure_token=access.allow_insecure_token,
    )


def _relay_dialer(
    target: Target, account_id: str | None, tls: ssl.SSLContext | None, on_retry: OnRetry | None
) -> Dialer:
    """The dialer of an environment; token and certificates may be those of a login."""
    from exec_server.client.engine.relay import RelayDialer  # slow to import

    access = target.access
    assert target.registry is not None
    assert target.environment_id is not None
    token = access.read_token()
    if token is None and (login := find_login(target.registry)) is not None:
        token = login.read_token("client")
        if access.ca_file is None and not access.pin:
            access = access._replace(ca_file=login.ca_file, pin=login.pins)
    if token is None:
        registry = without_secrets(target.registry)
        raise StartupError(
            f"the registry requires a token: run `exec-server login {registry}`, or pass "
            "token=, --token-file or --token-env, or write token_file into targets.toml"
        )
    return RelayDialer(
        target.registry,
        target.environment_id,
        token=token,
        account_id=account_id,
        executor_key_fingerprint=access.executor_key,
        tls=tls or _context(access),
        allow_insecure_token=access.allow_insecure_token,
        on_retry=on_retry,
    )


def _context(access: AccessOptions) -> ssl.SSLContext | None:
    """A context for the certificates to accept; None for those of the system."""
    if access.ca_file is None and not access.pin:
        return None
    return client_context(access.ca_file, access.pin)
