"""connect(): from what a caller knows of a server to an environment."""

from __future__ import annotations

import shlex
import ssl

from exec_server.client.dialers import Dialer, WebSocketDialer
from exec_server.client.environment import Environment
from exec_server.client.program import StdioDialer
from exec_server.client.session import CLIENT_NAME
from exec_server.errors import StartupError


def connect(
    target: str | None = None,
    *,
    token: str | None = None,
    registry: str | None = None,
    environment_id: str | None = None,
    executor_key: str | None = None,
    account_id: str | None = None,
    tls: ssl.SSLContext | None = None,
    allow_insecure_token: bool = False,
    client_name: str = CLIENT_NAME,
) -> Environment:
    """An environment for `async with`, which connects; this raises StartupError for nonsense.

    `target` is `ws://HOST:PORT` or `wss://HOST`, or `stdio:` and the words of a command that
    serves on its standard streams, quoted as in a shell. Instead of it, `registry` (a URL) and
    `environment_id` name a machine behind a relay; `executor_key` is then the fingerprint of its
    key, for who does not trust the registry. `token` proves who we are to the server or the
    registry; it goes only to this machine or over TLS, unless `allow_insecure_token`. `tls` is a
    context of your own, for roots that the system does not know.
    """
    dialer: Dialer
    if registry is not None:
        if target is not None or environment_id is None or token is None:
            raise StartupError("a registry needs environment_id and token, and no target")
        from exec_server.client.relay_dialers import RelayDialer  # takes a while to load

        dialer = RelayDialer(
            registry,
            environment_id,
            token=token,
            account_id=account_id,
            executor_key_fingerprint=executor_key,
            tls=tls,
            allow_insecure_token=allow_insecure_token,
        )
    elif target is None:
        raise StartupError("where to? Give a URL, stdio:COMMAND, or a registry")
    elif target.startswith("stdio:"):
        dialer = _program(target.removeprefix("stdio:"))
    else:
        dialer = WebSocketDialer(
            target, token=token, tls=tls, allow_insecure_token=allow_insecure_token
        )
    return Environment(dialer, client_name=client_name)


def _program(command: str) -> StdioDialer:
    try:
        return StdioDialer(shlex.split(command))
    except ValueError as error:
        raise StartupError(f"the command after stdio: cannot be taken apart: {error}") from None
